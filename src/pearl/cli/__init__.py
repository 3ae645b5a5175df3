"""The command line: one small file per verb, no logic. torch is imported when a verb needs it, never for --help."""

import os
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from io import TextIOWrapper
from typing import Annotated

import typer

STARTED = time.perf_counter()  # for `pearl predict --verbose`

from pearl.cli import (  # noqa: E402
    cache,
    doctor,
    evaluate,
    export,
    inspect,
    learn,
    list,
    predict,
    refit,
    report,
    resume,
    run,
    show,
    sweep,
    table,
)
from pearl.cli.memory import keep_freed_memory  # noqa: E402
from pearl.cli.options import Verb  # noqa: E402
from pearl.errors import Busy, Interrupted, Lost, PearlError, Printable, short_of_memory, shortened  # noqa: E402
from pearl.training import launch  # noqa: E402
from pearl.version import __version__  # noqa: E402

NAME = "pearl"  # however it was started: `python -m pearl` would be no word for a shell to complete

app = typer.Typer(
    name=NAME,
    help="Continual learning with low-rank adapters whose rank each layer and each task chooses for itself.",
    epilog="Start with: pearl run digits",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pearl {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", help="Say which pearl this is.", is_eager=True, callback=_say_version)
    ] = False,
) -> None:
    """What stands before a verb."""


for verb in (
    run,
    resume,
    refit,
    sweep,
    learn,
    predict,
    evaluate,
    inspect,
    export,
    report,
    table,
    list,
    show,
    cache,
    doctor,
):
    app.command(name=verb.__name__.rpartition(".")[2], cls=Verb)(verb.command)


def main() -> None:
    """Run the command line; what a user can mend is one line and exit code 2."""
    if "_PEARL_COMPLETE" in os.environ:  # a shell asks, and reads what it is told as it is
        app(prog_name=NAME)
    keep_freed_memory()
    watched = launch.enter()
    if isinstance(sys.stdout, TextIOWrapper):  # names of files and classes need not fit the terminal, nor be text
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    with redirect_stdout(Printable(sys.stdout)), redirect_stderr(Printable(sys.stderr)):
        _main(watched)


def _main(watched: bool) -> None:
    try:
        try:
            app(prog_name=NAME)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Interrupted as error:
        print(f"pearl: {error}", file=sys.stderr)
        sys.exit(130)
    except PearlError as error:
        if watched and isinstance(error, Lost):
            sys.exit(launch.LOST)  # the one that watches knows more
        for line in str(error).split("\n"):
            print(f"pearl: {shortened(line)}", file=sys.stderr)
        sys.exit(launch.BUSY if isinstance(error, Busy) else 2)
    except PermissionError as error:
        print(f"pearl: {error.filename}: no permission; mend it, or set PEARL_DATA or PEARL_RUNS", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"pearl: {error.filename}: {error.strerror}; give another one, or mend it", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not short_of_memory(error):
            raise
        print("pearl: out of memory; ask for less at a time, or free some", file=sys.stderr)
        sys.exit(2)
    except SystemExit as ended:
        # what typer makes of Ctrl-C outside of training, without a word
        if isinstance(getattr(ended.__context__, "__cause__", None), KeyboardInterrupt):
            print("pearl: interrupted; finished tasks are kept, the same command goes on after them", file=sys.stderr)
            sys.exit(130)
        raise
