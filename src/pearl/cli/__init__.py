"""The command line: one small file per verb, without logic. --help does not import torch; verbs that need it do."""

import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import TextIOWrapper
from typing import Annotated, NoReturn

import typer

from pearl.cli import (
    cache,
    discover,
    doctor,
    evaluate,
    export,
    forget,
    inspect,
    learn,
    list,
    predict,
    push,
    refit,
    rename,
    report,
    resume,
    run,
    serve,
    show,
    sweep,
    table,
    undo,
    verify,
)
from pearl.cli.memory import keep_freed_memory
from pearl.cli.options import Verb, Verbs
from pearl.errors import (
    LONGEST,
    Busy,
    Interrupted,
    Lost,
    OutputError,
    PearlError,
    Printable,
    short_of_memory,
)
from pearl.training import launch
from pearl.version import __version__

NAME = "pearl"  # also for `python -m pearl`, whose own name a shell could not complete

app = typer.Typer(
    name=NAME,
    cls=Verbs,
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
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_say_version)
    ] = False,
) -> None:
    """Options that stand before the verb."""


for verb in (
    run,
    resume,
    refit,
    sweep,
    learn,
    predict,
    evaluate,
    discover,
    serve,
    undo,
    rename,
    forget,
    verify,
    inspect,
    export,
    push,
    report,
    table,
    list,
    show,
    cache,
    doctor,
):
    app.command(name=verb.__name__.rpartition(".")[2], cls=Verb)(verb.command)


def main() -> None:
    """Run the command line. User errors print one line each and exit with code 2."""
    if "_PEARL_COMPLETE" in os.environ:  # a shell's completion reads the output unchanged
        app(prog_name=NAME)
    keep_freed_memory()
    _open_closed_streams()
    watched = launch.enter()
    if isinstance(sys.stdout, TextIOWrapper):  # names may have characters that the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    out, err = Printable(sys.stdout, "standard output"), Printable(sys.stderr, "standard error", longest=LONGEST)
    with redirect_stdout(out), redirect_stderr(err):
        _main(watched)


def _open_closed_streams() -> None:
    """Open the null device in place of closed standard streams (`>&-`); a model's file would get their descriptors."""
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
            sys.stdout.flush()  # while an error can still be reported
            raise
    except BrokenPipeError:  # the program that read the output has ended
        _end(1)
    except Interrupted as error:
        _end(launch.INTERRUPTED, str(error))
    except PearlError as error:
        if watched and isinstance(error, Lost):
            _end(launch.LOST)  # the parent process reports it with more detail
        _end(launch.BUSY if isinstance(error, Busy) else 2, *str(error).split("\n"))
    except OSError as error:
        if error.filename is None:
            raise
        denied = f"{error.filename}: permission denied; change its permissions, or set PEARL_DATA or PEARL_RUNS"
        other = f"{error.filename}: {error.strerror}; fix it, or give another path"
        _end(2, denied if isinstance(error, PermissionError) else other)
    except (MemoryError, RuntimeError) as error:
        if not short_of_memory(error):
            raise
        _end(2, "out of memory; process less at a time, or free memory")
    except SystemExit as ended:
        # typer's exit on Ctrl-C outside of training, which prints nothing
        if isinstance(getattr(ended.__context__, "__cause__", None), KeyboardInterrupt):
            _end(launch.INTERRUPTED, "interrupted; finished tasks are stored; run the same command to continue")
        raise


def _end(code: int, *lines: str) -> NoReturn:
    """Print a line for each problem and exit with `code`, even if the streams can no longer be written."""
    for stream, words in ((sys.stdout, ()), (sys.stderr, lines)):
        try:
            for line in words:
                print(f"pearl: {line}", file=stream)
            stream.flush()
        except (OutputError, BrokenPipeError):  # discard the rest, which the interpreter flushes at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
