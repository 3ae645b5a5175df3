"""Options that several verbs have."""

import sys
from typing import Annotated

import typer

from pearl.errors import ConfigError, printable


def _minutes(value: float) -> float:
    if not value >= 0:  # not a number is neither
        raise ConfigError(f"--store-every {value:g}: give minutes, 0 or more; 0 stores after every step")
    return value


Log = Annotated[
    list[str] | None,
    typer.Option(metavar="KIND", help="Curves while it learns: tensorboard, csv or wandb; may be given several times."),
]
Nested = Annotated[bool, typer.Option("--nested", help="Classes are the innermost folders, at any depth.")]


def recipes(incomplete: str) -> list[str]:
    """The recipes that begin so, for shells."""
    from pearl.settings.config import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def begun(what: str, quiet: bool) -> None:
    """Say that something begins, to who waits before a terminal: importing torch takes a few seconds."""
    if not quiet and sys.stderr.isatty():
        typer.echo(f"pearl {printable(what)}: one moment ...", err=True)


StoreEvery = Annotated[float, typer.Option(callback=_minutes, help="Minutes between two stored moments of training.")]
Alias = Annotated[
    list[str] | None, typer.Option(metavar="FOLDER=CLASS", help="A folder that shows a class of another name.")
]


def aliases_of(alias: list[str] | None) -> dict[str, str]:
    """Classes by the folders that show them."""
    aliases = {folder: name for folder, _, name in (one.partition("=") for one in alias or [])}
    if not all(folder and name for folder, name in aliases.items()):
        raise ConfigError(f"--alias {' '.join(alias or [])}: give each as FOLDER=CLASS")
    return aliases
