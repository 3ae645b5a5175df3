"""pearl inspect MODEL"""

from pathlib import Path
from typing import Annotated

import typer


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of a model or run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List a model's tasks, classes, thresholds, ranks per layer, parameters and bytes; verify its checksums.

    Damaged files are named, and the exit code is 1.

    \b
    pearl inspect shop
    """
    from pearl.errors import RunError
    from pearl.reports.text import inspection, inspection_json
    from pearl.storage.run_directory import RunDirectory

    try:
        facts, text = inspection(model)
    except RunError as error:
        if not RunDirectory(model).tasks_folder.is_dir():
            raise
        typer.echo(f"pearl: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(inspection_json(facts) if as_json else text)
    if facts["damaged"]:
        raise typer.Exit(1)
