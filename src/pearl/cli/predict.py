"""pearl predict MODEL PATH..."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pearl.cli.options import Device, OwnMethod, Tasks
from pearl.cli.started import STARTED


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of a model or run.")],
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Images, folders, or - for a list on stdin.")],
    task: Annotated[str | None, typer.Option(help="Predict among this task's classes alone (task-IL).")] = None,
    top: Annotated[int, typer.Option("--top", "-k", min=1, help="Classes per image.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values with a header.")] = False,
    unknown_rate: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Share of images of known classes that the threshold rejects as unknown; 0.05 if not given. Needs "
            "class statistics, which new models have.",
        ),
    ] = None,
    no_unknown: Annotated[
        bool, typer.Option("--no-unknown", help="Always predict a known class; call no image unknown.")
    ] = False,
    tasks: Tasks = None,
    method: OwnMethod = None,
    device: Device = "auto",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print the seconds of each part.")] = False,
) -> None:
    """Predict the classes of photos. Unreadable images are reported, the others predicted; the exit code is then 1.

    \b
    pearl predict shop photo.jpg
    pearl predict shop photos/ --top 3 --csv > names.csv
    pearl predict shop photos/ --unknown-rate 0.01
    find . -name '*.jpg' | pearl predict shop - --json
    """
    from pearl.errors import ConfigError, printable

    if as_json and as_csv:
        raise ConfigError("--json and --csv cannot be combined; keep one")
    if no_unknown and unknown_rate is not None:
        raise ConfigError("--no-unknown and --unknown-rate cannot be combined; keep one")
    times = {"start": STARTED}
    from pearl.lifecycle.predict import named, predict_files, writer

    def say(line: str) -> None:
        typer.echo(f"pearl: {printable(line)}", err=True)

    files = named(paths, sys.stdin, say=say)
    from pearl.lifecycle.model import StoredModel
    from pearl.lifecycle.saved import read_config
    from pearl.settings.config import OnlineModelConfig

    times["import"] = time.perf_counter()
    rate: float | Literal["auto"] | None = None if no_unknown else "auto" if unknown_rate is None else unknown_rate
    if isinstance(read_config(model), OnlineModelConfig):
        from pearl.online.stream_model import open_stream

        if tasks is not None:
            raise ConfigError(f"--tasks {tasks}: {model} learns from a stream, without tasks; leave it out")
        opened: Any = open_stream(model, device=device)
        rate, scored = unknown_rate, False
    else:
        opened = StoredModel.open(model, tasks=tasks, device=device, method=method)
        if task is not None:
            opened.task_index(task)  # a wrong name is reported before the weights are read
        scored = opened.has_ood_scores and not no_unknown
        if opened.first_answer:
            say(f"note: {opened.first_answer}")
    times["load"] = time.perf_counter()
    form: Literal["json", "csv", "table"] = "json" if as_json else "csv" if as_csv else "table"
    write = writer(form, sys.stdout, scored=scored)
    unreadable = predict_files(opened, files, write, task=task, top=top, unknown_rate=rate, say=say)
    times["compute"] = time.perf_counter()
    for line in unreadable:
        say(line)
    if verbose:
        moments = list(times.values())
        spent = zip(list(times)[1:], moments[1:], moments[:-1], strict=True)
        typer.echo(", ".join(f"{name} {end - begin:.2f} s" for name, end, begin in spent), err=True)
    if unreadable:
        raise typer.Exit(1)
