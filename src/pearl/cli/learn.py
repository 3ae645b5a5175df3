"""pearl learn MODEL --data DIR"""

from pathlib import Path
from typing import Annotated

import typer

from pearl.cli.options import StoreEvery


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of the model; made on its first task.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, as train.epochs=5.")
    ] = None,
    data: Annotated[
        Path, typer.Option(help="Images in a folder per class: DIR/CLASS/*, or DIR/train/CLASS/* and DIR/test/.")
    ] = ...,  # type: ignore[assignment]
    task: Annotated[str | None, typer.Option(help="Name of the task; the folder's name if not given.")] = None,
    backbone: Annotated[
        str | None, typer.Option(help="First task: the network, as resnet18, bsc or timm/NAME (pretrained).")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="First task: the recipe whose settings are used.")] = None,
    method: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE.py:CLASS", help="First task: the method; later: its file, if it has one."),
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option(metavar="FOLDER=CLASS", help="A folder that shows a class of another name.")
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Add classes in seconds, by their statistics alone, without training.")
    ] = False,
    start: Annotated[Path | None, typer.Option("--from", help="First task: a run or model to go on from.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    store_every: StoreEvery = 10.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Learn new classes from a folder of images; what was learnt before stays as it is, and needs no old image.

    \b
    pearl learn shop --data fruit --backbone timm/deit_tiny_patch16_224
    pearl learn shop --data vegetables
    pearl learn shop --data packages --task october train.epochs=20
    pearl learn shop --data one_more_class --fast
    pearl learn shop --data sketches --alias "apple drawings=apple"
    """
    from pearl.cli.options import aliases
    from pearl.errors import DataError, printable
    from pearl.lifecycle.learning import learn
    from pearl.lifecycle.model import Model
    from pearl.reports.progress import display
    from pearl.reports.text import evaluation_page
    from pearl.settings.config import merge, parse_overrides

    settings = merge({"method": method} if method else {}, parse_overrides(overrides or []))
    learn(
        model,
        data,
        task=task,
        recipe=recipe,
        backbone=backbone,
        start=start,
        overrides=settings,
        device=device,
        aliases=aliases(alias),
        fast=fast,
        show=display(quiet),
        minutes=store_every,
    )
    grown = Model.open(model, device=device, method=method)
    new = grown.tasks[-1]
    counts = f"{len(new.classes)} classes, {len(grown.classes)} in all"
    typer.echo(f"learnt task {printable(new.name)}: {counts}; stored in {model}")
    if (data / "test").is_dir():
        try:
            typer.echo(evaluation_page(grown.evaluate(data)))
        except DataError as error:
            for line in f"the task is learnt, but not evaluated: {error}".split("\n"):
                typer.echo(f"pearl: {printable(line)}", err=True)
            raise typer.Exit(1) from None
