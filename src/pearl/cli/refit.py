"""pearl refit RUN"""

from pathlib import Path
from typing import Annotated

import typer


def command(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a finished run.")],
    classifier: Annotated[
        str, typer.Argument(metavar="CLASSIFIER", help="heads, chain, or '{name: chain, spaces: 2}'.")
    ] = "chain",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """The same sub-networks under another classifier: what the run would have been with it, without training.

    \b
    pearl refit runs/NAME
    pearl refit runs/NAME '{name: chain, spaces: all}'
    """
    from pearl.lifecycle.refit import refit
    from pearl.reports.progress import display
    from pearl.reports.text import run_page
    from pearl.settings.documents import parse_yaml

    typer.echo(run_page(refit(directory, parse_yaml(classifier), device=device, show=display(quiet))))
