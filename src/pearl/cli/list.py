"""pearl list methods|backbones|data|recipes|runs"""

from enum import StrEnum
from typing import Annotated

import typer


class Kind(StrEnum):
    """What can be listed."""

    methods = "methods"
    backbones = "backbones"
    data = "data"
    recipes = "recipes"
    runs = "runs"


def command(
    what: Annotated[Kind, typer.Argument(metavar="KIND", help="What to list.")],
    long: Annotated[bool, typer.Option("--long", "-l", help="Methods: what each needs.")] = False,
) -> None:
    """List what there is. `pearl show NAME` tells more about each.

    \b
    pearl list recipes
    pearl list methods --long
    pearl list runs
    """
    from pearl.reports.text import listing

    typer.echo(listing(what.value, long=long))
