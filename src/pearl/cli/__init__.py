"""The command line: one small file per verb, no logic. torch is imported when a verb needs it, never for --help."""

import os
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from io import TextIOWrapper
from typing import Annotated, NoReturn

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
    serve,
    show,
    sweep,
    table,
)
from pearl.cli.memory import keep_freed_memory  # noqa: E402
from pearl.cli.options import Verb  # noqa: E402
from pearl.errors import (  # noqa: E402
    LONGEST,
    Busy,
    Interrupted,
    Lost,
    OutputError,
    PearlError,
    Printable,
    short_of_memory,
)
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
    serve,
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
    _open_closed_streams()
    watched = launch.enter()
    if isinstance(sys.stdout, TextIOWrapper):  # names of files and classes need not fit the terminal, nor be text
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    out, err = Printable(sys.stdout, "standard output"), Printable(sys.stderr, "standard error", longest=LONGEST)
    with redirect_stdout(out), redirect_stderr(err):
        _main(watched)


def _open_closed_streams() -> None:
    """Have standard streams that are closed (`>&-`) lead nowhere: a file of a model would be opened in their place."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = (
        stream or open(os.devnull, mode)  # noqa: SIM115, PTH123
        for stream, mode in ((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w"))
    )


def _main(watched: bool) -> None:
    try:
        try:
            app(prog_name=NAME)
        except SystemExit:
            sys.stdout.flush()  # while an error of it can still be told
            raise
    except BrokenPipeError:  # whoever read the output has seen enough
        _end(1)
    except Interrupted as error:
        _end(launch.INTERRUPTED, str(error))
    except PearlError as error:
        if watched and isinstance(error, Lost):
            _end(launch.LOST)  # the one that watches knows more
        _end(launch.BUSY if isinstance(error, Busy) else 2, *str(error).split("\n"))
    except OSError as error:
        if error.filename is None:
            raise
        denied = f"{error.filename}: no permission; mend it, or set PEARL_DATA or PEARL_RUNS"
        other = f"{error.filename}: {error.strerror}; give another one, or mend it"
        _end(2, denied if isinstance(error, PermissionError) else other)
    except (MemoryError, RuntimeError) as error:
        if not short_of_memory(error):
            raise
        _end(2, "out of memory; ask for less at a time, or free some")
    except SystemExit as ended:
        # what typer makes of Ctrl-C outside of training, without a word
        if isinstance(getattr(ended.__context__, "__cause__", None), KeyboardInterrupt):
            _end(launch.INTERRUPTED, "interrupted; finished tasks are kept, the same command goes on after them")
        raise


def _end(code: int, *lines: str) -> NoReturn:
    """End with an exit code, after a line for each thing that is wrong; also if nothing more can be printed."""
    for stream, words in ((sys.stdout, ()), (sys.stderr, lines)):
        try:
            for line in words:
                print(f"pearl: {line}", file=stream)
            stream.flush()
        except (OutputError, BrokenPipeError):  # what is left goes nowhere: the interpreter flushes when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
