"""Options that several verbs have."""

from typing import Annotated

import typer

from pearl.errors import ConfigError


def _minutes(value: float) -> float:
    if not value >= 0:  # not a number is neither
        raise ConfigError(f"--store-every {value:g}: give minutes, 0 or more; 0 stores after every step")
    return value


StoreEvery = Annotated[float, typer.Option(callback=_minutes, help="Minutes between two stored moments of training.")]


def aliases(given: list[str] | None) -> dict[str, str]:
    """Folders and the classes that they show, of FOLDER=CLASS.

    Raises:
        ConfigError: one is not of that form.
    """
    named = {folder: name for folder, _, name in (one.partition("=") for one in given or [])}
    if not all(folder and name for folder, name in named.items()):
        raise ConfigError(f"--alias {' '.join(given or [])}: give each as FOLDER=CLASS")
    return named
