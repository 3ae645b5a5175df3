"""What a run has learnt, on disk: a folder of safetensors and a manifest for the start and for each task.

A folder holds only the tensors that its task added or changed; the state after task t is the start overlaid by the
folders 0..t. A folder counts when its manifest is there: it is written last, by atomic rename, after fsync.

Tensors that are not always needed together may lie in several files of a folder, as their method says.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from pearl.errors import RunError, counted, reason, short_of_memory
from pearl.storage.files import FORMAT, open_regular, write_file, write_json
from pearl.storage.inside import remove_file
from pearl.storage.run_directory import RunDirectory
from pearl.storage.shapes import Part
from pearl.storage.stored_task import MANIFEST, read_manifest

WEIGHTS = "weights.safetensors"
STATISTICS = "statistics.safetensors"  # of which every task's are needed
RUNNING = "running.safetensors"  # statistics of which the newest are
FILES = (WEIGHTS, STATISTICS, RUNNING)

FileOf = Callable[[str], str]  # of a tensor of the state_dict


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


def fingerprint(tensor: Tensor) -> str:
    """SHA-256 of a tensor's type, shape and bits."""
    row_major = _row_major(tensor)
    digest = hashlib.sha256(f"{row_major.dtype} {list(row_major.shape)} ".encode())
    digest.update(_bytes(row_major).numpy().data)
    return digest.hexdigest()


