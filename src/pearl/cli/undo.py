"""pearl undo MODEL"""

from pathlib import Path
from typing import Annotated

import typer

from pearl.cli.options import DryRun, begun


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of the model.")],
    dry_run: DryRun = False,
) -> None:
    """Take back the last task: the model then equals the one before the last `pearl learn`, byte for byte.

    \b
    pearl undo shop
    """
    begun(f"undo {model}", quiet=False)
    from pearl.lifecycle.undo import undo

    typer.echo(undo(model, dry_run=dry_run))
