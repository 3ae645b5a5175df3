"""pearl cache [--empty]"""

from typing import Annotated

import typer


def command(
    empty: Annotated[
        bool, typer.Option("--empty", help="Remove all of them. They are trained again when needed.")
    ] = False,
) -> None:
    """See the finished phases that runs share, or remove them.

    They lie in phases/ of the data folder, or in $PEARL_CACHE; with PEARL_CACHE=off, or engine.reuse=false, none is
    kept or taken. They take up to $PEARL_CACHE_GB gigabytes, 10 if not set; those that were not used for longest go.

    \b
    pearl cache
    pearl cache --empty
    """
    from pearl.reports.phases import kept
    from pearl.storage import phases

    folder = phases.folder()
    if folder is None:
        typer.echo("off (PEARL_CACHE=off): no finished phase is kept or taken")
        return
    if empty:
        phases.empty(folder)
    typer.echo(kept(folder))