def snapshot(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of a state_dict on the CPU, row-major, that training cannot touch."""
    return {key: _row_major(value).clone() for key, value in state.items()}


def in_weights(name: str) -> str:
    """All of them in one file."""
    return WEIGHTS


def write_part(
    folder: Path,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    file_of: FileOf = in_weights,
    *,
    within: Path | None = None,
) -> None:
    """Store one folder of a run: the tensors, then the manifest with their checksums and `facts`.

    `within` is the run, below which the folder has to lie whatever links there are.
    """
    files: dict[str, dict[str, Tensor]] = {WEIGHTS: {}}
    for name, tensor in tensors.items():
        files.setdefault(file_of(name), {})[name] = tensor
    digests, size = {}, 0
    for file, content in files.items():
        data = save(content)
        write_file(folder / file, data, within=within)
        digests[file] = sha256(data)
        size += len(data)
    manifest = {
        "format": FORMAT,
        "sha256": digests,
        "bytes": size,
        "tensors": {key: list(value.shape) for key, value in tensors.items()},
    }
    write_json(folder / MANIFEST, {**facts, **manifest}, within=within)


def read_part(
    folder: Path, shape: type[Part] = Part, replaced: Collection[str] = ()
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and manifest of one folder; its checksums are verified, and that they are those of the manifest.

    Running statistics may be missing where all of them are among the tensors that later tasks have `replaced`.

    Raises:
        RunError: a file is missing or damaged; the message names it.
    """
    manifest = read_manifest(folder, shape)
    thinned = RUNNING in manifest["sha256"] and not (folder / RUNNING).exists()
    tensors = read_files(folder, manifest, {WEIGHTS, STATISTICS} if thinned else FILES)
    missing = manifest["tensors"].keys() - tensors.keys()
    if thinned and not missing <= set(replaced):
        raise _unreadable(folder / RUNNING, os.strerror(errno.ENOENT))
    if tensors.keys() - manifest["tensors"].keys() or (missing and not thinned):
        raise _other_tensors(folder / WEIGHTS)
    return tensors, manifest


def read_files(folder: Path, manifest: Mapping[str, Any], files: Collection[str] = FILES) -> dict[str, Tensor]:
    """The tensors in those of a folder's files that it has.

    Raises:
        RunError: see `read_part`.
    """
    tensors: dict[str, Tensor] = {}
    for name in FILES:
        if name in files and (name == WEIGHTS or name in manifest["sha256"]):
            tensors |= _read_file(folder / name, manifest)
    return tensors


def remove_replaced(run: Path) -> None:
    """Remove the running statistics of tasks that later ones have replaced; only earlier states would need them.

    They go after the later task's folder is whole. What cannot be removed stays.

    Raises:
        RunError: a manifest is damaged.
    """
    replaced: set[str] = set()
    for folder, manifest in reversed([*RunDirectory(run).manifests(shape=Part)]):
        with suppress(OSError, ValueError, RunError):
            if replaced and _names_in(folder / RUNNING) <= replaced:
                remove_file(folder / RUNNING, run)
        replaced |= set(manifest["tensors"])


def _names_in(file: Path) -> set[str]:
    """Names of the tensors in a file, of which only its head is read."""
    with open_regular(file) as opened:
        return set(json.loads(opened.read(int.from_bytes(opened.read(8), "little")))) - {"__metadata__"}


def _read_file(file: Path, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        with open_regular(file) as opened:
            # of one that has grown no more than tells it: it may be larger than memory
            data = opened.read(manifest["bytes"] + 1)
    except OSError as error:
        raise _unreadable(file, reason(error)) from None
    if sha256(data) != manifest["sha256"].get(file.name):
        raise RunError(
            f"{file}: checksum differs from its manifest, the file is damaged; restore it from a copy, or, to learn "
            f"again from there, remove classes.json, the folder {file.parent.name} and all later ones"
        )
    try:
        tensors = load(data)
    except BaseException as error:
        if short_of_memory(error):
            raise MemoryError from error
        if not isinstance(error, (SafetensorError, KeyError, ValueError, RuntimeError)):
            raise
        # written by something else
        raise RunError(f"{file}: no file of tensors ({error}); restore it from a copy of the run") from None
    if any(list(value.shape) != manifest["tensors"].get(key) for key, value in tensors.items()):
        raise _other_tensors(file)
    return tensors


def _unreadable(file: Path, why: str) -> RunError:
    return RunError(f"{file}: cannot be read ({why}); restore it from a copy of the run")


def _other_tensors(file: Path) -> RunError:
    return RunError(f"{file}: other tensors than its manifest lists; restore both from a copy of the run")


def load_state(
    run: Path,
    tasks: int | None = None,
    *,
    file_of: FileOf | None = None,
    needed: Callable[[Mapping[str, Tensor]], int | None] | None = None,
) -> dict[str, Tensor]:
    """The state_dict after the first `tasks` tasks of a run (all finished ones if not given).

    With the `file_of` that it was written with, running statistics that a later task has replaced are not read; without
    it all of those that are there are.
    `needed` says, by the statistics, of how many tasks the weights are enough (None: of all): others are left out.

    Raises:
        RunError: not a run directory, fewer tasks are finished, or a file is missing or damaged.
    """
    directory = RunDirectory(run)
    if not directory.reference_manifest.is_file():
        raise RunError(
            f"{run}: neither a model nor a run, it has no reference/{MANIFEST}; give a folder made by `pearl run`"
        )
    folders = directory.finished
    if tasks is not None and tasks > len(folders):
        raise RunError(f"{run}: it has {counted(len(folders), 'finished task')}, not {tasks}; run it further first")
    # each in its own place, so that what is newest is laid over all else
    parts = list(directory.manifests(tasks, Part))
    newer: set[str] = set()
    stale = {folder for folder, manifest in parts[:-1] if not (folder / RUNNING).exists()} if file_of is None else set()
    if file_of is not None:
        for folder, manifest in reversed(parts):
            running = {name for name in manifest["tensors"] if file_of(name) == RUNNING}
            if running <= newer:
                stale.add(folder)
            newer |= running
    statistics: dict[str, Tensor] = {}
    for folder, manifest in parts:
        files = {STATISTICS} if folder in stale else {STATISTICS, RUNNING}
        try:
            statistics |= read_files(folder, manifest, files)
        except RunError:
            removed = RUNNING in files & manifest["sha256"].keys() and not (folder / RUNNING).exists()
            # counted again: another process may have learnt one
            if not removed or len(parts) == len(directory.finished):
                raise
            raise RunError(
                f"{run}: its state after {counted(len(parts), 'task')} was not kept, as a later task has replaced "
                f"{folder.name}/{RUNNING}; use the newest state, or make models with engine.earlier_states=true"
            ) from None
    enough = needed(statistics) if needed else None
    state, _ = read_part(directory.reference)
    for index, (folder, manifest) in enumerate(parts):
        # statistics of the first versions are among the weights
        if enough is None or index < enough or STATISTICS not in manifest["sha256"]:
            state |= read_files(folder, manifest, {WEIGHTS})
    return state | statistics
