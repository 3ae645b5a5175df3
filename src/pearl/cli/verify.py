"""pearl verify MODEL"""

from pathlib import Path
from typing import Annotated

import typer

from pearl.cli.options import begun


def command(model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of a model or run.")]) -> None:
    """Check every file of a model by its SHA-256, and every certificate of what it has forgotten.

    Prints a line for each check: ok, wrong, or superseded, for a certificate that is about files which were learnt or
    taken back since. The exit code is 2 if anything is wrong.

    \b
    pearl verify shop
    """
    begun(f"verify {model}", quiet=False)
    from pearl.lifecycle.saved import verification

    checks = verification(model)
    for state, line in checks:
        typer.echo(f"{state:10}  {line}")
    if any(state == "wrong" for state, _ in checks):
        raise typer.Exit(2)
