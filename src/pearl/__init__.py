"""Continual learning with low-rank adapters whose rank each layer and each task chooses for itself.

import pearl
run = pearl.run("digits")
print(run.summary)
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pearl.errors import PearlError
from pearl.version import __version__

if TYPE_CHECKING:
    from pearl.runs import Run

__all__ = ["PearlError", "__version__", "run", "show"]


def run(
    recipe: str | Path, *, smoke: bool = False, device: str = "auto", quiet: bool = False, **overrides: Any
) -> "Run":
    """Run a recipe, or go on with it, or find it already done.

    `overrides` are settings as in the recipe, nested as dictionaries: `run("digits", seed=1, train={"lr": 0.01})`.

    Raises:
        PearlError: anything a user can mend, in one line.
    """
    from pearl.config import change, check_config, raw_config
    from pearl.progress import display
    from pearl.runs import execute

    return execute(check_config(change(raw_config(recipe, smoke=smoke), overrides)), device=device, show=display(quiet))


def show(directory: str | Path) -> "Run":
    """A finished or unfinished run as it stands on disk.

    Raises:
        RunError: not a run directory, or damaged.
    """
    from pearl.runs import Run

    return Run.open(Path(directory))
