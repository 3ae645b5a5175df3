"""Is this machine fit? Versions, devices, precision, folders, and the data that is here."""

import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

import torch

from pearl.storage.paths import data_root, runs_root
from pearl.training.engine import has_fast_bf16
from pearl.training.world import kind_of
from pearl.version import __version__

_PACKAGES = ("torch", "torchvision", "timm", "lightning-fabric", "safetensors", "pydantic", "scikit-learn")
_DATA = {
    "cifar100.npz": "cifar100",
    "cifar-100-python": "cifar100",
    "tiny-imagenet-200": "tinyimagenet",
    "imagenet-r": "imagenet_r",
}


def report() -> tuple[str, bool]:
    """The findings as text, and whether all is well."""
    lines = [f"pearl {__version__}"]
    lines += [f"  {name} {metadata.version(name)}" for name in _PACKAGES]
    device = kind_of("auto")
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    lines += [f"device: {name}; automatic precision {'bf16' if has_fast_bf16(device) else 'fp32'}"]
    healthy = True
    for what, root in (("data", data_root()), ("runs", runs_root())):
        problem = _not_writable(root)
        healthy = healthy and problem is None
        free = shutil.disk_usage(_existing(root)).free / 1e9
        state = f"{free:.1f} GB free" if problem is None else f"PROBLEM: {problem}; set PEARL_{what.upper()} to another"
        lines.append(f"{what} folder {root}: {state}")
    here = [f"{name} ({source})" for name, source in _DATA.items() if (data_root() / name).exists()]
    lines.append(f"data here: {', '.join(here) or 'none, besides the embedded digits'}")
    lines.append("all well" if healthy else "not fit to run: see PROBLEM above")
    return "\n".join(lines), healthy


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
