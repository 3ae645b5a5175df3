"""Learning over HTTP: beside predictions, to the same bits, with nothing left behind, however it ends."""

import base64
import io
import json
import os
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

import pearl
import zygote
from pearl.errors import Interrupted
from pearl.lifecycle import learning
from pearl.lifecycle.choices import LearnOptions
from pearl.storage import locks
from pearl.training import launch
from photos import StopAt, digit, weights_of, write_photos
from served import ended, events, learn, png, served, taught

pytestmark = pytest.mark.slow

NEW = [(name, png(image)) for name, label in (("two", 2), ("three", 3)) for image in digit(label)[:8]]
OTHER = [(name, png(image)) for name, label in (("four", 4), ("zero", 0)) for image in digit(label)[30:36]]


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    return taught(tmp_path_factory.mktemp("shop"))


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """The folder for temporary files of this process and of those that it starts."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def pixels(photos):
    return [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for _, file in photos]


def traces(root, photos):
    """Files below a folder that hold a photo, as it was sent or as its pixels."""
    needles = [file for _, file in photos] + [image.tobytes() for image in pixels(photos)]
    files = [folder for folder in Path(root).rglob("*") if folder.is_file()]
    return [folder for folder in files if any(needle in folder.read_bytes() for needle in needles)]


def labels_of(client, photos, top=1):
    form = [("images", file) for _, file in photos]
    return [classes[0]["label"] for classes in client.post(f"/v1/predict?top_k={top}", files=form).json()]


def in_python(path, photos, **options):
    """The weights after the same photos were learnt without a server."""
    names = ", ".join(sorted({label for label, _ in photos}))
    pearl.learn(path, (pixels(photos), [label for label, _ in photos]), task=names, quiet=True, **options)
    return weights_of(path)


def test_a_model_learns_while_it_answers(one, forks, scratch, tmp_path, monkeypatch):
    """It answers as before until the first answer is stored, and then the new model, which has the bits that Python
    gives; it leaves no photo.
    """
    monkeypatch.setattr("pearl.serve.app.LOOK", 0.01)  # its phases are short
    expected = in_python(Path(shutil.copytree(one, tmp_path / "copy")), NEW)
    with served(one) as client:
        before = labels_of(client, NEW)
        job = learn(client, NEW)
        busy = client.post("/v1/learn", files={"images": NEW[0][1]}, data={"labels": "x"})
        assert busy.status_code == 409 and "learning or changing already" in busy.json()["error"]
        assert client.get("/v1/model").json()["job"] == job
        with ThreadPoolExecutor(1) as reader:
            following = reader.submit(lambda: [*events(client, job)])
            meanwhile = []
            while not following.done():
                old = not client.get("/v1/model").json()["tasks"][1:]
                labels = {*labels_of(client, NEW)}
                if client.get(f"/v1/jobs/{job}").json()["state"] not in ("starting", "learning"):
                    continue
                if not client.get("/v1/model").json()["tasks"][1:]:  # still, after they came
                    assert old and labels <= {"zero", "one"}
                elif not old:
                    meanwhile.append(len(labels & {"two", "three"}))
            states = following.result()
        assert meanwhile and min(meanwhile) == 2, "the new classes are answered before they are trained"
        first = [event["first_answer"] for event in states]
        assert first == sorted(first) and not first[0] and first[-1]
        assert states[-1]["state"] == "done" and states[-1]["photos"] == {"two": 8, "three": 8}
        assert {"probe", "adapt"} <= {event["phase"] for event in states}
        assert any(0 < event["done"] <= event["total"] for event in states)
        assert states[-1]["outcome"]["images"] == 16 and states[-1]["outcome"]["new"] > 50
        assert before != labels_of(client, NEW) == [label for label, _ in NEW]
        about = client.get("/v1/model").json()
        assert about["job"] is None and about["classes"] == ["one", "zero", "three", "two"]
        assert [task["name"] for task in about["tasks"]] == ["first", "three, two"]
        assert not any(task["first_answer"] for task in about["tasks"])
        assert about["tasks"][1]["mean_rank"] > 0 and about["tasks"][1]["accuracy"] == states[-1]["outcome"]["new"]
    assert weights_of(one) == expected
    assert traces(tmp_path, NEW) == []
    assert [*scratch.iterdir()] == []


def test_more_photos_of_a_known_class_at_once(one, forks):
    """JSON, without training; the name of the task is one that no task has yet."""
    with served(one) as client:
        for number in range(2):
            images = [
                {"image": base64.b64encode(png(image)).decode(), "label": "zero"}
                for image in digit(0)[40 + 3 * number : 43 + 3 * number]
            ]
            answer = client.post("/v1/learn", json={"images": images, "fast": True})
            assert answer.status_code == 202 and answer.json()["task"] == ("zero", "zero (2)")[number]
            assert ended(client, answer.json()["id"])["state"] == "done"
        tasks = client.get("/v1/model").json()["tasks"]
        assert [task["repeated_classes"] for task in tasks] == [[], ["zero"], ["zero"]]


def test_a_cancelled_job_changes_nothing(one, forks, scratch, tmp_path):
    """The same photos go on from where it was; others take its place."""
    before = weights_of(one)
    with served(one) as client:
        slow = learn(client, NEW)
        until = time.monotonic() + 30
        while client.get(f"/v1/jobs/{slow}").json()["phase"] != "adapt" and time.monotonic() < until:
            pass
        assert client.delete(f"/v1/jobs/{slow}").status_code == 202
        assert ended(client, slow)["state"] == "cancelled"
        assert client.get("/v1/model").json()["classes"] == ["one", "zero"]
        assert {name: before[name] for name in before} == {
            n: w for n, w in weights_of(one).items() if "resume" not in n
        }
        assert traces(tmp_path, NEW) == [] and [*scratch.iterdir()] == []
        job = ended(client, learn(client, OTHER, allow_new_style="true"))
        assert job["state"] == "done", job
        assert client.get("/v1/model").json()["classes"] == ["one", "zero", "four"]
        assert client.delete("/v1/jobs/0").status_code == 404


def test_a_job_whose_process_is_killed(one, forks, monkeypatch):
    """The model goes on answering, and learns the next time."""
    started = []
    child = launch.child
    monkeypatch.setattr(launch, "child", lambda *args, **how: started.append(child(*args, **how)) or started[-1])
    with served(one) as client:
        job = learn(client, NEW)
        while client.get(f"/v1/jobs/{job}").json()["state"] == "starting":
            pass
        started[0].kill()
        end = ended(client, job)
        assert end["state"] == "failed" and end["error"].startswith("its process was ended by SIGKILL")
        assert labels_of(client, OTHER[-1:]) == ["zero"]
        assert ended(client, learn(client, NEW))["state"] == "done"


def test_a_job_that_cannot_be_done_says_why(one, forks):
    """A task that the command line left interrupted is not discarded: its photos still exist."""
    write_photos(one.parent / "second", {"five": 5, "six": 6}, 8)
    with pytest.raises(Interrupted):
        learning.learn(one, one.parent / "second", LearnOptions(), show=StopAt("adapt", 2), minutes=0)
    with served(one) as client:
        end = ended(client, learn(client, NEW))
        assert end["state"] == "failed" and "pearl resume" in end["error"] and "was interrupted" in end["error"]
    (one / "resume" / "task.json").write_text("{")
    with served(one) as client:
        assert "task.json" in ended(client, learn(client, NEW))["error"]


SERVE = ["serve", "--no-browser", "--port", "0", "--device", "cpu"]


def test_a_server_that_is_killed_loses_nothing(one, scratch, tmp_path):
    """Its job stores what it has learnt and ends; the next server answers as before, and the same photos go on."""
    expected = in_python(Path(shutil.copytree(one, tmp_path / "copy")), NEW)
    first = zygote.Process([*SERVE, one], stdout=subprocess.PIPE, text=True)
    url = first.stdout.readline().split()[-1]
    with httpx.Client(base_url=url, timeout=30) as client:
        before = labels_of(client, NEW)
        job = learn(client, NEW)
        while client.get(f"/v1/jobs/{job}").json()["phase"] != "adapt":  # a second long: killed at once
            pass
    first.kill()
    first.wait()
    first.stdout.close()
    until = time.monotonic() + 30
    while (one / ".lock").exists() and locks.is_held(one) and time.monotonic() < until:
        time.sleep(0.05)
    assert [*(one / "resume").glob("0*/manifest.json")], "what was trained is stored"
    assert traces(tmp_path, NEW) == [] and [*scratch.iterdir()] == []
    second = zygote.Process([*SERVE, one], stdout=subprocess.PIPE, text=True)
    with httpx.Client(base_url=second.stdout.readline().split()[-1], timeout=30) as client:
        assert labels_of(client, NEW) == before
        assert client.get(f"/v1/jobs/{job}/events").status_code == 404
        assert ended(client, learn(client, NEW))["state"] == "done"
    second.send_signal(signal.SIGINT)
    assert second.wait(timeout=30) == 0
    second.stdout.close()
    assert weights_of(one) == expected
    written = [json.loads(line) for line in (one / "events.jsonl").read_text().splitlines()]
    assert any(event.get("done", 0) > 0 for event in written if event["event"] == "phase"), "it went on, not anew"


WRONG = {
    "one label": (400, "2 photos, but 1 label", {"labels": "x"}),
    "a blank": (400, "cannot be the name", {"labels": ["x", "  "]}),
    "a line": (400, "cannot be the name", {"labels": ["x", "a\nb"]}),
    "long": (400, "images.1.label", {"labels": ["x", "y" * 201]}),
    "empty": (400, "images.1.label", {"labels": ["x", ""]}),
    "fast": (400, "fast: send true or false", {"labels": ["x", "y"], "fast": "1"}),
    "another": (400, "'discard' as a text is not expected", {"labels": ["x", "y"], "discard": "true"}),
}


@pytest.mark.parametrize("case", WRONG)
def test_photos_that_cannot_be_learnt(client, case):
    status, words, data = WRONG[case]
    answer = client.post("/v1/learn", files=[("images", file) for _, file in NEW[:2]], data=data)
    assert answer.status_code == status and words in answer.json()["error"], answer.text
    assert client.get("/v1/model").json()["job"] is None


@pytest.fixture(scope="module")
def client(shop):
    with served(shop / "one") as client:
        yield client


def test_the_command(one, cli, monkeypatch):
    _, err = cli("serve", one, "--address", "0.0.0.0", code=2)
    assert err.startswith("pearl: --address 0.0.0.0 can be reached from other machines, which needs a token")
    _, err = cli("serve", one, "--address", "shop.example", code=2)
    assert "give an address in numbers" in err
    monkeypatch.setenv("PEARL_TOKEN", "short")
    _, err = cli("serve", one, code=2)
    assert "16 characters" in err
    monkeypatch.delenv("PEARL_TOKEN")
    with served(one) as client:
        _, err = cli("serve", one, "--port", client.base_url.port, code=2)
        assert "choose another --port" in err and err.count("\n") == 1
    _, err = cli("serve", one / "nowhere", "--port", "0", code=2)
    assert "neither a model nor a run" in err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _, err = cli("serve", one, code=2)
    assert 'pip install "pearl[serve]"' in err
    assert os.environ.get("PEARL_TOKEN") is None
