"""The state of a run on disk: a folder of safetensors and a manifest for the start and for each task.

A folder holds only the tensors that its task added or changed; the state after task t is the start overlaid by the
folders 0..t. A folder is complete when its manifest exists, which is written last, by atomic rename, after fsync. A
method may distribute tensors over several files of a folder, if they are not always needed together.
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
from pearl.storage.schemas import WeightFile
from pearl.storage.stored_task import MANIFEST, read_manifest

WEIGHTS = "weights.safetensors"
STATISTICS = "statistics.safetensors"  # needed of every task
RUNNING = "running.safetensors"  # statistics needed of the newest task
FILES = (WEIGHTS, STATISTICS, RUNNING)
FEATURES = "features.safetensors"  # of a task's images, apart from the state; see `lifecycle.without_task`
STORED = (*FILES, FEATURES)

FileOf = Callable[[str], str]  # of a tensor of the state_dict


def sha256(data: bytes) -> str:
    """Return the hexadecimal SHA-256."""
    return hashlib.sha256(data).hexdigest()


def changed(before: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a snapshot of the tensors of a state_dict that are missing in the snapshot `before`, or differ in bits."""
    rows = ((key, _row_major(value)) for key, value in state.items())
    return {key: value.clone() for key, value in rows if key not in before or not _same_bits(before[key], value)}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # 0.0 equals -0.0, and NaN nothing; bytes have neither problem
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _row_major(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def fingerprint(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and bits."""
    row_major = _row_major(tensor)
    digest = hashlib.sha256(f"{row_major.dtype} {list(row_major.shape)} ".encode())
    digest.update(_bytes(row_major).numpy().data)
    return digest.hexdigest()


def snapshot(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of a state_dict on the CPU, row-major, which training cannot change."""
    return {key: _row_major(value).clone() for key, value in state.items()}


def in_weights(name: str) -> str:
    """Put all tensors into one file."""
    return WEIGHTS


def write_part(
    folder: Path,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    file_of: FileOf = in_weights,
    *,
    features: Mapping[str, Tensor] | None = None,
    within: Path | None = None,
) -> None:
    """Store one folder of a run: the tensors, then the manifest with their checksums and `facts`.

    `features` are tensors of the task's images, apart from the state. The folder must be below `within`, the run, also
    after following links.
    """
    files, manifest = part_files(tensors, facts, file_of, features)
    for file, data in files.items():
        write_file(folder / file, data, within=within)
    write_json(folder / MANIFEST, manifest, within=within)


def part_files(
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    file_of: FileOf = in_weights,
    features: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the files of a folder and its manifest; see `write_part`."""
    contents: dict[str, dict[str, Tensor]] = {WEIGHTS: {}}
    for name, tensor in tensors.items():
        contents.setdefault(file_of(name), {})[name] = tensor
    if features:
        contents[FEATURES] = {name: _row_major(value) for name, value in features.items()}
    files = {file: save(content) for file, content in contents.items()}
    manifest = {
        "format": FORMAT,
        "sha256": {file: sha256(data) for file, data in files.items()},
        "bytes": sum(map(len, files.values())),
        "tensors": {key: list(value.shape) for key, value in tensors.items()},
    }
    return files, {**facts, **manifest}


def read_part(
    folder: Path, shape: type[WeightFile] = WeightFile, replaced: Collection[str] = ()
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and manifest of one folder, after verifying checksums and names.

    Running statistics may be missing if all of them are among the tensors that later tasks have `replaced`.

    Raises:
        RunError: a file is missing or damaged; the message has its path.
    """
    manifest = read_manifest(folder, shape)
    thinned = RUNNING in manifest["sha256"] and not (folder / RUNNING).exists()
    tensors = read_files(folder, manifest, {WEIGHTS, STATISTICS} if thinned else FILES)
    missing = manifest["tensors"].keys() - tensors.keys()
    if thinned and not missing <= set(replaced):
        raise _unreadable(folder / RUNNING, os.strerror(errno.ENOENT))
    if tensors.keys() - manifest["tensors"].keys() or (missing and not thinned):
        raise _other_tensors(folder / WEIGHTS)
    read_features(folder, manifest)  # checks them
    return tensors, manifest


def read_features(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the features of a task's images, see `Method.features_of_images`; empty if none are stored.

    A user may have removed the file, and `pearl push` leaves it out.

    Raises:
        RunError: the file is damaged.
    """
    there = FEATURES in manifest["sha256"] and (folder / FEATURES).exists()
    return _tensors_of(folder / FEATURES, manifest) if there else {}


def features_without(folder: Path, manifest: Mapping[str, Any], label: int) -> bytes | None:
    """Return the file of features without the images of a class, a logit index; None without such a file.

    Raises:
        RunError: the file is damaged.
    """
    if not (features := read_features(folder, manifest)):
        return None
    return save(rows_without(features, label))


def rows_without(features: Mapping[str, Tensor], label: int) -> dict[str, Tensor]:
    """Return features without the images of a class, a logit index; higher indices become one less."""
    labels = features["labels"]
    kept = {name: value[labels != label].contiguous() for name, value in features.items()}
    return {**kept, "labels": kept["labels"] - (kept["labels"] > label).to(labels.dtype)}


def read_files(folder: Path, manifest: Mapping[str, Any], files: Collection[str] = FILES) -> dict[str, Tensor]:
    """Return the tensors in those of a folder's files that exist.

    Raises:
        RunError: see `read_part`.
    """
    tensors: dict[str, Tensor] = {}
    for name in FILES:
        if name in files and (name == WEIGHTS or name in manifest["sha256"]):
            tensors |= _read_file(folder / name, manifest)
    return tensors


def remove_replaced(run: Path) -> None:
    """Remove the running statistics that only states before the last task's start would need.

    Those of the state before the last task are kept, for `pearl undo`. Files that cannot be removed are kept as well.

    Raises:
        RunError: a manifest is damaged.
    """
    replaced: set[str] = set()
    for folder, manifest in reversed([*RunDirectory(run).manifests(shape=WeightFile)][:-1]):
        with suppress(OSError, ValueError, RunError):
            if replaced and _names_in(folder / RUNNING) <= replaced:
                remove_file(folder / RUNNING, run)
        replaced |= set(manifest["tensors"])


def lost_running(run: Path, tasks: int) -> Path | None:
    """Return a file of running statistics that the state after the first `tasks` tasks needs and that is not there.

    Raises:
        RunError: a manifest is damaged.
        OSError: a file of tensors cannot be read.
    """
    replaced: set[str] = set()
    for folder, manifest in reversed([*RunDirectory(run).manifests(tasks, WeightFile)]):
        names = set(manifest["tensors"])
        if RUNNING in manifest["sha256"] and not (folder / RUNNING).exists():
            for file in manifest["sha256"].keys() - {RUNNING}:
                names -= _names_in(folder / file)
            if not names <= replaced:
                return folder / RUNNING
        replaced |= set(manifest["tensors"])
    return None


def rewritten(
    folder: Path, manifest: Mapping[str, Any], edit: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return a folder's files with other tensors, and the manifest for them; nothing is written.

    `edit` maps the tensors of one file to the new ones. Files that stay the same are left out; of files that were
    removed since later tasks replaced them, the tensors stay in the manifest.

    Raises:
        RunError: a file is missing or damaged.
    """
    files: dict[str, bytes] = {}
    digests, shapes, size = dict(manifest["sha256"]), dict(manifest["tensors"]), int(manifest["bytes"])
    for file in FILES:
        if file not in digests or (file == RUNNING and not (folder / RUNNING).exists()):
            continue
        before = _read_file(folder / file, manifest)
        after = edit(dict(before))
        data, old = save(dict(after)), save(before)
        if data == old:
            continue
        files[file], digests[file], size = data, sha256(data), size + len(data) - len(old)
        if after.keys() == before.keys():
            shapes |= {name: list(value.shape) for name, value in after.items()}
        else:
            names = dict(zip(before, after, strict=True))
            shapes = {names.get(name, name): shape for name, shape in shapes.items()}
    return files, {**manifest, "sha256": digests, "bytes": size, "tensors": shapes}


def _names_in(file: Path) -> set[str]:
    """Return the names of the tensors in a file, reading only its header."""
    with open_regular(file) as opened:
        return set(json.loads(opened.read(int.from_bytes(opened.read(8), "little")))) - {"__metadata__"}


def _read_file(file: Path, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = _tensors_of(file, manifest)
    if any(list(value.shape) != manifest["tensors"].get(key) for key, value in tensors.items()):
        raise _other_tensors(file)
    return tensors


def _tensors_of(file: Path, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        with open_regular(file) as opened:
            # a file that has grown is detected by its length only: it may be larger than memory
            data = opened.read(manifest["bytes"] + 1)
    except OSError as error:
        raise _unreadable(file, reason(error)) from None
    if sha256(data) != manifest["sha256"].get(file.name):
        raise RunError(
            f"{file}: checksum differs from its manifest, so the file is damaged; restore it from a copy, or, to "
            f"learn again from there, remove classes.json, the folder {file.parent.name} and all later ones"
        )
    try:
        return load(data)
    except BaseException as error:
        if short_of_memory(error):
            raise MemoryError from error
        if not isinstance(error, (SafetensorError, KeyError, ValueError, RuntimeError)):
            raise
        # written by another program
        raise RunError(f"{file}: not a file of tensors ({error}); restore it from a copy of the run") from None


def _unreadable(file: Path, why: str) -> RunError:
    return RunError(f"{file}: cannot be read ({why}); restore it from a copy of the run")


def _other_tensors(file: Path) -> RunError:
    return RunError(f"{file}: its tensors differ from its manifest's list; restore both from a copy of the run")


def load_state(
    run: Path,
    tasks: int | None = None,
    *,
    file_of: FileOf | None = None,
    needed: Callable[[Mapping[str, Tensor]], int | None] | None = None,
) -> dict[str, Tensor]:
    """Return the state_dict after the first `tasks` usable tasks of a run (default: all finished ones).

    With the `file_of` of its writing, replaced running statistics are not read; without it all existing ones are.
    `needed` returns, from the statistics, how many tasks' weights are needed (None: all); others are left out.

    Raises:
        RunError: not a run directory, too few finished tasks, or a missing or damaged file.
    """
    first = RunDirectory(run).first_answer
    try:
        return _loaded(run, tasks, file_of, needed)
    except RunError:
        if first is None or RunDirectory(run).first_answer:
            raise
        return _loaded(run, tasks, file_of, needed)  # the trained task has replaced its first answer meanwhile


def _loaded(
    run: Path, tasks: int | None, file_of: FileOf | None, needed: Callable[[Mapping[str, Tensor]], int | None] | None
) -> dict[str, Tensor]:
    directory = RunDirectory(run)
    if not directory.reference_manifest.is_file():
        raise RunError(
            f"{run}: neither a model nor a run, it has no reference/{MANIFEST}; give a folder made by `pearl run`"
        )
    folders = directory.usable
    if tasks is not None and tasks > len(folders):
        raise RunError(f"{run}: it has {counted(len(folders), 'finished task')}, not {tasks}; resume it first")
    # separate, so that newer tensors can replace older ones
    parts = list(directory.manifests(tasks, WeightFile))
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
            # counted again: another process may have added a task
            if not removed or len(parts) == len(directory.finished):
                raise
            raise RunError(
                f"{run}: its state after {counted(len(parts), 'task')} is not stored, since a later task has replaced "
                f"{folder.name}/{RUNNING}; use the newest state, or create models with engine.earlier_states=true"
            ) from None
    enough = needed(statistics) if needed else None
    state, _ = read_part(directory.reference)
    for index, (folder, manifest) in enumerate(parts):
        if enough is None or index < enough:
            state |= read_files(folder, manifest, {WEIGHTS})
    return state | statistics
