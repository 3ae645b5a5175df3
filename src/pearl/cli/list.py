"""pearl list methods|backbones|data|ranks|recipes|runs|tables"""

from enum import StrEnum
from typing import Annotated

import typer


class Kind(StrEnum):
    """The kinds of things that can be listed."""

    methods = "methods"
    backbones = "backbones"
    data = "data"
    ranks = "ranks"
    recipes = "recipes"
    runs = "runs"
    tables = "tables"


def command(
    what: Annotated[Kind, typer.Argument(metavar="KIND", help="What to list.")],
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Methods: add requirements and measured accuracy and seconds.")
    ] = False,
) -> None:
    """List available methods, backbones, data, rank rules, recipes, runs or tables. `pearl show NAME` has details.

    \b
    pearl list recipes
    pearl list methods --long
    pearl list runs
    """
    from pearl.reports.text import aligned, listing

    if what is Kind.tables:
        from pearl.tables.spec import names, read

        typer.echo(aligned([[name, read(name).title] for name in names()]))
        return
    typer.echo(listing(what.value, long=long))
