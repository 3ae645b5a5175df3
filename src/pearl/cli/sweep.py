"""pearl sweep RECIPE [key=[a,b] key=value ...]"""

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from pearl.cli.ending import failures_listed
from pearl.cli.options import Device


class Where(StrEnum):
    """The places where jobs can run."""

    local = "local"
    slurm = "slurm"


def command(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="Name of a recipe (`pearl list recipes`) or path of a YAML file.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=[A,B]|KEY=VALUE]...", help="Axes of the grid, such as method=[er,lwf], and settings."
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Their number, such as 3 (0, 1 and 2), or a list, such as 0,1,5.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Parallel runs. [default: one per GPU, or per 4 cores; on SLURM all]")
    ] = None,
    per_gpu: Annotated[int, typer.Option(help="Runs that share a GPU.")] = 1,
    executor: Annotated[Where, typer.Option(help="local or slurm.")] = Where.local,
    slurm: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of sbatch, such as partition=gpu; repeatable.")
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Test run: one step per phase on a few images.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the jobs and their state; run none.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the table, to a .csv, .md or .json file.")
    ] = None,
    device: Device = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Run every combination of settings with every seed, several in parallel, and print means over the seeds.

    Finished runs are not run again, so the same command resumes the sweep. Failed runs are listed at the end; the
    others finish, and the exit code is 1.

    \b
    pearl sweep digits method=[pearl,er,lwf] --seeds 3
    pearl sweep cifar100-5t-resnet18 'method.rank.name=[paper,energy]' stream.order=[1,2] --seeds 0,1,5 --dry-run
    pearl sweep digits train.lr=[0.001,0.003] train.epochs=5 --workers 4 -o table.md
    pearl sweep imagenet_r-10t-vit method=[pearl,l2p] --executor slurm --slurm partition=gpu --slurm gpus_per_node=1
    """
    from pearl.storage.files import check_output
    from pearl.sweeps.jobs import run_jobs
    from pearl.sweeps.live_status import board
    from pearl.sweeps.slurm import parse_options
    from pearl.sweeps.sweep import FORMATS, page, parse, plan, rows, write
    from pearl.sweeps.workers import executor_for

    if output is not None:
        check_output(output, FORMATS, "table")
    options = parse_options(slurm or [])
    sweep = parse(recipe, settings or [], seeds, smoke=smoke)
    arguments: Any = {
        "workers": workers,
        "executor": executor.value,
        "device": device,
        "per_gpu": per_gpu,
        "slurm": options,
    }
    if dry_run:
        count = len({job.run for job in sweep.jobs})
        typer.echo(plan(sweep, executor_for(count, sweep.path, **arguments).workers))
        return
    outcomes = run_jobs(
        sweep.jobs,
        folder=sweep.path,
        manifest=sweep.manifest(shlex.join(["pearl", *sys.argv[1:]])),
        show=board(quiet),
        **arguments,
    )
    with failures_listed(outcomes):
        table = rows(sweep, outcomes)
        typer.echo(page(sweep, table))
        if output is not None:
            typer.echo(f"written: {write(sweep, table, output)}")
