"""Options that several verbs have."""

from typing import Annotated

import typer

from pearl.errors import ConfigError


def _minutes(value: float) -> float:
    if not value >= 0:  # not a number is neither
        raise ConfigError(f"--store-every {value:g}: give minutes, 0 or more; 0 stores after every step")
    return value


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
