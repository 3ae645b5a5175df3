"""What a run has learnt, on disk: a folder of safetensors and a manifest for the start and for each task.

A folder holds only the tensors that its task added or changed; the state after task t is the start overlaid by the
folders 0..t. A folder counts when its manifest is there: it is written last, by atomic rename, after fsync.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from pearl.errors import RunError
from pearl.storage.files import FORMAT, MANIFEST, finished, manifests, open_regular, read_json, write_file, write_json
from pearl.storage.shapes import Part

WEIGHTS = "weights.safetensors"


def sha256(data: bytes) -> str:
    """Hexadecimal SHA-256."""
    return hashlib.sha256(data).hexdigest()


def changed(before: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A snapshot of what `before`, a snapshot itself, lacks of a state_dict or has with other bits."""
    rows = ((key, _row_major(value)) for key, value in state.items())
    return {key: value.clone() for key, value in rows if key not in before or not _same_bits(before[key], value)}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # 0.0 equals -0.0, and NaN nothing; bytes have no such notions
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _row_major(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def snapshot(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of a state_dict on the CPU, row-major, that training cannot touch."""
    return {key: _row_major(value).clone() for key, value in state.items()}


def write_part(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Store one folder of a run: the tensors, then the manifest with their checksum and `facts`."""
    data = save(dict(tensors))
    write_file(folder / WEIGHTS, data)
    manifest = {
        "format": FORMAT,
        "sha256": {WEIGHTS: sha256(data)},
        "bytes": len(data),
        "tensors": {key: list(value.shape) for key, value in tensors.items()},
    }
    write_json(folder / MANIFEST, {**facts, **manifest})


def read_part(folder: Path, shape: type[Part] = Part) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and manifest of one folder; its checksum is verified, and that they are those of the manifest.

    Raises:
        RunError: a file is missing or damaged; the message names it.
    """
    manifest = read_json(folder / MANIFEST, shape)
    file = folder / WEIGHTS
    try:
        with open_regular(file) as opened:
            # of one that has grown no more than tells it: it may be larger than memory
            data = opened.read(manifest["bytes"] + 1)
    except OSError as error:
        raise RunError(f"{file}: cannot be read ({error.strerror}); restore it from a copy of the run") from None
    if sha256(data) != manifest["sha256"].get(WEIGHTS):
        raise RunError(
            f"{file}: checksum differs from its manifest, the file is damaged; restore it from a copy, or, to learn "
            f"again from there, remove classes.json, the folder {folder.name} and all later ones"
        )
    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:  # written by something else
        raise RunError(f"{file}: no file of tensors ({error}); restore it from a copy of the run") from None
    if {key: list(value.shape) for key, value in tensors.items()} != manifest["tensors"]:
        raise RunError(f"{file}: other tensors than its manifest lists; restore both from a copy of the run")
    return tensors, manifest


def load_state(run: Path, tasks: int | None = None) -> dict[str, Tensor]:
    """The state_dict after the first `tasks` tasks of a run (all finished ones if not given).

    Raises:
        RunError: not a run directory, fewer tasks are finished, or a file is missing or damaged.
    """
    if not (run / "reference" / MANIFEST).is_file():
        raise RunError(
            f"{run}: neither a model nor a run, it has no reference/{MANIFEST}; give a folder made by `pearl run`"
        )
    folders = finished(run)
    if tasks is not None and tasks > len(folders):
        raise RunError(f"{run}: {len(folders)} tasks are finished, {tasks} were asked for; run it further first")
    state, _ = read_part(run / "reference")
    for folder, _ in manifests(run, tasks, Part):  # each in its own place, so that what is newest is laid over all else
        state.update(read_part(folder)[0])
    return state
