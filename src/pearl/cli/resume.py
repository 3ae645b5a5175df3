"""pearl resume RUN"""

from pathlib import Path
from typing import Annotated

import typer


def command(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, or of a model.")],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    store_every: Annotated[float, typer.Option(help="Minutes between two stored moments of training.")] = 10.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Go on where a run, or the learning of a task, was cut off: the result is the same as if it never was.

    \b
    pearl resume runs/NAME
    """
    from pearl.config import RunConfig
    from pearl.learning import resume
    from pearl.progress import display
    from pearl.runs import execute
    from pearl.saved import read_config
    from pearl.text import run_page

    config = read_config(directory)
    if isinstance(config, RunConfig):
        run = execute(config, path=directory, device=device, show=display(quiet), minutes=store_every)
        typer.echo(run_page(run))
    else:
        resume(directory, device=device, show=display(quiet), minutes=store_every)
        typer.echo(f"learnt; the model is {directory}")
