"""pearl resume RUN"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from pearl.cli.options import Device, Log, OwnMethod, StoreEvery, begun
from pearl.errors import ConfigError
from pearl.training.launch import process_rank, start


def command(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, or of a model.")],
    method: OwnMethod = None,
    device: Device = "auto",
    devices: Annotated[int, typer.Option(help="Train a run on this many devices at once, one process each.")] = 1,
    store_every: StoreEvery = 10.0,
    log: Log = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Resume a run or a task that was cut off. The result is that of an uninterrupted run.

    \b
    pearl resume runs/NAME
    """
    here = process_rank(devices)
    if devices > 1 and here is None:
        raise typer.Exit(start(devices, sys.argv[1:]))
    if here is None:
        begun(f"resume {directory}", quiet)
    from pearl.lifecycle.changing import complete_interrupted
    from pearl.lifecycle.learning import resume
    from pearl.lifecycle.model import StoredModel
    from pearl.lifecycle.runs import execute
    from pearl.lifecycle.saved import check_method, read_config
    from pearl.reports.learning_summary import ending
    from pearl.reports.logs import logged
    from pearl.reports.progress import display
    from pearl.reports.text import run_page
    from pearl.settings.config import OnlineModelConfig, OnlineRunConfig, RunConfig
    from pearl.settings.parts import METHODS

    if done := complete_interrupted(directory):
        typer.echo(done)
        return
    named = METHODS.admit(method) if method else None
    config = read_config(directory)
    check_method(directory, config, named)
    if isinstance(config, OnlineModelConfig):
        raise ConfigError(
            f"{directory}: learns from a stream; the command that gave it images continues after the last"
        )
    if isinstance(config, OnlineRunConfig):
        from pearl.online.stream_run import execute as execute_online
        from pearl.reports.streams import online_page

        typer.echo(online_page(execute_online(config, path=directory, device=device, show=display(quiet))))
        return
    show = logged(display(quiet), log or [], directory)
    if isinstance(config, RunConfig):
        run = execute(config, path=directory, device=device, devices=devices, show=show, minutes=store_every)
        if here is None or here.rank == 0:
            typer.echo(run_page(run))
    else:
        if devices > 1:
            raise ConfigError(f"--devices {devices}: a model learns on one device; leave it out")
        resume(directory, device=device, show=show, minutes=store_every)
        typer.echo(f"learnt; stored in {directory}")
        if not quiet:
            typer.echo(ending(StoredModel.open(directory, device=device, method=method)))
