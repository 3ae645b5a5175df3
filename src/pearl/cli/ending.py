"""End of verbs that run many jobs: failed runs are listed after all other output, and the exit code is 1."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pearl.sweeps.jobs import JobResult


@contextmanager
def failures_listed(outcomes: "Sequence[JobResult]") -> Iterator[None]:
    """List the failed runs after everything that is printed here, even if that raises."""
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
