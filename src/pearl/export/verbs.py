"""`pearl export`: a model is written to a temporary path, loaded as users would load it, compared, then renamed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pearl.data.decoding import Decoding
from pearl.data.images import Picture, pixels_of
from pearl.data.sources import image_files
from pearl.errors import DataError, ExportError, PearlError, counted, reason
from pearl.export.adapters import write_peft
from pearl.export.card import card, load_section
from pearl.export.programs import write_onnx, write_torch
from pearl.export.trained import FACTS, Trained
from pearl.lifecycle.model import StoredModel
from pearl.settings.config import ModelConfig, RunConfig
from pearl.settings.parts import SOURCES
from pearl.settings.registry import nearest
from pearl.storage.aside import beside
from pearl.storage.files import OTHER_OUTPUT, check_writable, write_output
from pearl.storage.inside import sync_folder, sync_tree
from pearl.storage.paths import runs_root

_CHECKED = 16  # number of images for the check


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
    """Export a model or run, by its directory or a run's name; return a message for the user.

    `out` is by default the directory's name, in the current folder. `images` are files or folders for the check; by
    default a run's test images if available, else random ones. `upto`: number of tasks, from the first. `method`: the
    file of the user's own method (see `Model.open`).

    Raises:
        PearlError: unknown run, no finished task, unsupported format, or unwritable path.
    """
    if to not in _WRITERS:
        raise ExportError(f"--to: unknown format {to!r}; {nearest(to, _WRITERS)}")
    path = Path(name)
    if not path.exists() and (runs_root() / name).is_dir():
        path = runs_root() / name
    opened = StoredModel.open(path, tasks=upto, method=method)
    tasks = [{"name": task.name, "classes": list(task.classes)} for task in opened.tasks]
    model = Trained(opened.method, opened.config.images, tasks, opened.config.backbone, opened.first_answer)
    raw, origin = check_images(opened.config, images)
    out = out or Path(path.resolve().name + SUFFIX[to])
    about = partial(card, opened, export=to != "peft")
    return export(model, to, out, raw, origin=origin, force=force, about=about)


def export(
    model: Trained,
    to: str,
    out: Path,
    raw: Tensor,
    *,
    origin: str = "the given images",
    force: bool = False,
    about: Callable[[str], str] | None = None,
) -> str:
    """Write a model to `out` in a format, checked on images `raw` (n, H, W, 3) uint8; return a message.

    `about` makes a model card from the part about loading: README.md in a folder, else OUT.md beside the file.

    Raises:
        ExportError: the format cannot represent the model, the result disagrees with it, or `out` cannot be written or
            exists. Nothing is left behind.
    """
    model.method.eval()
    heads = model.method.heads.sizes()  # none, or only the first, of methods that classify by statistics
    if [len(task["classes"]) for task in model.tasks][: len(heads)] != heads:
        raise ExportError("the classes of the tasks differ from those of the heads; restore classes.json")
    beside_it = card_file(out)
    if about and to != "peft" and not force and beside_it.exists():
        raise ExportError(f"{beside_it}: exists; choose another path with -o, or replace it with --force")
    with _aside(out, force=force, folder=to == "peft") as written, torch.no_grad():
        difference = _WRITERS[to](model, written, raw)
        if about and to == "peft":
            readme = written / "README.md"
            readme.write_text(about(readme.read_text("utf-8")), "utf-8")
        size = sum(
            file.stat().st_size for file in ([written] if written.is_file() else written.rglob("*")) if file.is_file()
        )
    if about and to != "peft":
        write_output(beside_it, about(load_section(to, file=out.name)))
    if difference is None:
        verdict = 'not verified, as peft is not installed: pip install "pearl[peft]"'
    else:
        verdict = f"logits differ from the model's by at most {difference:.1e} on {origin}"
    note = f"; note: {model.first_answer}" if model.first_answer else ""
    return f"wrote {out}: {size / 1e6:.1f} MB, {counted(len(model.facts['classes']), 'class')}; {verdict}{note}"


def card_file(out: Path) -> Path:
    """Return the path of the model card of an exported file; `pearl push` calls it README.md."""
    return out.with_name(f"{out.name}.md")


def check_images(config: ModelConfig, given: Sequence[Path] | None = None) -> tuple[Tensor, str]:
    """Return images for the check, (n, H, W, 3) uint8 of one size, and a description of their source.

    Downloads nothing.

    Raises:
        DataError: no given file is an image, or one cannot be read.
    """
    if given:
        files = [file for path in given for file in (image_files(path) if path.is_dir() else [path])]
        if not files:
            raise DataError(f"--images: no image in {', '.join(map(str, given))}; give image files or folders of them")
        return _read(files, config), f"{min(len(files), _CHECKED)} of the given images"
    try:
        if not isinstance(config, RunConfig):
            raise DataError("a model stores no images")
        spec = config.data | ({"download": False} if "download" in config.data else {})
        images = SOURCES.build(spec).test.images
        raw = _read(images, config)
        return raw, f"{len(raw)} of the run's test images"
    except PearlError:
        side = config.images.stored
        raw = torch.randint(256, (_CHECKED, side, side, 3), generator=torch.Generator().manual_seed(0))
        return raw.to(torch.uint8), f"{_CHECKED} random images, as no others are available (use --images)"


def _read(images: np.ndarray | Sequence[Picture], config: ModelConfig) -> Tensor:
    rows = np.unique(np.linspace(0, len(images) - 1, _CHECKED).round().astype(int))
    if isinstance(images, np.ndarray):
        return torch.from_numpy(images[rows].copy())
    return torch.from_numpy(pixels_of(images, rows, config.images.stored, Decoding.of(config.images)))


@contextmanager
def _aside(out: Path, *, force: bool, folder: bool) -> Iterator[Path]:
    """Yield a temporary path beside `out`, which is renamed to `out` if the block ends without an error."""
    if not out.parent.is_dir():
        raise ExportError(f"{out}: cannot be written (no such folder); choose another path with -o")
    check_writable(out.parent, fix=OTHER_OUTPUT)
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
        raise ExportError(f"{out}: cannot be written ({reason(error)}); choose another path with -o") from None


def _check_replaced(out: Path, *, force: bool, folder: bool) -> None:
    """Refuse to replace an existing path, unless it is an export and --force is given."""
    if not force:
        raise ExportError(f"{out}: exists; choose another path with -o, or replace it with --force")
    if out.is_symlink() or out.is_dir() != folder or (folder and not (out / FACTS).is_file()):
        raise ExportError(f"{out}: is not an earlier export of this kind; choose another path with -o, or move it away")


def _put_back(out: Path, made: Path) -> None:
    """Restore the export that was about to be replaced, if the process was killed before."""
    if _old(out, made).exists() and not out.exists():
        _old(out, made).rename(out)


def _old(out: Path, made: Path) -> Path:
    """Return the path of the replaced export between the two renames."""
    return made / f"replaced-{out.name}"


_WRITERS: dict[str, Callable[[Trained, Path, Tensor], float | None]] = {
    "torch": write_torch,
    "onnx": write_onnx,
    "peft": write_peft,
}
SUFFIX = {"torch": ".pt2", "onnx": ".onnx", "peft": "-peft"}
