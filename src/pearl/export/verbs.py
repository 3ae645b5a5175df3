"""`pearl export`: a model written aside, loaded as its user will load it, compared, and only then given its name."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pearl.data.decoding import Decoding
from pearl.data.pictures import Picture, pixels_of
from pearl.data.sources import image_files
from pearl.errors import DataError, ExportError, PearlError, counted, reason
from pearl.export.adapters import write_peft
from pearl.export.programs import write_onnx, write_torch
from pearl.export.trained import FACTS, Trained
from pearl.lifecycle.model import Model
from pearl.settings.config import ModelConfig, RunConfig
from pearl.settings.parts import SOURCES
from pearl.settings.registry import nearest
from pearl.storage.aside import beside
from pearl.storage.files import check_writable
from pearl.storage.inside import sync_folder, sync_tree
from pearl.storage.paths import runs_root

_CHECKED = 16  # images that a result is checked with


def export_directory(
    name: str,
    *,
    to: str,
    out: Path | None = None,
    images: Sequence[Path] | None = None,
    upto: int | None = None,
    method: str | None = None,
    force: bool = False,
) -> str:
    """Export a model or run, by its directory or a run's name; returns what to tell the user.

    `out` is named as the directory, in the current folder, if not given. `images` are files or folders to check the
    result with; if not given, a run's own test images are used where they are, else random ones. `upto`: only the
    first so many tasks. `method`: the file of a method of the user's own (see `Model.open`).

    Raises:
        PearlError: no such run, nothing learnt yet, a format that cannot hold it, a place that cannot be written.
    """
    if to not in _WRITERS:
        raise ExportError(f"--to: unknown format {to!r}; {nearest(to, _WRITERS)}")
    path = Path(name)
    if not path.exists() and (runs_root() / name).is_dir():
        path = runs_root() / name
    opened = Model.open(path, tasks=upto, method=method)
    tasks = [{"name": task.name, "classes": list(task.classes)} for task in opened.tasks]
    model = Trained(opened.method, opened.config.images, tasks, opened.config.backbone)
    raw, origin = check_images(opened.config, images)
    return export(model, to, out or Path(path.resolve().name + _SUFFIX[to]), raw, origin=origin, force=force)


def export(
    model: Trained, to: str, out: Path, raw: Tensor, *, origin: str = "the given images", force: bool = False
) -> str:
    """Write a model to `out` in a format, checked on images `raw` (n, H, W, 3) uint8; returns a line that says so.

    Raises:
        ExportError: the format cannot hold the model, the result disagrees with it, or `out` cannot be written or is
            there already. Nothing is left behind.
    """
    model.method.eval()
    heads = model.method.heads.sizes()  # none, or the first alone, of methods that classify by statistics
    if [len(task["classes"]) for task in model.tasks][: len(heads)] != heads:
        raise ExportError("the classes of the tasks are not those that the heads were made for; restore classes.json")
    with _aside(out, force=force, folder=to == "peft") as place, torch.no_grad():
        difference = _WRITERS[to](model, place, raw)
        size = sum(file.stat().st_size for file in ([place] if place.is_file() else place.rglob("*")) if file.is_file())
    if difference is None:
        verdict = 'not verified, as peft is not installed: pip install "pearl[peft]"'
    else:
        verdict = f"logits differ from the model's by at most {difference:.1e} on {origin}"
    return f"wrote {out}: {size / 1e6:.1f} MB, {counted(len(model.facts['classes']), 'class')}; {verdict}"


def check_images(config: ModelConfig, given: Sequence[Path] | None = None) -> tuple[Tensor, str]:
    """Images to check with, (n, H, W, 3) uint8 of one size, and where they are from. Downloads nothing.

    Raises:
        DataError: none of the given ones is an image, or one cannot be read.
    """
    if given:
        files = [file for path in given for file in (image_files(path) if path.is_dir() else [path])]
        if not files:
            raise DataError(f"--images: no image in {', '.join(map(str, given))}; give image files or folders of them")
        return _read(files, config), f"{min(len(files), _CHECKED)} of the given images"
    try:
        if not isinstance(config, RunConfig):
            raise DataError("a model keeps no images")
        spec = config.data | ({"download": False} if "download" in config.data else {})
        images = SOURCES.build(spec).test.images
        raw = _read(images, config)
        return raw, f"{len(raw)} of the run's test images"
    except PearlError:
        side = config.images.stored
        raw = torch.randint(256, (_CHECKED, side, side, 3), generator=torch.Generator().manual_seed(0))
        return raw.to(torch.uint8), f"{_CHECKED} random images, as no others are here (--images gives some)"


def _read(images: np.ndarray | Sequence[Picture], config: ModelConfig) -> Tensor:
    rows = np.unique(np.linspace(0, len(images) - 1, _CHECKED).round().astype(int))
    if isinstance(images, np.ndarray):
        return torch.from_numpy(images[rows].copy())
    return torch.from_numpy(pixels_of(images, rows, config.images.stored, Decoding.of(config.images)))


@contextmanager
def _aside(out: Path, *, force: bool, folder: bool) -> Iterator[Path]:
    """A new place beside `out`; what is there when the block ends without an error becomes `out`."""
    if not out.parent.is_dir():
        raise ExportError(f"{out}: cannot be written (no such folder); choose another place with -o")
    check_writable(out.parent, mend="choose another place with -o")
    named = False
    try:
        with beside(out, rescue=partial(_put_back, out)) as made:
            if out.exists() or out.is_symlink():
                _check_replaced(out, force=force, folder=folder)
            yield made / out.name
            sync_tree(made)
            if folder and out.exists():
                out.rename(_old(out, made))
            (made / out.name).replace(out)
            named = True
            sync_folder(out.parent)
    except OSError as error:
        if named:
            raise ExportError(f"{out}: is written, but a power cut may still undo it ({reason(error)})") from None
        raise ExportError(f"{out}: cannot be written ({reason(error)}); choose another -o") from None


def _check_replaced(out: Path, *, force: bool, folder: bool) -> None:
    """Refuse to replace what is there, unless asked to, and it is an export: --force takes nothing else away."""
    if not force:
        raise ExportError(f"{out}: is there already; choose another -o, or replace it with --force")
    if out.is_symlink() or out.is_dir() != folder or (folder and not (out / FACTS).is_file()):
        raise ExportError(f"{out}: is not an earlier export of this kind; choose another -o, or move it away")


def _put_back(out: Path, made: Path) -> None:
    """Bring back what an export was about to replace, if it was killed before it had."""
    if _old(out, made).exists() and not out.exists():
        _old(out, made).rename(out)


def _old(out: Path, made: Path) -> Path:
    """Where what --force replaces is, for the moment between two renames."""
    return made / f"replaced-{out.name}"


_WRITERS: dict[str, Callable[[Trained, Path, Tensor], float | None]] = {
    "torch": write_torch,
    "onnx": write_onnx,
    "peft": write_peft,
}
_SUFFIX = {"torch": ".pt2", "onnx": ".onnx", "peft": "-peft"}
