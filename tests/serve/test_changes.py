"""Taking back and discovering over HTTP: what the commands do, in one answer, with the model exchanged whole."""

import base64
import shutil
from pathlib import Path

import numpy as np
import pytest

import pearl
from pearl.lifecycle import undo
from pearl.serve import learning_jobs
from pearl.storage.locks import locked
from pearl.storage.run_directory import RunDirectory
from photos import SETTINGS, digit, folders, write_photos
from served import ended, learn, png, served, taught

pytestmark = pytest.mark.slow
PHOTOS = [("zero", png(digit(0)[40])), ("one", png(digit(1)[40])), ("two", png(digit(2)[40]))]


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A model of one task, `one`; one of two tasks, `model`; and one of two tasks with heads, `heads`."""
    root = taught(tmp_path_factory.mktemp("shop"))
    write_photos(root / "second", {"two": 2, "three": 3}, 12)
    shutil.copytree(root / "one", root / "model")
    with folders(root):
        pearl.learn(root / "model", root / "second", quiet=True)
        for data in ("first", "second"):
            settings = {} if data == "second" else {**SETTINGS, "method": {"classifier": "heads", "reference": "given"}}
            pearl.learn(root / "heads", root / data, quiet=True, **settings)
    return root


@pytest.fixture
def heads(shop, tmp_path):
    return Path(shutil.copytree(shop / "heads", tmp_path / "heads"))


def contents(path):
    files = [file for file in path.rglob("*") if file.is_file() and ".lock" not in file.name]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def labels(client, photos=PHOTOS, top=9):
    form = [("images", file) for _, file in photos]
    return [[one["label"] for one in classes] for classes in client.post(f"/v1/predict?top_k={top}", files=form).json()]


def test_undo_is_what_the_command_does(shop, two, tmp_path):
    expected = Path(shutil.copytree(two, tmp_path / "expected"))
    line = undo.undo(expected).removeprefix(f"{expected}: ")
    with served(two) as client:
        before = contents(two)
        asked = client.post("/v1/undo", json={"dry_run": True})
        assert asked.json() == {"line": line, "changed": False} and contents(two) == before
        assert client.post("/v1/undo", json={}).json() == {"line": line, "changed": True}
        assert contents(two) == contents(expected)
        about = client.get("/v1/model").json()
        assert about["classes"] == ["one", "zero"] and len(about["tasks"]) == 1
        assert {name for names in labels(client) for name in names} == {"zero", "one"}
        last = client.post("/v1/undo", json={})
        assert last.status_code == 409 and last.json()["error"].startswith("it has no task before its last one")


def test_a_class_is_renamed_and_forgotten(two):
    with served(two) as client:
        renamed = client.post("/v1/rename", json={"old": "two", "new": "zwei"}).json()
        assert renamed == {"line": "class two is now called zwei", "changed": True}
        assert labels(client)[2][0] == "zwei"
        asked = client.post("/v1/forget", json={"class": "zwei", "dry_run": True}).json()
        assert "class zwei is forgotten" in asked["line"] and "stay" in asked["line"] and not asked["changed"]
        assert "zwei" in labels(client)[0]
        assert client.post("/v1/forget", json={"class": "zwei"}).json() == {**asked, "changed": True}
        assert {name for names in labels(client) for name in names} == {"zero", "one", "three"}
        refused = client.post("/v1/forget", json={"task": "second"})
        assert refused.status_code == 409 and "only if the features of all images are stored" in refused.json()["error"]
        assert str(two) not in refused.json()["error"]
    assert pearl.load(two).classes == ("one", "zero", "three")


def test_a_task_is_forgotten_exactly(heads):
    with served(heads) as client:
        changed = client.post("/v1/forget", json={"task": "first"}).json()
        assert "the model has the bits of one that learnt only the other 1 task" in changed["line"]
        assert {name for names in labels(client) for name in names} == {"three", "two"}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("rename", {"old": "nine", "new": "ten"}, 422, "no class 'nine'"),
        ("rename", {"old": "one", "new": "zero"}, 422, "class 'zero' exists"),
        ("rename", {"old": "one", "new": ""}, 400, "new: "),
        ("rename", {"old": "one"}, 400, "new: field required"),
        ("forget", {}, 422, "give one class"),
        ("forget", {"class": "one", "task": "first"}, 422, "give one class"),
        ("forget", {"class": 1}, 400, "class: "),
        ("undo", {"dry_run": "yes"}, 400, "dry_run: "),
        ("undo", {"path": "/etc"}, 400, "path: "),
        ("undo", [], 400, "body: "),
    ],
)
def test_changes_that_cannot_be_made(path, body, status, words, client, shop):
    before = contents(shop / "model")
    answer = client.post(f"/v1/{path}", json=body)
    assert (answer.status_code, [*answer.json()]) == (status, ["error"]), answer.text
    assert words in answer.json()["error"] and "\n" not in answer.json()["error"]
    assert contents(shop / "model") == before


def test_json_that_cannot_be_read(client):
    answer = client.post("/v1/undo", content=b"{", headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"].startswith("body")


def test_one_change_at_a_time(two, forks, monkeypatch):
    """Not while a lesson runs, not while another process works on the model; and no lesson during a change."""
    with served(two) as client:
        job = learn(client, [("four", png(image)) for image in digit(4)[:8]])
        busy = client.post("/v1/undo", json={})
        assert busy.status_code == 409 and busy.json()["error"] == learning_jobs.BUSY
        client.delete(f"/v1/jobs/{job}")
        assert ended(client, job)["state"] == "cancelled"
        with locked(two):
            busy = client.post("/v1/rename", json={"old": "two", "new": "zwei"})
            assert busy.status_code == 409 and "is working on it" in busy.json()["error"]
        learnt = []

        def while_changing(*args, **kwargs):
            learnt.append(client.post("/v1/learn", files={"images": PHOTOS[0][1]}, data={"labels": "x"}).status_code)
            learnt.append(client.post("/v1/undo", json={}).status_code)
            return "line"

        monkeypatch.setattr("pearl.serve.changes.undo", while_changing)
        assert client.post("/v1/undo", json={}).json() == {"line": "line", "changed": True}
        assert learnt == [409, 409]


def test_a_cancelled_lesson_is_discarded(two, forks):
    """Its photos are gone with the page, so that it must not stand in the way for ever."""
    directory = RunDirectory(two)
    directory.write(directory.pending_file, {"index": 2, "data": "", "name": "four", "config": {}})
    with pytest.raises(pearl.PearlError, match="a task was interrupted"):
        undo.undo(two)
    with served(two) as client:
        asked = client.post("/v1/undo", json={"dry_run": True}).json()
        assert asked["line"].endswith("; the interrupted task four is discarded")
        assert directory.is_interrupted
        assert client.post("/v1/undo", json={}).json()["line"] == asked["line"]
    assert not directory.resume_folder.exists() and pearl.load(two).classes == ("one", "zero")
    directory.write(directory.pending_file, {"index": 1, "data": "/photos", "name": "four", "config": {}})
    with served(two) as client:  # of the command line, which can resume it
        answer = client.post("/v1/rename", json={"old": "one", "new": "eins"})
        assert answer.status_code == 409 and "pearl resume" in answer.json()["error"]


def test_a_server_completes_an_interrupted_change(two, tmp_path, monkeypatch):
    expected = Path(shutil.copytree(two, tmp_path / "expected"))
    undo.undo(expected)

    def killed(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pearl.storage.change.complete", killed)
        with pytest.raises(KeyboardInterrupt):
            undo.undo(two)
    with served(two) as client:
        assert client.get("/v1/model").json()["classes"] == ["one", "zero"]
    assert contents(two) == contents(expected)


# -------------------------------------------------------------------------------------------------------- discover


@pytest.fixture(scope="module")
def client(shop):
    with served(shop / "model", unknown_rate=0.3) as client:
        yield client


def test_groups_are_those_of_the_command(client, shop):
    pixels = [image for label in (4, 6) for image in digit(label)[:12]] + [digit(0)[40], digit(4)[0]]
    colour = [np.repeat(image[:, :, None], 3, 2) for image in pixels]
    expected = pearl.load(shop / "model").discover(colour, unknown_rate=0.3)
    form = client.post("/v1/discover", files=[("images", png(image)) for image in pixels])
    given = [base64.b64encode(png(image)).decode() for image in pixels]
    assert form.status_code == 200 and form.json() == client.post("/v1/discover", json={"inputs": given}).json()
    actual = form.json()
    assert [tuple(group["photos"]) for group in actual["groups"]] == [group.images for group in expected.groups]
    assert [tuple(group["typical"]) for group in actual["groups"]] == [group.typical for group in expected.groups]
    assert [tuple(group["doubtful"]) for group in actual["groups"]] == [group.doubtful for group in expected.groups]
    assert all(group["nearest"] in ("zero", "one", "two", "three") for group in actual["groups"])
    for name in ("alone", "known"):
        assert tuple(actual[name]) == getattr(expected, name)
    assert actual["duplicates"] == [[0, 25]]
    every = [i for group in actual["groups"] for i in group["photos"]] + actual["alone"] + actual["known"]
    assert sorted(every) == list(range(25)) and actual["groups"]


def test_piles_that_cannot_be_grouped(client, heads):
    assert client.post("/v1/discover", content=PHOTOS[0][1]).status_code == 415
    assert client.post("/v1/discover", json={"inputs": []}).status_code == 400
    wrong = client.post("/v1/discover", files={"images": b"x"})
    assert wrong.status_code == 422 and "not an image" in wrong.json()["error"]
    with served(heads) as other:
        refused = other.post("/v1/discover", files={"images": PHOTOS[0][1]})
        assert refused.status_code == 422 and "its classifier cannot detect unknown images" in refused.json()["error"]
