"""The command line: one small file per verb, no logic. torch is imported when a verb needs it, never for --help."""

import sys

import typer

from pearl.cli import doctor, export, list, run, show
from pearl.errors import PearlError

app = typer.Typer(
    name="pearl",
    help="Continual learning with low-rank adapters whose rank each layer and each task chooses for itself.",
    epilog="Start with: pearl run digits",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for verb in (run, list, show, export, doctor):
    app.command(name=verb.__name__.rpartition(".")[2])(verb.command)


def main() -> None:
    """Run the command line; what a user can mend is one line and exit code 2."""
    try:
        app()
    except PearlError as error:
        for line in str(error).splitlines():
            print(f"pearl: {line}", file=sys.stderr)
        sys.exit(2)
    except PermissionError as error:
        print(f"pearl: {error.filename}: no permission; mend it, or set PEARL_DATA or PEARL_RUNS", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("pearl: interrupted; finished tasks are kept, the same command goes on after them", file=sys.stderr)
        sys.exit(130)
