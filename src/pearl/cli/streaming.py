"""`pearl learn --stream`: learning from images as they come."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from pearl.online.stream_model import Intake, StreamModel


def learn_from_stream(
    model: Path,
    source: Path,
    every: float | None,
    unlabelled: str,
    options: dict[str, Any],
    overrides: list[str],
    *,
    quiet: bool,
) -> None:
    """Learn from the images of a list or folder; with `every`, also from new ones, looked for every so many seconds."""
    from pearl.online.arriving import check_source

    check_source(source, every)  # before seconds are spent on the network
    from pearl.online.stream_model import open_stream
    from pearl.reports.progress import display
    from pearl.settings.config import parse_overrides

    show = display(quiet)
    try:
        made = open_stream(model, overrides=parse_overrides(overrides), **options)
        if every is not None:
            for taken in made.watch(source, every=every, unlabelled=unlabelled, show=show):
                _report(made, taken, quiet=quiet)
            return
        taken = made.observe_files(source, unlabelled=unlabelled, show=show)
    finally:
        show.close()
    _report(made, taken, quiet=False)
    if taken.problems:
        raise typer.Exit(1)


def _report(made: "StreamModel", taken: "Intake", *, quiet: bool) -> None:
    """Print what was taken up; --quiet leaves the files that cannot be read."""
    from pearl.errors import counted, printable

    for line in taken.problems:
        typer.echo(f"pearl: {printable(line)}", err=True)
    if quiet:
        return
    if taken.learnt or not (taken.scored or taken.problems):
        typer.echo(
            f"learnt {counted(taken.learnt, 'image')}; {counted(len(made.classes), 'class')} from "
            f"{counted(made.seen, 'image')} in all; stored in {made.path}"
        )
    if taken.scored:
        looks = "looks" if taken.unknown == 1 else "look"
        hint = f"; group them with: pearl discover {made.path}" if taken.unknown else ""
        typer.echo(f"scored {counted(taken.scored, 'unlabelled image')}; {taken.unknown:,} {looks} unknown{hint}")
