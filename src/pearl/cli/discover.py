"""pearl discover MODEL PATH..."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from pearl.cli.options import Device, OwnMethod, Tasks, UnknownRate


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of a model or run.")],
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Images, folders, or - for a list on stdin.")],
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
    """Group the photos that a model finds unknown, as candidates for new classes. Needs class statistics.

    Name the groups in the list, then learn it. Unreadable images are reported; the exit code is then 1.

    \b
    pearl discover shop photos/ -o new.html --csv new.csv
    pearl learn shop --data new.csv
    """
    from pearl.errors import printable
    from pearl.lifecycle.discovery import check_list, discover
    from pearl.lifecycle.model import Model
    from pearl.lifecycle.predict import named
    from pearl.reports.discovered import write
    from pearl.storage.files import HTML, check_output, write_file

    if output is not None:
        check_output(output, HTML, "page")
    if as_csv is not None:
        check_list(as_csv)

    def say(line: str) -> None:
        typer.echo(f"pearl: {printable(line)}", err=True)

    files = named(paths, sys.stdin, say=say)
    found = discover(Model.open(model, tasks=tasks, device=device, method=method), files, unknown_rate=unknown_rate)
    if as_csv is not None:
        write_file(as_csv, found.as_csv().encode(), fix="choose another path with --csv")
    if output is not None:
        title = f"{model.resolve().name}: unknown images of {', '.join(paths)}"
        write(found, output, title, model=str(model), groups=str(as_csv or "groups.csv"))
    typer.echo(repr(found))
    for count, what in ((len(found.duplicates), "duplicates"), (len(found.near_duplicates), "near-duplicates")):
        if count:
            typer.echo(f"images with {what}: {count}")
    for place in (as_csv, output):
        if place is not None:
            typer.echo(f"wrote {place}")
    for line in found.unreadable:
        say(line)
    if found.unreadable:
        raise typer.Exit(1)
