"""pearl cache [--empty]"""

from typing import Annotated

import typer


def command(
    empty: Annotated[
        bool, typer.Option("--empty", help="Remove all of them; they are trained again when needed.")
    ] = False,
) -> None:
    """List or empty the phase cache: finished phases that runs share.

    The cache is phases/ in the data folder, or $PEARL_CACHE; PEARL_CACHE=off or engine.reuse=false disables it. It
    takes up to $PEARL_CACHE_GB gigabytes (default 10); the least recently used phases are removed first.

    \b
    pearl cache
    pearl cache --empty
    """
    from pearl.reports.cached_phases import kept
    from pearl.storage import phases

    folder = phases.folder()
    if folder is None:
        typer.echo("off (PEARL_CACHE=off): finished phases are neither stored nor reused")
        return
    if empty:
        phases.empty(folder)
    typer.echo(kept(folder))
