"""Check of this machine: versions, devices, precision, folders, and available data."""

import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

import torch

from pearl.data.sources import some
from pearl.errors import counted
from pearl.storage.paths import data_root, runs_root
from pearl.training.engine import has_fast_bf16
from pearl.training.world import kind_of
from pearl.version import __version__

_PACKAGES = ("torch", "torchvision", "timm", "lightning-fabric", "safetensors", "pydantic", "scikit-learn")
_WEIGHTS = {".safetensors", ".pth", ".pt", ".bin"}
_LISTS = {".npz", ".csv", ".tsv", ".parquet", ".arrow"}
_DATA = {
    "cifar100.npz": "cifar100",
    "cifar-100-python": "cifar100",
    "tiny-imagenet-200": "tinyimagenet",
    "imagenet-r": "imagenet_r",
}


def report() -> tuple[str, bool]:
    """Return the findings as text, and whether there is no problem."""
    lines = [f"pearl {__version__}"]
    lines += [f"  {name} {metadata.version(name)}" for name in _PACKAGES]
    device = kind_of("auto")
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    lines += [f"device: {name}; automatic precision {'bf16' if has_fast_bf16(device) else 'fp32'}"]
    healthy = True
    for what, root in (("data", data_root()), ("runs", runs_root())):
        problem = _not_writable(root)
        healthy = healthy and problem is None
        free = shutil.disk_usage(_existing(root)).free / 1e9
        state = f"{free:.1f} GB free" if problem is None else f"PROBLEM: {problem}; set PEARL_{what.upper()} to another"
        lines.append(f"{what} folder {root}: {state}")
    data, weights = _found(data_root())
    lines.append(f"data here: {some(data) or 'none, besides the embedded digits'}")
    lines.append(f"weights here: {some([*weights, *_hub()]) or 'none'}")
    lines.append("all well" if healthy else "not fit to run: see PROBLEM above")
    return "\n".join(lines), healthy


def _found(root: Path) -> tuple[list[str], list[str]]:
    """Return data sets and weight files in the data folder."""
    data, weights = [], []
    for entry in sorted(root.iterdir()) if root.is_dir() else ():
        if entry.name in _DATA:
            data.append(f"{entry.name} ({_DATA[entry.name]})")
        elif entry.name.startswith(".") or entry.name in ("cache", "phases"):
            continue
        elif entry.suffix.lower() in _WEIGHTS:
            weights.append(entry.name)
        elif entry.is_dir() or entry.suffix.lower() in _LISTS:
            data.append(f"{entry.name} ({'a folder' if entry.is_dir() else entry.suffix[1:].lower()})")
    return data, weights


def _hub() -> list[str]:
    """Return timm networks in the cache of the Hugging Face hub."""
    from huggingface_hub import constants

    cached = Path(constants.HF_HUB_CACHE).glob("models--timm--*/snapshots/*/*")
    return sorted({f"timm/{file.parents[2].name.removeprefix('models--timm--')}" for file in cached})


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _not_writable(path: Path) -> str | None:
    try:
        with tempfile.NamedTemporaryFile(dir=_existing(path)):
            return None
    except OSError as error:
        return error.strerror or os.strerror(error.errno or 0)
