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
    from pearl.online.stream_model import StreamModel
    from pearl.online.stream_run import OnlineRun
    from pearl.tables.values import Filled

__all__ = ["PearlError", "__version__", "learn", "load", "methods", "recipes", "run", "show", "stream", "table"]


@typed
def run(
    recipe: str | Path,
    *,
    smoke: bool = False,
    device: str = "auto",
    quiet: bool = False,
    log: str | Sequence[str] = (),
    **overrides: Any,
) -> "Run | OnlineRun":
    """Run a recipe, resume an unfinished run of it, or return a finished one.

    `overrides` are settings as in the recipe, nested as dictionaries: `run("digits", seed=1, train={"lr": 0.01})`.
    `log` names loggers ("tensorboard", "csv", "wandb") that write into the run's logs/ during training.

    Raises:
        PearlError: any user error, in one line.
    """
    from pearl.lifecycle.runs import execute
    from pearl.reports.logs import logged
    from pearl.reports.progress import display
    from pearl.settings.config import OnlineRunConfig, RunConfig, change, check_config, raw_config
    from pearl.storage.paths import runs_root

    config: RunConfig = check_config(change(raw_config(recipe, smoke=smoke), overrides))
    if isinstance(config, OnlineRunConfig):
        from pearl.online.stream_run import execute as execute_online

        return execute_online(config, device=device, show=display(quiet))
    return execute(config, device=device, show=logged(display(quiet), log, runs_root() / config.id))


@typed
def show(directory: str | Path) -> "Run":
    """Open a finished or unfinished run as it is on disk.

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
    first_answer: bool = True,
    nested: bool = False,
    holdout: float = 0.0,
    allow_new_style: bool = False,
    discard: bool = False,
    device: str = "auto",
    quiet: bool = False,
    log: str | Sequence[str] = (),
    **overrides: Any,
) -> "Model":
    """Learn the classes of images as a new task of the model at a path, which the first task creates.

    `data` is a folder with a folder per class (the innermost ones, if `nested`), a .csv of paths and labels,
    `torchvision/NAME` or `hf/NAME`, `(images, labels)` or `(images, labels, names)`, a `datasets.Dataset`, or any data
    set of (image, label) pairs, such as torchvision's. Images are files, Pillow images, arrays (height, width, 3) or
    tensors (3, height, width) of uint8, or of floats from 0 to 1.

    `recipe`, `backbone` (a name, or a dictionary with its options) and `start` (a run or model to continue from) are
    for the first task. A known class may get more images, possibly in a new style; each time it gets one more
    prototype. `aliases` maps folders to the classes of their images; `fast` adds classes in seconds by class
    statistics, without training. A task that is trained is first learnt so as well, and the model is used in this state
    until training ends; `first_answer=False` leaves that out. `holdout` is the share of each class's images that the
    model's `outcome` is measured on instead of training. If the model recognises almost no image of a known class, they
    are refused; `allow_new_style` learns them. `discard` deletes a task whose training was cut off and starts it again;
    otherwise such a task is an error. `log` is that of `run`. `overrides` are settings, nested as dictionaries:
    `learn("shop", "fruit", backbone="resnet18", train={"epochs": 5})`.

    Raises:
        PearlError: any user error, in one line; the model is then unchanged.
    """
    from pearl.objects import LearnOptions, learn

    options = LearnOptions(
        task=task,
        recipe=recipe,
        backbone=backbone,
        start=start,
        aliases=aliases,
        fast=fast,
        first_answer=first_answer,
        nested=nested,
        holdout=holdout,
        allow_new_style=allow_new_style,
        discard=discard,
        overrides=overrides,
    )
    return learn(model, data, options, device=device, quiet=quiet, log=log)


@typed
def load(model: str | Path, *, tasks: int | None = None, device: str = "auto", method: str | None = None) -> "Model":
    """Open the model in the directory of a model or run, after its first `tasks` tasks (default: all).

    `method` ("path/to/file.py:Class") names the file of a method that is not part of pearl; without it no such file is
    run.

    Raises:
        PearlError: no such model, or files missing or damaged.
    """
    from pearl.objects import Model

    return Model.open(model, tasks=tasks, device=device, method=method)


@typed
def stream(
    model: str | Path,
    *,
    learner: str | dict[str, Any] | None = None,
    recipe: str | None = None,
    backbone: str | dict[str, Any] | None = None,
    device: str = "auto",
    **overrides: Any,
) -> "StreamModel":
    """Open a model that learns from images as they come, without tasks, or create one.

    `stream("shop").observe(images, labels)` learns at once, and stores the model; `.predict(images)` names classes.
    `learner` is what learns (`pearl list learners`); by default PEARL. The other options are those of `learn`.

    Raises:
        PearlError: any user error, in one line.
    """
    from pearl.online.stream_model import open_stream

    return open_stream(model, learner=learner, recipe=recipe, backbone=backbone, device=device, overrides=overrides)


def methods() -> dict[str, str]:
    """Return the available methods by name, pearl's own and those of installed packages, with a line about each.

    The package `pearl.methods` replaces this function when it is imported, and can be called as well.
    """
    from pearl.settings.parts import METHODS

    return METHODS.lines()


def recipes() -> dict[str, str]:
    """Return the recipes that `run` and `learn` accept by name, with a line about each."""
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
    """Compare a table or figure of the paper with the stored runs: `pearl.table("growth").cells`.

    `run_missing` runs missing runs first; failed runs leave their cells empty, and `.missing` lists what these need.
    `output` is a file that it is also written to. `overrides` are set in all runs, nested as dictionaries.

    Raises:
        PearlError: any user error, in one line.
    """
    import json

    from pearl.reports.records import flat
    from pearl.storage.files import check_output
    from pearl.sweeps.live_status import board
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
