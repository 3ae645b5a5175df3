"""pearl discover MODEL PATH..."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pearl.cli.options import Device, OwnMethod, Tasks, UnknownRate

if TYPE_CHECKING:
    from pearl.lifecycle.discovery import Describer


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of a model or run.")],
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH]...",
            help="Images, folders, or - for a list on stdin. Without any: the unlabelled images of a stream that "
            "looked unknown.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a page with a contact sheet for each group.")
    ] = None,
    as_csv: Annotated[
        Path | None,
        typer.Option(
            "--csv", metavar="FILE.csv", help="Write a list of paths and labels, for `pearl learn` once it has names."
        ),
    ] = None,
    unknown_rate: UnknownRate = 0.05,
    tasks: Tasks = None,
    method: OwnMethod = None,
    device: Device = "auto",
) -> None:
    """Group the photos that a model finds unknown, as candidates for new classes.

    Needs class statistics, or a model that learns from a stream with the learner pearl.

    Name the groups in the list, then learn it. Unreadable images are reported; the exit code is then 1.

    \b
    pearl discover shop photos/ -o new.html --csv new.csv
    pearl learn shop --data new.csv
    """
    from pearl.errors import ConfigError, printable
    from pearl.lifecycle.discovery import check_list, discover
    from pearl.lifecycle.model import StoredModel
    from pearl.lifecycle.predict import named
    from pearl.lifecycle.saved import read_config
    from pearl.reports.discovered import write
    from pearl.settings.config import OnlineModelConfig
    from pearl.storage.files import HTML, check_output, write_file

    if output is not None:
        check_output(output, HTML, "page")
    if as_csv is not None:
        check_list(as_csv)

    def say(line: str) -> None:
        typer.echo(f"pearl: {printable(line)}", err=True)

    of_stream = isinstance(read_config(model), OnlineModelConfig)
    if not of_stream and not paths:
        raise ConfigError("discover: missing argument 'PATH...'; see: pearl discover --help")
    if of_stream and (tasks is not None or method is not None):
        raise ConfigError(f"{model} learns from a stream, without tasks; leave out --tasks and --method")
    files: Sequence[str | Path] = [*named(paths, sys.stdin, say=say)] if paths else []
    opened: Describer
    if of_stream:
        from pearl.online.stream_model import open_stream

        streaming = open_stream(model, device=device)
        opened, files = streaming, files or streaming.unknown_files()
    else:
        opened = StoredModel.open(model, tasks=tasks, device=device, method=method)
    discovery = discover(opened, files, unknown_rate=unknown_rate)
    if as_csv is not None:
        write_file(as_csv, discovery.as_csv().encode(), fix="choose another path with --csv")
    if output is not None:
        title = f"{model.resolve().name}: unknown images of {', '.join(paths or ['its stream'])}"
        write(discovery, output, title, model=str(model), groups=str(as_csv or "groups.csv"), stream=of_stream)
    typer.echo(repr(discovery))
    for count, what in ((len(discovery.duplicates), "duplicates"), (len(discovery.near_duplicates), "near-duplicates")):
        if count:
            typer.echo(f"images with {what}: {count}")
    for file in (as_csv, output):
        if file is not None:
            typer.echo(f"wrote {file}")
    for line in discovery.unreadable:
        say(line)
    if discovery.unreadable:
        raise typer.Exit(1)
