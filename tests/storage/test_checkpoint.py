import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pearl.errors import RunError
from pearl.storage import checkpoint, files
from pearl.storage.checkpoint import changed, load_state, read_part, snapshot, write_part
from pearl.storage.files import read_json, write_file, write_json
from pearl.storage.run_directory import RunDirectory
from pearl.storage.stored_task import folder_name

WEIGHTS, MANIFEST = "weights.safetensors", "manifest.json"


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, list[int]]:
    """All there is to a tensor: -0.0 is not 0.0, and NaN is itself."""
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(bits(a[key]) == bits(b[key]) for key in a)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def fails(*paths: Path, match: str | None = None) -> pytest.RaisesExc[RunError]:
    """A RunError of one line that names these paths."""
    said = lambda error: "\n" not in str(error) and all(str(path) in str(error) for path in paths)  # noqa: E731
    return pytest.RaisesExc(RunError, match=match, check=said)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two finished tasks."""
    write_part(tmp_path / "reference", {"a": numbers(0), "b": numbers(0)}, {})
    write_part(tmp_path / "tasks" / "000-task1", {"b": numbers(1), "c": numbers(1)}, {"task": 0})
    write_part(tmp_path / "tasks" / "001-task2", {"c": numbers(2), "d": numbers(2, 2)}, {"task": 1})
    return tmp_path


# One folder


TENSORS = {
    "float32": torch.tensor([[1.5, -0.0], [float("nan"), float("-inf")]]),
    "float64": torch.tensor([1 / 3, 5e-324], dtype=torch.float64),
    "float16": torch.tensor([1e-7, 65504.0], dtype=torch.float16),
    "bfloat16": torch.tensor([3.14, 1e38], dtype=torch.bfloat16),
    "int64": torch.tensor([-(2**63), 2**63 - 1]),
    "int32": torch.tensor([-1], dtype=torch.int32),
    "uint8": torch.tensor([0, 255], dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "4-d": torch.arange(24.0).reshape(2, 3, 2, 2),
}


def test_tensors_come_back_bit_by_bit(tmp_path: Path) -> None:
    write_part(tmp_path / "new" / "part", TENSORS, {})
    tensors, _ = read_part(tmp_path / "new" / "part")
    assert same(tensors, TENSORS)


def test_a_part_without_tensors(tmp_path: Path) -> None:
    write_part(tmp_path, {}, {"task": 3})
    tensors, manifest = read_part(tmp_path)
    assert tensors == {} and manifest["task"] == 3


def test_manifest_says_what_is_there(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"task": 0, "classes": ["owl", "Käuzchen"], "layers": [{"rank": 3, "threshold": 0.25}]}
    write_part(tmp_path, TENSORS, facts)
    data = (tmp_path / WEIGHTS).read_bytes()
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert manifest == read_part(tmp_path)[1]
    assert manifest["sha256"] == {WEIGHTS: hashlib.sha256(data).hexdigest()}
    assert manifest["bytes"] == len(data)
    assert manifest["tensors"]["4-d"] == [2, 3, 2, 2] and manifest["tensors"].keys() == TENSORS.keys()
    assert manifest["format"] == 1
    assert {key: manifest[key] for key in facts} == facts
    assert {path.name for path in tmp_path.iterdir()} == {MANIFEST, WEIGHTS}


def test_facts_cannot_hide_what_protects_the_weights(tmp_path: Path) -> None:
    write_part(tmp_path, {"a": numbers(1)}, {"format": 9, "sha256": 5, "tensors": {}})
    tensors, manifest = read_part(tmp_path)
    assert same(tensors, {"a": numbers(1)}) and manifest["tensors"] == {"a": [1]}


def test_a_part_can_be_written_again(tmp_path: Path) -> None:
    write_part(tmp_path, {"a": numbers(1)}, {})
    write_part(tmp_path, {"b": numbers(2)}, {})
    assert same(read_part(tmp_path)[0], {"b": numbers(2)})


def test_snapshot_is_a_copy_that_can_be_stored(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    state = {"w": weight.to(memory_format=torch.channels_last), "t": weight[0, 0].T, "p": torch.nn.Parameter(weight)}
    copy = snapshot(state)
    assert same(copy, {key: value.detach() for key, value in state.items()})
    write_part(tmp_path, copy, {})
    assert same(read_part(tmp_path)[0], copy)
    before = {key: bits(value) for key, value in copy.items()}
    weight.zero_()
    state["w"].zero_()
    assert {key: bits(value) for key, value in copy.items()} == before
    assert not any(value.requires_grad for value in copy.values())


# What a task has changed


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ({"a": numbers(1, 2), "b": numbers(3)}, set()),
        ({"a": numbers(1, 2), "b": numbers(3), "c": numbers(0)}, {"c"}),
        ({"a": numbers(1, 2 + 2**-22), "b": numbers(3)}, {"a"}),  # by the last bit
        ({"a": numbers(1, 2, 0), "b": numbers(3)}, {"a"}),
        ({"a": numbers(1, 2)[None], "b": numbers(3)}, {"a"}),
        ({"b": numbers(4)}, {"b"}),
        ({"b": numbers(3).double()}, {"b"}),
        ({"b": torch.tensor(3.0)}, {"b"}),
        ({"z": numbers(-0.0), "nan": numbers(float("nan"))}, {"z"}),
        ({"a": torch.tensor([[1.0, 0.0], [2.0, 0.0]])[:, 0]}, set()),  # the same values, not side by side in memory
        ({}, set()),
    ],
)
def test_changed_tensors(after: dict[str, Tensor], expected: set[str]) -> None:
    before = {"a": numbers(1, 2), "b": numbers(3), "z": numbers(0.0), "nan": numbers(float("nan"))}
    actual = changed(before, after)
    assert actual.keys() == expected
    values = {key: after[key].clone() for key in expected}
    for value in after.values():
        value.fill_(7)  # as training would
    assert same(actual, values)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 1), max_size=2)),
    st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 1), max_size=2)),
)
def test_start_overlaid_by_the_changes_is_the_end(before: dict[str, list[int]], after: dict[str, list[int]]) -> None:
    old, new = ({key: torch.tensor(value) for key, value in state.items()} for state in (before, after))
    actual = changed(old, new)
    assert same({**old, **actual}, {**old, **new})
    assert not any(key in old and bits(old[key]) == bits(value) for key, value in actual.items())


# The state after some tasks


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        (0, {"a": numbers(0), "b": numbers(0)}),
        (1, {"a": numbers(0), "b": numbers(1), "c": numbers(1)}),
        (2, {"a": numbers(0), "b": numbers(1), "c": numbers(2), "d": numbers(2, 2)}),
        (None, {"a": numbers(0), "b": numbers(1), "c": numbers(2), "d": numbers(2, 2)}),
    ],
)
def test_state_is_the_start_overlaid_task_by_task(run: Path, tasks: int | None, expected: dict[str, Tensor]) -> None:
    assert same(load_state(run, tasks), expected)


def test_more_tasks_than_are_finished(run: Path) -> None:
    with fails(run, match="it has 2 finished tasks, not 3"):
        load_state(run, 3)


def test_tasks_overlay_by_number(tmp_path: Path) -> None:
    write_part(tmp_path / "reference", {}, {})
    for t in reversed(range(12)):  # neither in the order of writing nor of names
        write_part(tmp_path / "tasks" / f"{t:03d}-{'zyx'[t % 3]}", {"t": torch.tensor(t)}, {})
    assert [int(folder.name[:3]) for folder in RunDirectory(tmp_path).finished] == list(range(12))
    assert [load_state(tmp_path, t + 1)["t"].item() for t in range(12)] == list(range(12))


def test_a_task_without_manifest_does_not_count(run: Path) -> None:
    (run / "tasks" / "001-task2" / MANIFEST).unlink()
    assert [folder.name for folder in RunDirectory(run).finished] == ["000-task1"]
    assert "d" not in load_state(run)


@pytest.mark.parametrize("gap", ["no manifest", "no folder"])
def test_a_gap_ends_the_list(run: Path, gap: str) -> None:
    write_part(run / "tasks" / "002-task3", {"e": numbers(3)}, {})
    assert len(RunDirectory(run).finished) == 3
    folder = run / "tasks" / "001-task2"
    (folder / MANIFEST).unlink()
    if gap == "no folder":
        (folder / WEIGHTS).unlink()
        folder.rmdir()
    assert [folder.name for folder in RunDirectory(run).finished] == ["000-task1"]
    assert load_state(run).keys() == {"a", "b", "c"}


def test_other_things_among_the_tasks_do_not_count(run: Path) -> None:
    (run / "tasks" / "002-notes.txt").write_text("a file")
    for name in ("old", "001-task2 (copy)", "002.bak", "01-task2"):
        write_part(run / "tasks" / name, {}, {})
    assert [folder.name for folder in RunDirectory(run).finished] == ["000-task1", "001-task2"]


def test_more_than_a_thousand_tasks(tmp_path: Path) -> None:
    for t in range(1002):
        folder = tmp_path / "tasks" / folder_name(t, "x")
        folder.mkdir(parents=True)
        (folder / MANIFEST).touch()
    assert [folder.name for folder in RunDirectory(tmp_path).finished] == [folder_name(t, "x") for t in range(1002)]


def test_a_run_without_tasks(tmp_path: Path) -> None:
    write_part(tmp_path / "reference", {"a": numbers(0)}, {})
    assert RunDirectory(tmp_path).finished == [] and load_state(tmp_path).keys() == {"a"}


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    for tasks in (None, 3):
        with fails(tmp_path, match="neither a model nor a run"):
            load_state(tmp_path, tasks)


# Damage


def remove(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(position: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[position] ^= 1
        file.write_bytes(data)

    damage.__name__ = f"flip {position}"
    return damage


def become_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def manifest_with(text: bytes) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        file.write_bytes(text)

    damage.__name__ = repr(text)
    return damage


FOLDERS = ["reference", "tasks/000-task1", "tasks/001-task2"]


@pytest.mark.parametrize(
    "damage", [remove, truncate, empty, flip(0), flip(40), flip(-1), become_a_folder], ids=lambda d: d.__name__
)
@pytest.mark.parametrize("folder", FOLDERS)
def test_damaged_weights_are_named(run: Path, folder: str, damage: Callable[[Path], None]) -> None:
    file = run / folder / WEIGHTS
    load_state(run)
    damage(file)
    with fails(file, match="restore it"):
        load_state(run)
    with fails(file):
        read_part(run / folder)


@pytest.mark.parametrize(
    "damage", [truncate, empty, manifest_with(b"\xff\xfe"), manifest_with(b"{")], ids=lambda d: d.__name__
)
@pytest.mark.parametrize("folder", FOLDERS)
def test_damaged_manifest_is_named(run: Path, folder: str, damage: Callable[[Path], None]) -> None:
    file = run / folder / MANIFEST
    file.write_text(file.read_text().strip())  # no newline at the end, so that cutting a byte off matters
    load_state(run)
    damage(file)
    with fails(file, match="damaged"):
        load_state(run)


@pytest.mark.parametrize(
    "text", ["{}", "[]", "null", '{"format": "1"}', '{"format": null}', '{"format": 1}', '{"format": 1, "sha256": 5}']
)
def test_manifest_of_another_shape_is_named(run: Path, text: str) -> None:
    file = run / "reference" / MANIFEST
    file.write_text(text)
    with fails(file, match="damaged"):
        load_state(run)


def test_manifest_without_the_checksum_of_the_weights(run: Path) -> None:
    (run / "reference" / MANIFEST).write_text('{"format": 1, "sha256": {}, "bytes": 9, "tensors": {}}')
    with fails(run / "reference" / WEIGHTS, match="checksum differs"):
        load_state(run)


def test_missing_manifest_of_the_start_is_named(run: Path) -> None:
    (run / "reference" / MANIFEST).unlink()
    with fails(run, match=f"reference/{MANIFEST}"):
        load_state(run)
    with fails(run / "reference" / MANIFEST, match="missing"):
        read_part(run / "reference")


@pytest.mark.parametrize("folder", FOLDERS)
def test_newer_format_is_refused(run: Path, folder: str) -> None:
    file = run / folder / MANIFEST
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps({**manifest, "format": 2}))
    with fails(file, match=r"format 2, this pearl reads up to 1; install a newer pearl"):
        load_state(run)


def test_weights_of_another_task_are_refused(run: Path) -> None:
    (run / FOLDERS[1] / WEIGHTS).write_bytes((run / FOLDERS[2] / WEIGHTS).read_bytes())
    with fails(run / FOLDERS[1] / WEIGHTS, match="checksum"):
        load_state(run)


def test_json_comes_back(tmp_path: Path) -> None:
    value = {"format": 1, "a": [1, 2.5, None, "é", {}]}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value


# Writing


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("old", [None, b"old"])
@pytest.mark.parametrize("step", ["fsync", "replace", "open", "write"])
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, old: bytes | None
) -> None:
    file = tmp_path / "a.json"
    if old is not None:
        write_file(file, old)
    with monkeypatch.context() as patched:
        patched.setattr(os, step, no_space)
        with fails(file, match=r"cannot be written \(No space left on device\).*PEARL_RUNS"):
            write_file(file, b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == ({} if old is None else {"a.json": old})
    write_file(file, b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.json": b"new"}


def test_content_reaches_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (steps.append("fsync"), fsync(file))[1])
    monkeypatch.setattr(os, "replace", lambda *args, **how: (steps.append("rename"), replace(*args, **how))[1])
    write_file(tmp_path / "a", b"new")
    assert steps == ["fsync", "rename", "fsync"]  # the last of the folder, which holds the name


@pytest.mark.parametrize("failing", [1, 2])
def test_a_part_half_written_does_not_count(run: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    before, calls = load_state(run), 0

    def write(path: Path, data: bytes, **how: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise RunError("full")
        write_file(path, data, **how)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_file", write)  # the tensors go this way,
        patched.setattr(files, "write_file", write)  # the manifest that way
        with pytest.raises(RunError, match="full"):
            write_part(run / "tasks" / "002-task3", {"e": numbers(3)}, {})
    assert len(RunDirectory(run).finished) == 2 and same(load_state(run), before)


def test_a_file_where_a_folder_should_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with fails(tmp_path / "file" / "a.json", match="cannot be written"):
        write_file(tmp_path / "file" / "a.json", b"new")


# Names of folders


@pytest.mark.parametrize(
    ("index", "name", "folder"),
    [
        (0, "task1", "000-task1"),
        (12, "birds of prey", "012-birds-of-prey"),
        (3, "../../etc/passwd", "003-etc-passwd"),
        (3, "..", "003"),
        (3, "", "003"),
        (3, "鳥", "003"),
        (7, "a\0b", "007-a-b"),
        (7, "x" * 500, "007-" + "x" * 40),
    ],
)
def test_folder_names(index: int, name: str, folder: str) -> None:
    assert folder_name(index, name) == folder


Nasty = st.text(st.sampled_from("/\\.:\0~-_ a9é鳥\n\u202e")) | st.text() | st.just("ab/" * 2000)


@settings(deadline=None)
@given(st.integers(0, 999), Nasty)
@example(0, "/")
@example(0, "..")
@example(0, "C:\\Windows")
@example(999, "\0")
def test_a_folder_name_never_leaves_its_folder(index: int, name: str) -> None:
    made = folder_name(index, name)
    for flavour in (PurePosixPath, PureWindowsPath):
        assert (flavour("/run/tasks") / made).parts == flavour("/run/tasks").parts + (made,)
    assert made.startswith(f"{index:03d}") and made.isascii() and made.isprintable() and len(made) <= 44
    assert not set(made) & set("/\\:.\0 ")


@settings(deadline=None)
@given(st.lists(Nasty, min_size=2, max_size=4))
def test_folders_of_different_tasks_differ(names: list[str]) -> None:
    made = [folder_name(index, name) for index, name in enumerate(names)]
    assert sorted(set(made)) == made


@pytest.mark.parametrize("name", ["..", "a/b", "鳥", "", "x" * 300])
def test_a_task_is_found_again_whatever_its_name(tmp_path: Path, name: str) -> None:
    write_part(tmp_path / "reference", {}, {})
    write_part(tmp_path / "tasks" / folder_name(0, name), {"a": numbers(1)}, {})
    assert len(RunDirectory(tmp_path).finished) == 1 and load_state(tmp_path).keys() == {"a"}
