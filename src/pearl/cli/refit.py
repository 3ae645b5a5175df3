"""pearl refit RUN, pearl refit MODEL --data DIR --to NEW"""

from pathlib import Path
from typing import Annotated

import typer

from pearl.cli.options import Alias, Device, aliases_of, begun


def command(
    directory: Annotated[Path, typer.Argument(metavar="RUN|MODEL", help="A finished run, or a model with heads.")],
    classifier: Annotated[
        str, typer.Argument(metavar="CLASSIFIER", help="heads, statistics, or '{name: statistics, spaces: 2}'.")
    ] = "statistics",
    data: Annotated[
        list[Path] | None, typer.Option(help="For a model: images of its classes, a folder per class; repeatable.")
    ] = None,
    to: Annotated[Path | None, typer.Option(metavar="NEW", help="For a model: directory of the new model.")] = None,
    alias: Alias = None,
    method: Annotated[
        str | None, typer.Option(metavar="FILE.py:CLASS", help="For a model: the file of its method, if it has one.")
    ] = None,
    device: Device = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Fit another classifier to the same sub-networks, without training them again.

    A run reads its images by its recipe. A model gets class statistics from images of all its classes; the result is a
    new model, the old one is unchanged.

    \b
    pearl refit runs/NAME
    pearl refit runs/NAME '{name: statistics, spaces: all}'
    pearl refit shop --data fruit --data vegetables --to shop2
    """
    begun(f"refit {directory}", quiet)
    from pearl.errors import ConfigError
    from pearl.lifecycle.refit import refit, refit_model
    from pearl.reports.progress import display
    from pearl.reports.text import run_page
    from pearl.settings.config import parse_value

    spec, named = parse_value("CLASSIFIER", classifier), aliases_of(alias)
    if data:
        from pearl.settings.parts import METHODS

        new = to or directory.with_name(f"{directory.resolve().name}-refitted")
        known = METHODS.admit(method) if method else None
        refit_model(directory, data, new, spec, aliases=named, method=known, device=device, show=display(quiet))
        typer.echo(f"wrote {new}, with class statistics; {directory} is unchanged")
        return
    if given := [f"--{name}" for name, value in (("to", to), ("alias", alias), ("method", method)) if value]:
        raise ConfigError(f"{', '.join(given)}: only for models; give the model's images with --data")
    typer.echo(run_page(refit(directory, spec, device=device, show=display(quiet))))
