"""How verbs that run many jobs end: runs that failed are listed after all else, and the exit code is 1."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pearl.sweeps.jobs import Outcome


@contextmanager
def failures_listed(outcomes: "Sequence[Outcome]") -> Iterator[None]:
    """List those that failed after what is printed here, also if that goes wrong."""
    from pearl.errors import printable
    from pearl.sweeps.jobs import failures

    failed = failures(outcomes)
    try:
        yield
    finally:
        for line in failed:
            typer.echo(f"pearl: {printable(line)}", err=True)
    if failed:
        raise typer.Exit(1)
