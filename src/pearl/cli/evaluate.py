"""pearl evaluate MODEL --data DATA"""

from pathlib import Path
from typing import Annotated

import typer

from pearl.cli.options import Nested


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of a model or run.")],
    data: Annotated[
        Path,
        typer.Option(
            metavar="DATA",
            help="Images in a folder per class: DIR/CLASS/*, or DIR/test/CLASS/*; a .csv of paths and labels; "
            "torchvision/NAME or hf/NAME.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Counts and the whole confusion matrix as JSON.")] = False,
    nested: Nested = False,
    tasks: Annotated[int | None, typer.Option(min=1, help="Use the first so many tasks only.")] = None,
    method: Annotated[
        str | None, typer.Option(metavar="FILE.py:CLASS", help="The file of a method of your own, if it has one.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Accuracy per class and task on a folder of images, and what is taken for what.

    \b
    pearl evaluate shop --data test_photos
    """
    from pearl.lifecycle.model import Model
    from pearl.reports.text import evaluation_json, evaluation_page

    evaluation = Model.open(model, tasks=tasks, device=device, method=method).evaluate(data, nested=nested)
    typer.echo(evaluation_json(evaluation) if as_json else evaluation_page(evaluation))
