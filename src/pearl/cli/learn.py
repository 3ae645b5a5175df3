"""pearl learn MODEL --data DATA"""

from pathlib import Path
from typing import Annotated, Any

import typer

from pearl.cli.options import Alias, Device, Log, Nested, StoreEvery, aliases_of, begun


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of the model; created by the first task.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, such as train.epochs=5.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DATA",
            help="Images in a folder per class: DIR/CLASS/*, or DIR/train/CLASS/* and DIR/test/; a .csv of paths and "
            "labels; torchvision/NAME or hf/NAME. Needed without --watch.",
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Name of the task; the folder's name if not given.")] = None,
    backbone: Annotated[
        str | None, typer.Option(help="First task: the network, such as resnet18, bsc or timm/NAME (pretrained).")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="First task: the recipe whose settings are used.")] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.py:CLASS",
            help="First task: the method (compared by `pearl list methods --long`); later: its file, if it has one.",
        ),
    ] = None,
    alias: Alias = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Add classes in seconds by class statistics, without training.")
    ] = False,
    no_first_answer: Annotated[
        bool,
        typer.Option(
            "--no-first-answer",
            help="Store no model by class statistics alone before training; otherwise it is used until training ends.",
        ),
    ] = False,
    nested: Nested = False,
    holdout: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Hold out this share of each class for evaluation."),
    ] = 0.0,
    allow_new_style: Annotated[
        bool,
        typer.Option(
            "--allow-new-style", help="Learn images of known classes even if the model recognises none of them."
        ),
    ] = False,
    evaluate: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Also evaluate on these images at the end; old or new classes; repeatable."),
    ] = None,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Learn from the images as they come, without tasks: the lines of a .csv in order, or files of folders "
            "by their time stamps. The same command takes up new ones.",
        ),
    ] = False,
    watch: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="With --stream, instead of --data: learn from a folder per class, and from new files as they appear, "
            "until Ctrl-C.",
        ),
    ] = None,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="With --watch: time between two checks.")] = 5.0,
    unlabelled: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="With --stream: the folder whose images have no class; `pearl discover` groups them."
        ),
    ] = "unlabelled",
    discard: Annotated[
        bool, typer.Option("--discard", help="Discard a task whose training was cut off, and start it again.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the task needs: memory, disk and steps; change nothing.")
    ] = False,
    start: Annotated[Path | None, typer.Option("--from", help="First task: a run or model to continue from.")] = None,
    device: Device = "auto",
    store_every: StoreEvery = 10.0,
    log: Log = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Learn new classes from images. Earlier tasks keep their weights, and no old images are needed.

    Where frozen features exist, a first model is stored within seconds and used until training has ended. Ctrl-C keeps
    it, and `pearl resume` continues the training.

    At the end it prints the accuracy: measured on DIR/test, --holdout and --evaluate, otherwise estimated.

    \b
    pearl learn shop --data fruit --backbone timm/deit_tiny_patch16_224
    pearl learn shop --data vegetables
    pearl learn shop --data packages --task october train.epochs=20
    pearl learn shop --data one_more_class --fast
    pearl learn shop --data photos.csv --task july
    pearl learn shop --data photos.csv --stream
    pearl learn shop --stream --watch camera
    pearl learn shop --data herbs --holdout 0.1 --evaluate test_photos
    pearl learn shop --data sketches --alias "apple drawings=apple"
    """
    begun(f"learn {model}", quiet)
    from pearl.errors import ConfigError, DataError, counted, printable

    if stream:
        from pearl.cli.streaming import learn_from_stream

        other = [task, method, alias, start, evaluate, log, fast, no_first_answer, nested, holdout, allow_new_style]
        other += [discard, dry_run]
        if any(other):
            raise ConfigError(
                "--stream: goes with --unlabelled, --recipe, --backbone, --device and settings alone; leave the others "
                "out"
            )
        source = watch or data
        if source is None or (watch and data):
            raise ConfigError("--stream: give either --data or --watch")
        given = {"recipe": recipe, "backbone": backbone, "device": device}
        learn_from_stream(model, source, every if watch else None, unlabelled, given, overrides or [], quiet=quiet)
        return
    if watch is not None:
        raise ConfigError("--watch: learns from a stream; add --stream")
    if data is None:
        raise ConfigError("learn: missing option '--data'; see: pearl learn --help")
    from pearl.lifecycle import evaluation
    from pearl.lifecycle.accuracy_estimate import measured
    from pearl.lifecycle.choices import LearnOptions
    from pearl.lifecycle.learning import learn
    from pearl.lifecycle.model import StoredModel
    from pearl.reports.learning_summary import ending
    from pearl.reports.logs import logged
    from pearl.reports.progress import display
    from pearl.settings.config import merge, parse_overrides

    settings = merge({"method": method} if method else {}, parse_overrides(overrides or []))
    aliases = aliases_of(alias)
    options = LearnOptions(
        task=task,
        recipe=recipe,
        backbone=backbone,
        start=start,
        aliases=aliases,
        fast=fast,
        first_answer=not no_first_answer,
        nested=nested,
        holdout=holdout,
        allow_new_style=allow_new_style,
        discard=discard,
        overrides=settings,
    )
    if dry_run:
        learn(model, data, options, device=device, plan=typer.echo)
        return
    learn(model, data, options, device=device, show=logged(display(quiet), log or [], model), minutes=store_every)
    grown = StoredModel.open(model, device=device, method=method)
    new = grown.tasks[-1]
    shown = counted(len(new.classes), "class") if new.classes else "known classes again"
    counts = f"{shown}, {len(grown.classes):,} in all"
    typer.echo(f"learnt task {printable(new.name)}: {counts}; stored in {model}")
    measured_on = [*([data] if (data / "test").is_dir() else []), *(evaluate or [])]
    try:
        reading: dict[str, Any] = {"aliases": aliases, "nested": nested, "some_aliases": True}
        measurement = measured(evaluation.evaluate(grown, measured_on, **reading)) if measured_on else None
    except DataError as error:
        for line in f"the task is learnt, but not evaluated: {error}".split("\n"):
            typer.echo(f"pearl: {printable(line)}", err=True)
        raise typer.Exit(1) from None
    if measurement or not quiet:
        typer.echo(ending(grown, measurement))
