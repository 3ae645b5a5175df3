"""Options that several verbs have."""

from typing import Annotated

import typer

from pearl.errors import ConfigError


def _minutes(value: float) -> float:
    if not value >= 0:  # not a number is neither
        raise ConfigError(f"--store-every {value:g}: give minutes, 0 or more; 0 stores after every step")
    return value


Log = Annotated[
    list[str] | None,
    typer.Option(metavar="KIND", help="Curves while it learns: tensorboard, csv or wandb; may be given several times."),
]
Nested = Annotated[bool, typer.Option("--nested", help="Classes are the innermost folders, at any depth.")]
StoreEvery = Annotated[float, typer.Option(callback=_minutes, help="Minutes between two stored moments of training.")]
