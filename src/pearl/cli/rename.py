"""pearl rename MODEL OLD NEW"""

from pathlib import Path
from typing import Annotated

import typer

from pearl.cli.options import DryRun, begun


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of the model.")],
    old: Annotated[str, typer.Argument(metavar="OLD", help="A class of the model.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Its new name.")],
    dry_run: DryRun = False,
) -> None:
    """Give a class another name, wherever the model stores it. Nothing is learnt or forgotten.

    \b
    pearl rename shop aple apple
    """
    begun(f"rename {model}", quiet=False)
    from pearl.lifecycle.rename import rename

    typer.echo(rename(model, old, new, dry_run=dry_run))
