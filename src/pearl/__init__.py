"""Continual learning with low-rank adapters whose rank each layer and each task chooses for itself.

```python
import pearl

run = pearl.run("digits")
print(run.summary)

model = pearl.learn("shop", "photos/fruit")
model = model.learn("photos/vegetables")
print(model.predict("photo.jpg")[0].name)
```
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pearl.errors import PearlError, typed
from pearl.version import __version__

if TYPE_CHECKING:
    from pearl.lifecycle.runs import Run
    from pearl.objects import Model
    from pearl.tables.values import Filled

__all__ = ["PearlError", "__version__", "learn", "load", "methods", "recipes", "run", "show", "table"]


@typed
def run(
    recipe: str | Path,
    *,
    smoke: bool = False,
    device: str = "auto",
    quiet: bool = False,
    log: str | Sequence[str] = (),
    **overrides: Any,
) -> "Run":
    """Run a recipe, or go on with it, or find it already done.

    `overrides` are settings as in the recipe, nested as dictionaries: `run("digits", seed=1, train={"lr": 0.01})`.
    `log` names loggers that are told while it runs: "tensorboard", "csv", "wandb"; they write into the run's logs/.

    Raises:
        PearlError: anything a user can mend, in one line.
    """
    from pearl.lifecycle.runs import execute
    from pearl.reports.logs import logged
    from pearl.reports.progress import display
    from pearl.settings.config import RunConfig, change, check_config, raw_config
    from pearl.storage.paths import runs_root

    config: RunConfig = check_config(change(raw_config(recipe, smoke=smoke), overrides))
    return execute(config, device=device, show=logged(display(quiet), log, runs_root() / config.id))


@typed
def show(directory: str | Path) -> "Run":
    """A finished or unfinished run as it stands on disk.

    Raises:
        RunError: not a run directory, or damaged.
    """
    from pearl.lifecycle.runs import Run

    return Run.open(Path(directory))


@typed
def learn(
    model: str | Path,
    data: Any,
    *,
    task: str | None = None,
    recipe: str | None = None,
    backbone: str | dict[str, Any] | None = None,
    start: str | Path | None = None,
    aliases: Mapping[str, str] | None = None,
    fast: bool = False,
    nested: bool = False,
    holdout: float = 0.0,
    allow_new_style: bool = False,
    discard: bool = False,
    device: str = "auto",
    quiet: bool = False,
    log: str | Sequence[str] = (),
    **overrides: Any,
) -> "Model":
    """Learn the classes of images as a new task of the model at a path; made if it is not there.

    `data` are images where they are: a folder with a folder per class (the innermost ones, if `nested`), a .csv of
    paths and labels, `torchvision/NAME` or `hf/NAME`, `(images, labels)` or `(images, labels, names)`, a
    `datasets.Dataset`, or any data set of (image, label) pairs, as torchvision's. Images are files, Pillow images,
    arrays (height, width, 3) or tensors (3, height, width) of uint8, or of floats from 0 to 1.

    `recipe`, `backbone` (a name, or a dictionary with its options) and `start` (a run or model to go on from) are for
    the first task. A class may be shown again, more images or another kind of them: it gets one more prototype.
    `aliases` maps folders to the classes that they show; `fast` adds classes in seconds, by their statistics alone.
    `holdout` keeps this share of each class's images out of training, for the model's `outcome` to be measured on.
    Images of a known class of which nearly none is recognised are refused; `allow_new_style` learns them.
    `discard` throws away a task that is half learnt, which is refused otherwise; the same task begins anew with it.
    `log` is as of `run`. `overrides` are settings, nested as dictionaries:
    `learn("shop", "fruit", backbone="resnet18", train={"epochs": 5})`.

    Raises:
        PearlError: anything a user can mend, in one line; the model is then as it was.
    """
    from pearl.objects import LearnOptions, learn

    options = LearnOptions(
        task=task,
        recipe=recipe,
        backbone=backbone,
        start=start,
        aliases=aliases,
        fast=fast,
        nested=nested,
        holdout=holdout,
        allow_new_style=allow_new_style,
        discard=discard,
        overrides=overrides,
    )
    return learn(model, data, options, device=device, quiet=quiet, log=log)


@typed
def load(model: str | Path, *, tasks: int | None = None, device: str = "auto", method: str | None = None) -> "Model":
    """The model in the directory of a model or run, as it was after its first `tasks` tasks (all if not given).

    `method` ("path/to/file.py:Class") names the file of a method that did not come with pearl; without it none runs.

    Raises:
        PearlError: no such model, or files missing or damaged.
    """
    from pearl.objects import Model

    return Model.open(model, tasks=tasks, device=device, method=method)


def methods() -> dict[str, str]:
    """The methods there are, by name: pearl's own and those of installed packages, with a line about each.

    The package `pearl.methods` takes this function's place when it is imported, and can be called as well.
    """
    from pearl.settings.parts import METHODS

    return METHODS.lines()


def recipes() -> dict[str, str]:
    """The recipes that `run` and `learn` know by name, with a line about each."""
    from pearl.reports.text import names_of

    return names_of("recipes")


@typed
def table(
    name: str,
    *,
    run_missing: bool = False,
    seeds: int | None = None,
    size: str = "paper",
    output: str | Path | None = None,
    device: str = "auto",
    quiet: bool = False,
    **overrides: Any,
) -> "Filled":
    """A table or figure of the paper with what the runs there are say: `pearl.table("growth").cells`.

    `run_missing` first runs what is missing; those that fail leave their cells empty, and what they wait for is in
    `.missing`. `output` is a file that it is also written to. `overrides` are set in all runs, nested as dictionaries.

    Raises:
        PearlError: anything a user can mend, in one line.
    """
    import json

    from pearl.reports.records import flat
    from pearl.storage.files import check_output
    from pearl.sweeps.board import board
    from pearl.tables.missing import run_missing as run_all
    from pearl.tables.show import FORMATS, write
    from pearl.tables.spec import as_size, read
    from pearl.tables.values import fill

    extra = [f"{key}={json.dumps(value)}" for key, value in flat(overrides).items()]
    if output is not None:
        check_output(Path(output), [*FORMATS], "table")
    filled = fill(read(name), as_size(size), seeds, extra)
    if run_missing:
        run_all(filled, device=device, show=board(quiet))
        filled = fill(read(name), as_size(size), seeds, extra)
    if output is not None:
        write(filled, Path(output))
    return filled
