"""pearl table NAME, pearl table list"""

from pathlib import Path
from typing import Annotated

import typer

from pearl.cli.ending import failures_listed
from pearl.cli.options import Device


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a table, or list for all names.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change in all runs of the table.")
    ] = None,
    run_missing: Annotated[bool, typer.Option("--run-missing", help="Run missing runs first.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, max=1000, help="Seeds per measured value. [default: 3]")] = None,
    size: Annotated[
        str,
        typer.Option(
            help="paper: the paper's recipes; schedule: the paper's epochs, smaller networks, hours on a CPU; cpu: "
            "2 minutes on a CPU; smoke: one step per phase."
        ),
    ] = "paper",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write it to a .md, .html, .csv or .tex file.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Parallel runs. [default: one per GPU, or per 4 cores]")] = None,
    per_gpu: Annotated[int, typer.Option(help="Runs that share a GPU.")] = 1,
    device: Device = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Compare a table or figure of the paper with the stored runs. Nothing is trained without --run-missing.

    Failed runs are listed, the others finish, and the exit code is 1.

    \b
    pearl table list
    pearl table growth
    pearl table fixed_rank --size cpu --seeds 2 --run-missing -o fixed_rank.html
    pearl table necil engine.precision=bf16
    """
    from pearl.errors import ConfigError
    from pearl.storage.files import check_output
    from pearl.tables.listing import listing
    from pearl.tables.missing import run_missing as run_all
    from pearl.tables.show import FORMATS, page, write
    from pearl.tables.spec import as_size, read
    from pearl.tables.values import fill

    at, extra = as_size(size), overrides or []
    if name == "list":
        if output is not None or run_missing:
            raise ConfigError("table list: prints names only; give the name of a table to run or write it")
        typer.echo(listing(at, seeds, extra))
        return
    if output is not None:
        check_output(output, [*FORMATS], "table")
    table = read(name)
    filled = fill(table, at, seeds, extra)
    outcomes = []
    if run_missing:
        from pearl.sweeps.live_status import board

        outcomes = run_all(filled, workers=workers, device=device, per_gpu=per_gpu, show=board(quiet))
        filled = fill(table, at, seeds, extra)
    with failures_listed(outcomes):
        typer.echo(page(filled))
        if output is not None:
            typer.echo(f"written: {write(filled, output)}")
