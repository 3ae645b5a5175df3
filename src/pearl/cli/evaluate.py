"""pearl evaluate MODEL --data DATA"""

from pathlib import Path
from typing import Annotated

import typer

from pearl.cli.options import Alias, Device, Nested, OwnMethod, Tasks, UnknownRate, aliases_of


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
    unknown_rate: UnknownRate = 0.05,
    alias: Alias = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write a page of figures, with the worst mistakes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Counts and the whole confusion matrix as JSON.")] = False,
    nested: Nested = False,
    tasks: Tasks = None,
    method: OwnMethod = None,
    device: Device = "auto",
) -> None:
    """Evaluate a model: accuracy per class and task, confusions, calibration, detection of unknown classes.

    Folders of classes that the model has not learnt are out-of-distribution images, to be called unknown.

    \b
    pearl evaluate shop --data test_photos
    pearl evaluate shop --data test_photos -o test.html
    """
    from pearl.lifecycle.model import StoredModel
    from pearl.reports.evaluated import write
    from pearl.reports.text import evaluation_json, evaluation_page
    from pearl.storage.files import HTML, check_output

    if output is not None:
        check_output(output, HTML, "page")
    opened = StoredModel.open(model, tasks=tasks, device=device, method=method)
    if opened.first_answer:
        typer.echo(f"pearl: note: {opened.first_answer}", err=True)
    evaluation = opened.evaluate(data, unknown_rate=unknown_rate, aliases=aliases_of(alias), nested=nested)
    if output is not None:
        write(evaluation, output, f"{model.resolve().name} on {data}")
    typer.echo(evaluation_json(evaluation) if as_json else evaluation_page(evaluation))
    if output is not None:
        typer.echo(f"wrote {output}", err=as_json)
