"""Certificates of what was forgotten, and `pearl verify`: digests are computed here independently."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import pearl
from pearl.errors import RunError
from pearl.storage.run_directory import RunDirectory
from photos import SMALL, TASKS, write_photos, write_tasks


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Models of three tasks, with heads and with statistics; and one with heads that never learnt the second."""
    root = tmp_path_factory.mktemp("shop")
    write_tasks(root)
    for kind, tasks in (("heads", [*TASKS]), ("statistics", [*TASKS]), ("never", ["first", "third"])):
        for number, task in enumerate(tasks):
            settings = SMALL | {"method": {"classifier": "statistics" if kind == "statistics" else "heads"}}
            pearl.learn(root / kind, root / task, quiet=True, **({} if number else settings))
    return root


@pytest.fixture(params=["heads", "statistics"])
def model(request, shop, tmp_path):
    return Path(shutil.copytree(shop / request.param, tmp_path / "model"))


@pytest.fixture
def heads(shop, tmp_path):
    return Path(shutil.copytree(shop / "heads", tmp_path / "model"))


def digests(path):
    files = sorted(path.rglob("*.safetensors"))
    return {file.relative_to(path).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def certificate(path, number=0):
    return json.loads((path / "certificates" / f"{number:03d}.json").read_text())


def verified(cli, path, code=0):
    """The lines of `pearl verify` by their state, without the file lines that are ok."""
    out, err = cli("verify", path, code=code)
    assert err == ""
    rows = [line.split(maxsplit=1) for line in out.splitlines()]
    assert {state for state, _ in rows} <= {"ok", "superseded", "wrong"}
    assert any(state == "wrong" for state, _ in rows) == (code == 2)
    return [(state, line) for state, line in rows if state != "ok" or "certificates/" in line]


def test_the_certificate_of_a_class(model, cli):
    before = digests(model)
    pearl.load(model).forget("second 1")
    actual, after = certificate(model), digests(model)
    assert actual["forgotten"] == {"class": "second 1"} and actual["exact"] is False
    assert actual["stays"].startswith("the weights") and actual["removed"] == {}
    assert {entry["from"]: entry["before"] for entry in actual["files"]} == before
    assert {entry["file"]: entry["after"] for entry in actual["files"]} == after and after != before
    changed = [entry for entry in actual["files"] if entry["before"] != entry["after"]]
    assert changed and [entry for entry in actual["files"] if "tensors" in entry] == changed
    for entry in changed:
        kept = {name for name, row in entry["tensors"].items() if row["before"] == row["after"]}
        assert {row["from"] for row in entry["tensors"].values()} == {*entry["tensors"]}
        assert {*entry["tensors"]} == {*load_file(model / entry["file"])}
        other = {*entry["tensors"]} - kept
        assert other and all(any(word in name for word in ("heads.blocks.1.", "class_statistics.")) for name in other)
    ((state, line),) = verified(cli, model)
    assert state == "ok" and line.startswith("certificates/000.json: class second 1 forgotten except the weights")
    assert f"{len(before)} files as certified" in line


def test_the_certificate_of_a_task_fits_the_model_that_never_learnt_it(heads, shop, cli):
    before = digests(heads)
    pearl.load(heads).forget(task="second")
    actual = certificate(heads)
    assert actual["forgotten"] == {"task": "second", "classes": ["second 0", "second 1"]}
    assert actual["exact"] is True and actual["stays"] == ""
    assert {entry["file"]: entry["after"] for entry in actual["files"]} == digests(shop / "never")
    gone = {name: digest for name, digest in before.items() if name.startswith("tasks/001")}
    assert actual["removed"] == gone and gone
    (moved,) = [entry for entry in actual["files"] if "tensors" in entry]
    assert [moved[key] for key in ("from", "file")] == [f"tasks/00{n}-third/weights.safetensors" for n in (2, 1)]
    assert all(row["before"] == row["after"] for row in moved["tensors"].values())
    assert moved["tensors"]["heads.blocks.1.weight"]["from"] == "heads.blocks.2.weight"
    ((state, line),) = verified(cli, heads)
    assert state == "ok" and "task second forgotten exactly" in line


def flipped(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_flipped_byte_and_a_missing_file(heads, cli):
    pearl.load(heads).forget("second 1")
    file = RunDirectory(heads).finished[1] / "weights.safetensors"
    whole = file.read_bytes()
    flipped(file)
    damaged, certified = verified(cli, heads, code=2)
    assert damaged[0] == "wrong" and f"{file}: checksum differs" in damaged[1]
    assert certified[0] == "wrong" and "tasks/001-second/weights.safetensors has other bits" in certified[1]
    manifest = file.with_name("manifest.json")
    text = manifest.read_text()
    old, new = (hashlib.sha256(data).hexdigest() for data in (whole, file.read_bytes()))
    manifest.write_text(text.replace(old, new))  # by someone who knows manifests
    ((state, line),) = verified(cli, heads, code=2)
    assert state == "wrong" and "certificates/000.json" in line and "has other bits than were certified" in line
    manifest.write_text(text)
    file.unlink()
    missing, certified = verified(cli, heads, code=2)
    assert "cannot be read (No such file" in missing[1] and "weights.safetensors is missing" in certified[1]
    file.write_bytes(whole)
    assert [state for state, _ in verified(cli, heads)] == ["ok"]


def test_a_model_that_learnt_further_is_still_checked(model, shop, tmp_path, cli):
    """Also if the class was learnt again, which is not held against the certificate."""
    pearl.load(model).forget("second 1")
    write_photos(tmp_path / "more", {"second 1": 3, "five": 5}, 4)
    pearl.load(model).learn(tmp_path / "more", quiet=True)
    ((state, line),) = verified(cli, model)
    assert state == "ok" and "as certified" in line
    if RunDirectory(model).config["method"]["classifier"]["name"] == "statistics":
        assert "1 not any more (tasks/002-third/running.safetensors was replaced by a later task)" not in line
        write_photos(tmp_path / "most", {"six": 6, "seven": 7}, 4)
        pearl.load(model).learn(tmp_path / "most", quiet=True)
        ((state, line),) = verified(cli, model)
        assert state == "ok" and "running.safetensors was replaced by a later task" in line


def test_a_task_that_was_taken_back_or_learnt_since(heads, shop, cli):
    pearl.load(heads).forget("second 1")
    pearl.load(heads).undo()
    ((state, line),) = verified(cli, heads)
    assert state == "ok" and "1 not any more (task 002-third was taken back since)" in line
    shutil.rmtree(heads / "certificates")
    pearl.load(heads).forget("first 1")
    pearl.load(heads).undo()
    pearl.load(heads).learn(shop / "second", quiet=True, train={"epochs": 2})
    ((state, line),) = verified(cli, heads)
    assert state == "ok" and "1 not any more (task 001-second was learnt since)" in line


def test_one_certificate_after_another(heads, cli):
    """A file is followed through later certificates, also if its task got another number."""
    for name in ("third 1", "first 0"):
        pearl.load(heads).forget(name)
    pearl.load(heads).forget(task="second")
    pearl.load(heads).rename("third 0", "three")
    lines = verified(cli, heads)
    assert [state for state, _ in lines] == ["ok", "ok", "ok"]
    assert "1 not any more (tasks/001-second/weights.safetensors was removed or replaced by" in lines[0][1]
    flipped(heads / "tasks" / "001-third" / "weights.safetensors")
    lines = [line for state, line in verified(cli, heads, code=2) if state == "wrong"]
    assert len(lines) == 4 and sum("tasks/001-third/weights.safetensors has other bits" in line for line in lines) == 3


def test_a_class_that_came_back_by_hand(heads, cli):
    pearl.load(heads).forget("second 1")
    for file in (heads / "classes.json", RunDirectory(heads).finished[0] / "manifest.json"):
        file.write_text(file.read_text().replace("first 1", "second 1"))
    ((state, line),) = verified(cli, heads, code=2)
    assert state == "wrong" and "task first lists the class" in line


def test_a_damaged_certificate(heads, cli):
    pearl.load(heads).forget("second 1")
    file = heads / "certificates" / "000.json"
    for text in ("{", json.dumps({**certificate(heads), "forgotten": {}})):
        file.write_text(text)
        ((state, line),) = verified(cli, heads, code=2)
        assert state == "wrong" and line.startswith(f"{file}: damaged")


def test_a_model_without_certificates(model, cli):
    out, _ = cli("verify", model)
    lines = out.splitlines()
    assert lines[-1] == "ok          classes.json: 6 classes in 3 tasks, as in the manifests"
    shown = dict(line.removeprefix("ok").strip().split(": sha256 ") for line in lines[:-1])
    assert {name: text.split()[0] for name, text in shown.items()} == {
        name: digest[:16] for name, digest in digests(model).items()
    }
    assert [check.state for check in pearl.load(model).verify()] == ["ok"] * len(lines)
    (model / "classes.json").unlink()
    out, _ = cli("verify", model, code=2)
    assert "wrong" in out and "classes.json: missing" in out


def test_what_is_not_a_model(tmp_path, cli):
    _, err = cli("verify", tmp_path / "nowhere", code=2)
    assert err.startswith("pearl: ") and err.count("\n") == 1 and "neither a model nor a run" in err
    with pytest.raises(RunError):
        pearl.load(tmp_path / "nowhere")
