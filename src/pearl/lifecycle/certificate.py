"""Certificates of forgetting: what a change removed, and the digests of everything that it left.

certificates/NNN.json lists each file of tensors with its SHA-256 before and after. Of a rewritten file it lists the
tensors too, which shows those that kept their bits. It is written in the change that it certifies, whole or not at all.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load

from pearl.errors import RunError, counted, printable
from pearl.names import class_name
from pearl.storage.change import Change
from pearl.storage.checkpoint import RUNNING, STORED, fingerprint, sha256
from pearl.storage.files import FORMAT, json_bytes, read_json, read_regular
from pearl.storage.run_directory import RunDirectory
from pearl.storage.schemas import Certificate
from pearl.storage.stored_task import MANIFEST
from pearl.version import __version__


class Kept(NamedTuple):
    """A file of tensors that remains, its path afterwards, and the new names of its tensors."""

    before: Path
    after: Path
    renamed: Callable[[str], str] = str


class Check(NamedTuple):
    """A line of `pearl verify`; `state` is ok, superseded (not checkable any more, for a known reason) or wrong."""

    state: str
    line: str


def now() -> str:
    """Return the time as in events.jsonl, so that both can be compared."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def tensor_files(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the existing files of tensors in folders."""
    for folder in folders:
        yield from (folder / name for name in STORED if (folder / name).is_file())


def certify(change: Change, forgotten: Mapping[str, Any], kept: Iterable[Kept], *, stays: str = "") -> str:
    """Add the certificate to a prepared change, and return its name. `stays` is empty if the removal is exact.

    Raises:
        RunError: it cannot be written.
        OSError: a file cannot be read.
    """
    directory, path = change.directory, change.directory.path
    files = [_entry(change, each) for each in kept]
    left = {entry["from"] for entry in files}
    every = {file.relative_to(path).as_posix(): file for file in _all_files(directory)}
    numbers = [int(file.stem) for file in directory.certificates]
    file = directory.certificates_folder / f"{max(numbers, default=-1) + 1:03d}.json"
    certificate = {
        "format": FORMAT,
        "pearl": __version__,
        "at": now(),
        "forgotten": dict(forgotten),
        "exact": not stays,
        "stays": stays,
        "files": files,
        "removed": {name: sha256(read_regular(stored)) for name, stored in every.items() if name not in left},
    }
    change.write(file, json_bytes(certificate))
    return file.relative_to(path).as_posix()


def _all_files(directory: RunDirectory) -> Iterator[Path]:
    return tensor_files([directory.reference, *directory.finished])


def _entry(change: Change, kept: Kept) -> dict[str, Any]:
    path = change.directory.path
    before = read_regular(kept.before)
    after = change.content(kept.after)
    after = before if after is None else after
    names = {"file": kept.after, "from": kept.before}
    entry: dict[str, Any] = {key: file.relative_to(path).as_posix() for key, file in names.items()}
    entry |= {"before": sha256(before), "after": sha256(after)}
    if before != after:
        new = {name: fingerprint(value) for name, value in sorted(load(after).items())}
        old = {kept.renamed(name): (name, fingerprint(value)) for name, value in load(before).items()}
        none = "", ""  # of a tensor that is computed anew and was not in this file
        rows = {name: (*old.get(name, none), digest) for name, digest in new.items()}
        entry["tensors"] = {
            name: dict(zip(("from", "before", "after"), row, strict=True)) for name, row in rows.items()
        }
    return entry


# ------------------------------------------------------------------------------------------------------ verification


def certificate_checks(path: Path) -> list[Check]:
    """Return a line for each certificate of a model, and one for each of its files that does not match.

    A file that a later certificate lists is followed through it. A task that was taken back or learnt since supersedes
    what a certificate says about it.

    Raises:
        RunError: a manifest is damaged.
    """
    directory = RunDirectory(path)
    certificates: list[tuple[Path, dict[str, Any]]] = []
    checks: list[Check] = []
    for file in directory.certificates:
        try:
            certificates.append((file, read_json(file, Certificate)))
        except RunError as error:
            checks.append(Check("wrong", str(error)))
    learnt = directory.learnt_at
    for number, (file, certificate) in enumerate(certificates):
        later = [each for _, each in certificates[number + 1 :]]
        states = [_state(directory, entry, certificate, later, learnt) for entry in certificate["files"]]
        wrong = [why for state, why in states if state == "wrong"]
        wrong += _still_there(directory, certificate, learnt)
        name = f"{file.relative_to(path).as_posix()}: {_title(certificate)}"
        checks += [Check("wrong", f"{name}: {why}") for why in wrong]
        if not wrong:
            past = sum(state == "superseded" for state, _ in states)
            why = next((why for state, why in states if state == "superseded"), "")
            same = f"{counted(len(states) - past, 'file')} as certified"
            more = f", {past} not any more ({why})" if past else ""
            checks.append(Check("superseded" if past == len(states) else "ok", f"{name}: {same}{more}"))
    return checks


def _title(certificate: Mapping[str, Any]) -> str:
    kind = "class" if "class" in certificate["forgotten"] else "task"
    exact = "exactly" if certificate["exact"] else f"except {certificate['stays']}"
    return f"{kind} {printable(certificate['forgotten'][kind])} forgotten {exact}, {certificate['at'][:10]}"


def _state(
    directory: RunDirectory,
    entry: Mapping[str, Any],
    certificate: Mapping[str, Any],
    later: Iterable[Mapping[str, Any]],
    learnt: Mapping[Any, str],
) -> tuple[str, str]:
    """Return whether a certified file still has its bits, and why not."""
    name, digest, at = entry["file"], entry["after"], certificate["at"]
    for other in later:
        follow = next((each for each in other["files"] if each["from"] == name), None)
        if follow is None or follow["before"] != digest:
            return "superseded", f"{name} was removed or replaced by {other['at'][:10]}"
        name, digest, at = follow["file"], follow["after"], other["at"]
    file = directory.path / name
    task = next((index for index, folder in enumerate(directory.finished) if folder == file.parent), None)
    if file.is_file():
        if sha256(read_regular(file)) == digest:
            return "ok", ""
        if task is not None and learnt.get(task, "") > at:
            return "superseded", f"task {file.parent.name} was learnt since"
        return "wrong", f"{name} has other bits than were certified; restore it from a copy"
    if not (file.parent / MANIFEST).is_file():
        return "superseded", f"task {file.parent.name} was taken back since"
    if file.name == RUNNING and any(time > at for time in learnt.values()):
        return "superseded", f"{name} was replaced by a later task"
    return "wrong", f"{name} is missing; restore it from a copy"


def _still_there(directory: RunDirectory, certificate: Mapping[str, Any], learnt: Mapping[Any, str]) -> Iterator[str]:
    """Yield a line for each task that lists the forgotten class and was not learnt after it was forgotten."""
    name = certificate["forgotten"].get("class")
    for index, task in enumerate(directory.tasks if name else ()):
        if class_name(name) in map(class_name, task.names) and not learnt.get(index, "") > certificate["at"]:
            yield f"task {printable(task.name)} lists the class; restore the model from a copy"
