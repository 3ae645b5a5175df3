"""pearl run RECIPE [key=value ...]"""

import json
import sys
from typing import Annotated

import typer

from pearl.cli.options import Device, Log, StoreEvery, begun, recipes
from pearl.training.launch import process_rank, start


def command(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="Name of a recipe (`pearl list recipes`) or path of a YAML file.",
            autocompletion=recipes,
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, such as method=isolation.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.py:CLASS", help="The method: the same as method=NAME, or a class in your own file."
        ),
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Test run: one step per phase on a few images.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print tasks, steps and estimated time and size; train nothing."),
    ] = False,
    long: Annotated[bool, typer.Option("--long", help="With --dry-run: every setting, task and target.")] = False,
    timing: Annotated[
        bool, typer.Option("--timing/--no-timing", help="With --dry-run: time a pass, for an estimate of the time.")
    ] = True,
    device: Device = "auto",
    devices: Annotated[int, typer.Option(help="Train on this many devices at once, one process each.")] = 1,
    store_every: StoreEvery = 10.0,
    log: Log = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Learn a stream of tasks, or resume an earlier run of the same configuration.

    `pearl show` lists the settings: of stream, images, train, engine, and of a method, backbone or data source.

    \b
    pearl run digits
    pearl run cifar100-5t-resnet18 seed=1 method=isolation
    pearl run cifar100-5t-resnet18 method.rank.name=fixed method.rank.r=8
    pearl run cifar100-5t-deit_tiny --devices 4
    pearl run digits --method path/to/file.py:MyMethod method.my_option=2
    pearl run online-digits online.protocol=gaussian
    pearl run my_recipe.yaml train.phases.probe.epochs=5 --dry-run
    """
    here = process_rank(devices)
    if here is None:
        begun(f"run {recipe}", quiet)
    from pearl.errors import ConfigError
    from pearl.settings.config import OnlineRunConfig, load_config

    chosen = [f"method={json.dumps(method)}"] if method else []
    config = load_config(recipe, chosen + (overrides or []), smoke=smoke)
    if isinstance(config, OnlineRunConfig):
        if dry_run or devices > 1:
            option = "--dry-run" if dry_run else f"--devices {devices}"
            raise ConfigError(f"{option}: not for a run with hidden task boundaries; leave it out")
        from pearl.online.stream_run import execute as execute_online
        from pearl.reports.progress import display
        from pearl.reports.streams import online_page

        typer.echo(online_page(execute_online(config, device=device, show=display(quiet))))
        return
    if dry_run:
        from pearl.reports.plan import plan

        for line in plan(config, device=device, devices=devices, long=long, timing=timing):
            typer.echo(line)
        return
    if devices > 1 and here is None:
        raise typer.Exit(start(devices, sys.argv[1:]))
    from pearl.lifecycle.runs import execute
    from pearl.reports.logs import logged
    from pearl.reports.progress import display
    from pearl.reports.text import run_page
    from pearl.storage.paths import runs_root

    show = logged(display(quiet), log or [], runs_root() / config.id)
    run = execute(config, device=device, devices=devices, show=show, minutes=store_every)
    if here is None or here.rank == 0:
        typer.echo(run_page(run))
