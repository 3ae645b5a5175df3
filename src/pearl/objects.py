"""The model object that Python users hold, with everything that can be done with a model."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pearl.data.pictures import Picture
from pearl.errors import typed
from pearl.lifecycle import discovery, learning
from pearl.lifecycle.evaluation import UNKNOWN_RATE
from pearl.lifecycle.model import Model as Learnt
from pearl.reports.logs import logged
from pearl.reports.progress import display
from pearl.storage.checkpoint import RUNNING


class Model(Learnt):
    """A model that can learn more tasks. `pearl.learn` creates it, `pearl.load` opens it."""

    @typed
    def learn(
        self,
        data: Any,
        *,
        task: str | None = None,
        aliases: Mapping[str, str] | None = None,
        fast: bool = False,
        nested: bool = False,
        holdout: float = 0.0,
        allow_new_style: bool = False,
        discard: bool = False,
        quiet: bool = False,
        log: str | Sequence[str] = (),
        **overrides: Any,
    ) -> "Model":
        """Learn the classes of images as a new task, and store it. The arguments are those of `pearl.learn`.

        Returns the model with the new task; its `outcome` has the accuracy. `overrides` are settings of training:
        `learn(data, train={"epochs": 5})`.

        Raises:
            PearlError: any user error; the model is then unchanged.
        """
        if (self.tasks[-1].folder / RUNNING).exists():  # the next task replaces files that this object would read later
            _ = self.method
        how: dict[str, Any] = {"task": task, "aliases": aliases, "fast": fast, "nested": nested, "holdout": holdout}
        how |= {"allow_new_style": allow_new_style, "discard": discard, "quiet": quiet, "log": log}
        how |= {key: overrides.pop(key) for key in ("recipe", "backbone", "start") if key in overrides}
        return learn(self.path, data, device=self.device.type, **how, overrides=overrides)

    @typed
    def discover(
        self, images: str | Path | Iterable[Picture], *, unknown_rate: float = UNKNOWN_RATE
    ) -> discovery.Discovery:
        """Group the images that the model finds unknown by their features, as candidates for new classes.

        `images` are a folder, or several images as for `predict`. `unknown_rate` is the false-rejection rate of
        `predict`. The number of groups is found by the data: see `evaluation.grouping`. `.groups` have the numbers of
        their images, the most typical first, `.known` those of images of known classes; `.as_csv()` is a list for
        `learn`, in which each label can be replaced by a name. Unreadable files are left out, see `.unreadable`.

        Raises:
            DataError: no readable image, or one in memory that cannot be used.
            ConfigError: the model has no class statistics (`refit` gives it some), or the rate is not a share.
        """
        return discovery.discover(self, images, unknown_rate=unknown_rate)

    @typed
    def export(
        self,
        to: str,
        out: str | Path | None = None,
        *,
        images: Sequence[str | Path] | None = None,
        force: bool = False,
    ) -> str:
        """Export the model for use without pearl, `to` torch, onnx or peft; return a line about the file and its check.

        `out` is by default the model's name in the current folder; `images` are files or folders for the check; `force`
        replaces an earlier export.

        Raises:
            ExportError: the format cannot represent the model, or the path cannot be written.
        """
        from pearl.export import export_directory

        place, checked = None if out is None else Path(out), None if images is None else [*map(Path, images)]
        return export_directory(str(self.path), to=to, out=place, images=checked, upto=len(self.tasks), force=force)

    @typed
    def report(self, output: str | Path | None = None) -> Path:
        """Write a page of figures and tables about the model, by default report.html in its directory; return the path.

        Raises:
            ReportError: it cannot be written there.
        """
        from pearl.reports.page import write

        return write([self.path], None if output is None else Path(output))

    def inspect(self) -> dict[str, Any]:
        """Return the contents of its files: tasks, classes, ranks per layer, parameters, bytes; `damaged` has a line
        per file.

        Raises:
            RunError: its configuration or reference cannot be read.
        """
        from pearl.reports.text import inspection

        return inspection(self.path)[0]


def learn(
    path: str | Path, data: Any, *, device: str = "auto", quiet: bool = False, log: str | Sequence[str] = (), **how: Any
) -> Model:
    """Learn a task, see `pearl.learn`, with the terminal's progress and the loggers; return the model."""
    learning.learn(path, data, device=device, show=logged(display(quiet), log, Path(path)), **how)
    return Model.open(path, device=device)
