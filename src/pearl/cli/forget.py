"""pearl forget MODEL --class CLASS, pearl forget MODEL --task TASK"""

from pathlib import Path
from typing import Annotated

import typer

from pearl.cli.options import DryRun, begun


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of the model.")],
    class_: Annotated[
        str | None, typer.Option("--class", metavar="CLASS", help="A class: it is never predicted again.")
    ] = None,
    task: Annotated[str | None, typer.Option(metavar="TASK", help="A task: it is removed exactly.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Remove a class or a task from a model.

    Removing a class deletes the row of its head or its statistics; weights that were trained with its images stay.
    Removing a task is exact: the model then equals, bit by bit, one that learnt only the other tasks. With class
    statistics this needs a model created with method.classifier.keep_features=true; --dry-run prints what it costs. A
    certificate with the digests of all that remains is written, which `pearl verify` checks.

    \b
    pearl forget shop --class apple
    pearl forget shop --task vegetables --dry-run
    """
    begun(f"forget {model}", quiet=False)
    from pearl.lifecycle.forget import forget

    typer.echo(forget(model, class_, task=task, dry_run=dry_run))
