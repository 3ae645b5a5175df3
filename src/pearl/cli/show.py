"""pearl show NAME"""

from typing import Annotated

import typer


def command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A method (or FILE.py:CLASS), backbone, data source, rank rule, recipe, run, or settings of "
            "stream, images, train, engine.",
        ),
    ],
) -> None:
    """Show details of a name: options or settings with defaults, a recipe's settings, a run's results.

    \b
    pearl show pearl
    pearl show train
    pearl show cifar100-5t-resnet18
    pearl show runs/NAME
    """
    from pearl.reports.text import page

    typer.echo(page(name))
