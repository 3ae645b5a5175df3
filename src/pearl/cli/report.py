"""pearl report RUN..."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Directories of runs or models, or names of runs.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page. [default: report.html in the run; for several runs, here]"),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", help="Also write the curves for TensorBoard, into this folder.")
    ] = None,
) -> None:
    """Make an HTML page of figures and tables about runs or models. It works without a network.

    \b
    pearl report runs/NAME
    pearl report runs/digits-pearl-* -o digits.html
    pearl report runs/NAME --tensorboard boards
    pearl report shop
    """
    from pearl.reports.page import write

    if tensorboard is not None:
        from pearl.reports.tensorboard import write as write_tensorboard

        typer.echo(write_tensorboard(runs, tensorboard))
    typer.echo(write(runs, output))
