"""The model object that Python users hold, with everything that can be done with a model."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pearl.data.images import Picture
from pearl.errors import typed
from pearl.lifecycle import discovery, learning
from pearl.lifecycle.certificate import Check
from pearl.lifecycle.choices import LearnOptions
from pearl.lifecycle.evaluation import UNKNOWN_RATE
from pearl.lifecycle.forget import forget
from pearl.lifecycle.model import StoredModel
from pearl.lifecycle.rename import rename
from pearl.lifecycle.saved import verification
from pearl.lifecycle.undo import undo
from pearl.reports.logs import logged
from pearl.reports.progress import display
from pearl.storage.checkpoint import RUNNING


class Model(StoredModel):
    """A model that can learn more tasks. `pearl.learn` creates it, `pearl.load` opens it."""

    def learn(self, data: Any, *, quiet: bool = False, log: str | Sequence[str] = (), **options: Any) -> "Model":
        """Learn the classes of images as a new task, and store it.

        `options` are those of `pearl.learn`, `task`, `aliases`, `fast`, `nested`, `holdout`, `allow_new_style` and
        `discard`, and settings of training: `learn(data, train={"epochs": 5})`. Returns the grown model, whose
        `outcome` says how good it is.

        Raises:
            PearlError: any user error; the model is then unchanged.
        """
        if (self.tasks[-1].folder / RUNNING).exists():  # the next task replaces files that this object would read later
            _ = self.method
        return learn(self.path, data, LearnOptions.of(options), device=self.device.type, quiet=quiet, log=log)

    def undo(self) -> "Model":
        """Take back the last task, and return the model as it was before: byte for byte, see `lifecycle.undo`.

        This object is outdated then.

        Raises:
            RunError: it has one task only, or the earlier state is not stored.
        """
        undo(self.path)
        return Model.open(self.path, device=self.device.type)

    @typed
    def rename(self, old: str, new: str) -> "Model":
        """Give a class another name, and return the model with it. This object is outdated then.

        Raises:
            ConfigError: class `old` is unknown, or class `new` exists.
        """
        rename(self.path, old, new)
        return Model.open(self.path, device=self.device.type)

    @typed
    def forget(self, name: str | None = None, *, task: str | None = None) -> "Model":
        """Remove the class `name` or a task, and return the model without it. This object is outdated then.

        The class is never predicted again; weights trained with its images stay. A task is removed exactly, which is
        possible for models with heads or with the features of all images (`method.classifier.keep_features`). A
        certificate is written, which `verify` checks. See `lifecycle.forget`.

        Raises:
            PearlError: the class or task is unknown, or cannot be removed.
        """
        forget(self.path, name, task=task)
        return Model.open(self.path, device=self.device.type)

    def verify(self) -> list[Check]:
        """Check all files by their checksums, and every certificate of what was forgotten; see `lifecycle.certificate`.

        Each check has a `state`, "ok", "superseded" or "wrong", and a `line`.

        Raises:
            RunError: a change is not complete.
        """
        return verification(self.path)

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

        path, checked = None if out is None else Path(out), None if images is None else [*map(Path, images)]
        return export_directory(str(self.path), to=to, out=path, images=checked, upto=len(self.tasks), force=force)

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


@typed
def learn(
    path: str | Path,
    data: Any,
    options: LearnOptions,
    *,
    device: str = "auto",
    quiet: bool = False,
    log: str | Sequence[str] = (),
) -> Model:
    """Learn a task, see `pearl.learn`, with the terminal's progress and the loggers; return the model."""
    learning.learn(path, data, options, device=device, show=logged(display(quiet), log, Path(path)))
    return Model.open(path, device=device)
