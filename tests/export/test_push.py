"""Model cards, and `pearl push` against a server that answers as the Hub does."""

import base64
import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml

import pearl
from pearl.errors import Interrupted
from pearl.lifecycle import learning
from pearl.lifecycle.choices import LearnOptions
from pearl.storage.locks import locked
from pearl.storage.run_directory import RunDirectory
from photos import SETTINGS, StopAt, folders, write_photos

hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A model of two tasks with class statistics, one with heads, and a finished run."""
    root = tmp_path_factory.mktemp("shop")
    for task, label in (("first", 0), ("second", 2)):
        write_photos(root / task, {f"{task} {i}": label + i for i in (0, 1)}, 8)
    small = {**SETTINGS, "backbone": {"name": "convnet", "width": 2}, "train": {"epochs": 1}}
    with folders(root):
        for name in ("statistics", "heads"):
            kept = {"keep_features": True} if name == "statistics" else {}
            settings = small | {"method": {"classifier": {"name": name, **kept}}, "engine": {"max_steps": 2}}
            for number, task in enumerate(("first", "second")):
                pearl.learn(root / name, root / task, quiet=True, **({} if number else settings))
        size = {"classes": 4, "tasks": 2, "per_class": 8, "test_per_class": 3}
        how = {"method": "finetune", "backbone": {"name": "convnet", "width": 2}, "train": {"epochs": 1}}
        shutil.copytree(pearl.run("digits", quiet=True, stream=size, **how).path, root / "run")
    return root


@pytest.fixture
def model(shop, tmp_path):
    return Path(shutil.copytree(shop / "statistics", tmp_path / "shop"))


def parts_of(text):
    """The header of a card, and its sections."""
    _, header, rest = text.split("---\n", 2)
    return yaml.safe_load(header), dict(re.findall(r"^## (.*?)\n\n(.*?)(?=\n\n## |\Z)", rest, re.M | re.S))


def rows_of(section):
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_card_of_an_export(model, tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    cli("export", "shop", "--to", "torch")
    header, sections = parts_of((tmp_path / "shop.pt2.md").read_text())
    assert header["pipeline_tag"] == "image-classification" and header["library_name"] == "pearl"
    assert "license" not in header and "base_model" not in header
    assert rows_of(sections["Classes"])[2][:4] == ["first", "first 0, first 1", "", "16"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", rows_of(sections["Classes"])[3][4])
    outcome = pearl.load("shop").outcome
    figures = {row[0]: row[1:] for row in rows_of(sections["Accuracy"])[2:]}
    value, condition = figures["accuracy on task second, among all classes (class-IL)"]
    assert value == f"{outcome.new:.1f} %" and condition.startswith("cross-validated on 16 images")
    assert all(len(row) == 2 and row[1] for row in figures.values())
    assert "called unknown" in sections["Unknown images"] and "at a rate of 5 %" in sections["Unknown images"]
    assert 'torch.export.load("shop.pt2")' in sections["Loading"] and "(batch, 3, 8, 8)" in sections["Loading"]
    assert "trained from random weights" in sections["Licence"]
    _, err = cli("export", "shop", "--to", "torch", "-o", "shop.pt2", code=2)
    assert "exists" in err
    Path("other.pt2.md").write_text("of the user")
    _, err = cli("export", "shop", "--to", "torch", "-o", "other.pt2", code=2)
    assert "other.pt2.md: exists" in err and Path("other.pt2.md").read_text() == "of the user"
    assert not Path("other.pt2").exists()
    cli("export", "shop", "--to", "torch", "--force")


def test_the_card_of_adapters_keeps_how_they_are_loaded(shop, tmp_path):
    pytest.importorskip("peft")
    pearl.load(shop / "heads").export("peft", tmp_path / "adapters")
    text = (tmp_path / "adapters" / "README.md").read_text()
    _, sections = parts_of(text)
    assert "PeftModel.from_pretrained" in sections["Loading"] and len(re.findall("```python", text)) == 1


def test_the_card_of_a_run_has_its_test_accuracy(shop, tmp_path):
    pearl.load(shop / "run").export("torch", tmp_path / "run.pt2")
    stage = json.loads((shop / "run" / "results.json").read_text())["stages"][-1]
    share = f"{100 * sum(stage['class_il']) / sum(stage['total']):.1f} %"
    _, sections = parts_of((tmp_path / "run.pt2.md").read_text())
    row = next(row for row in rows_of(sections["Accuracy"]) if row[0] == "accuracy among all classes (class-IL)")
    assert row[1:] == [share, "12 test images of digits, after 2 tasks, seed 0"]


@pytest.mark.parametrize(
    ("backbone", "licence", "words"),
    [
        ({"pretrained": True}, "apache-2.0", "have the licence apache-2.0"),
        (
            {"pretrained": True, "weights": "/home/anna/own.pth"},
            None,
            "the file own.pth, whose licence is not recorded",
        ),
        ({"pretrained": False}, None, "trained from random weights"),
    ],
)
def test_the_licence_of_pretrained_weights(backbone, licence, words, shop):
    from pearl.export.card import card

    model = pearl.load(shop / "statistics")
    _ = model.method  # before it changes
    spec = {"name": "timm/deit_tiny_patch16_224", **backbone}
    model.config = model.config.model_copy(update={"backbone": spec})
    header, sections = parts_of(card(model, "x"))
    assert header.get("license") == licence and words in sections["Licence"] and "/home" not in str(sections)
    assert ("base_model" in header) == (licence is not None)


def test_names_stay_in_their_cells(model):
    from pearl.export.card import card

    evil = "<script>|\n# x"
    changed = pearl.load(model).rename("first 0", "a|b<i>")
    text = card(changed, "x")
    assert "a\\|b&lt;i>" in text and evil not in text


# ------------------------------------------------------------------------------------------------------------- push


class Fake(BaseHTTPRequestHandler):
    """The part of the Hub's HTTP interface that a push uses; commits are stored on the server's object."""

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.server.refuse:
            return self.answer(self.server.refuse, {"error": "you may not do this"})
        if not self.path.startswith("/api/models/anna/shop/tree/main"):
            return self.answer(404, {"error": self.path})
        rows = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in self.server.files]
        return self.answer(200, rows)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.server.refuse:
            self.answer(self.server.refuse, {"error": "you may not do this"})
        elif self.path == "/api/repos/create":
            self.server.created = json.loads(body)
            self.answer(200, {"url": f"{self.server.url}/anna/shop", "name": "anna/shop", "id": "anna/shop"})
        elif self.path == "/api/validate-yaml":
            assert parts_of(json.loads(body)["content"])[0]["tags"]
            self.answer(200, {"errors": [], "warnings": []})
        elif self.path.startswith("/api/models/anna/shop/preupload/"):
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
            self.answer(200, {"files": modes})
        elif self.path.startswith("/api/models/anna/shop/commit/"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del self.server.files[line["value"]["path"]]
            url = f"{self.server.url}/anna/shop/commit/1"
            self.answer(200, {"commitUrl": url, "commitOid": "1", "hookOutput": "", "success": True})
        else:
            self.answer(404, {"error": self.path})

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    server.files, server.tokens, server.refuse, server.created = {}, set(), 0, {}
    server.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_model_is_pushed_whole_and_can_be_loaded(model, server, tmp_path, cli):
    (model / "resume" / "x").mkdir(parents=True)
    (model / "resume" / "x" / "photo.bin").write_bytes(b"private")
    (model / "logs").mkdir()
    (model / "logs" / "log.txt").write_text("private")
    (model / ".lock").touch()
    (tmp_path / "outside").write_text("private")
    (model / "environment.json").rename(tmp_path / "kept")
    (model / "environment.json").symlink_to(tmp_path / "outside")
    planned, _ = cli("push", model, "anna/shop", "--dry-run")
    assert server.files == {} and planned.startswith("dry run, nothing is uploaded: ")
    out, err = cli("push", model, "anna/shop", "--private")
    assert err == "" and out.startswith("pushed ") and server.url in out
    assert server.created["name"] == "shop" and server.created["organization"] == "anna"
    assert server.created.get("private") or server.created.get("visibility") == "private"
    assert server.tokens == {"Bearer hf_secret"}
    assert [*server.files] == [line.strip() for line in planned.splitlines()[1:]]
    assert not any(data == b"private" for data in server.files.values())
    left_out = ("lock", "resume", "logs", "events", "outside", "features")
    assert not any(word in name for name in server.files for word in left_out)
    assert [*model.rglob("features.safetensors")]
    for name, data in server.files.items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(data)
    copy = pearl.load(tmp_path / "copy")
    assert copy.classes == pearl.load(model).classes and {check.state for check in copy.verify()} == {"ok"}
    header, sections = parts_of(server.files["README.md"].decode())
    assert header["library_name"] == "pearl" and 'snapshot_download("anna/shop"' in sections["Loading"]


def test_a_first_answer_is_not_pushed(model, server, tmp_path, cli):
    write_photos(tmp_path / "third", {"four": 4, "five": 5}, 8)
    with pytest.raises(Interrupted):
        learning.learn(model, tmp_path / "third", LearnOptions(), device="cpu", show=StopAt("adapt", 1))
    _, err = cli("push", model, "anna/shop", code=2)
    assert "task third is not trained yet" in err and "push it when it is trained" in err and server.files == {}


def test_the_export_of_a_first_answer_says_so(model, tmp_path, cli):
    out, _ = cli("export", model, "--to", "torch", "-o", tmp_path / "before.pt2")
    assert "note" not in out and "**Note:**" not in (tmp_path / "before.pt2.md").read_text()
    write_photos(tmp_path / "third", {"four": 4, "five": 5}, 8)
    with pytest.raises(Interrupted):
        learning.learn(model, tmp_path / "third", LearnOptions(), device="cpu", show=StopAt("adapt", 1))
    line = "task third is not trained yet; until then this is a first answer, by statistics of frozen features"
    out, _ = cli("export", model, "--to", "torch", "-o", tmp_path / "shop.pt2")
    assert out.count("\n") == 1 and out.endswith(f"; note: {line}\n")
    facts = {"pearl.json": ""}
    torch.export.load(tmp_path / "shop.pt2", extra_files=facts)
    assert json.loads(facts["pearl.json"])["note"] == line and len(json.loads(facts["pearl.json"])["classes"]) == 6
    assert f"\n\n**Note:** {line}.\n\n## Classes\n" in (tmp_path / "shop.pt2.md").read_text()
    cli("export", model, "--to", "torch", "--tasks", 2, "-o", tmp_path / "two.pt2")
    assert "**Note:**" not in (tmp_path / "two.pt2.md").read_text(), "tasks that are trained"


def test_what_was_forgotten_is_removed_there_too(shop, tmp_path, server, cli):
    path = Path(shutil.copytree(shop / "heads", tmp_path / "shop"))
    server.files |= {"tasks/009-old/weights.safetensors": b"", "pictures/of-the-user.png": b"", ".gitattributes": b""}
    cli("push", path, "anna/shop")
    assert "tasks/009-old/weights.safetensors" not in server.files
    assert {"pictures/of-the-user.png", ".gitattributes"} <= {*server.files}
    pearl.load(path).undo()
    out, _ = cli("push", path, "anna/shop")
    assert "2 files of an earlier state removed, which the history keeps" in out
    assert not any(name.startswith("tasks/001") for name in server.files)


def test_exports_are_pushed_with_their_cards(shop, tmp_path, server, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pearl.load(shop / "statistics").export("torch", "shop.pt2")
    cli("push", "shop.pt2", "anna/shop")
    assert {*server.files} == {"README.md", "shop.pt2"}
    assert server.files["README.md"] == Path("shop.pt2.md").read_bytes()
    Path("shop.pt2.md").unlink()
    _, err = cli("push", "shop.pt2", "anna/shop", code=2)
    assert "no model card shop.pt2.md" in err
    server.files.clear()
    pytest.importorskip("peft")
    pearl.load(shop / "heads").export("peft", "adapters")
    cli("push", "adapters", "anna/shop")
    expected = {file.relative_to("adapters").as_posix() for file in Path("adapters").rglob("*") if file.is_file()}
    assert {*server.files} == expected and "README.md" in expected


def test_a_path_of_this_machine_is_not_uploaded(model, server, cli):
    config = RunDirectory(model).config_file
    settings = yaml.safe_load(config.read_text())
    settings["backbone"]["weights"] = "/home/anna/own.pth"
    from pearl.export.push import _settings

    config.write_text(yaml.safe_dump(settings))
    assert yaml.safe_load(_settings(RunDirectory(model)))["backbone"]["weights"] == "own.pth"


@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_hub_that_refuses(status, model, server, cli, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.refuse = status
    _, err = cli("push", model, "anna/shop", code=2)
    assert err.startswith(f"pearl: push: the Hub refuses anna/shop ({status}: ") and err.count("\n") == 1
    assert ("HF_TOKEN" in err) == (status != 500)


def test_without_token_package_connection_or_model(model, server, cli, monkeypatch, tmp_path):
    _, err = cli("push", model, "shop", code=2)
    assert "'shop' is not the name of a repository; give it as USER/NAME" in err
    _, err = cli("push", tmp_path / "nowhere", "anna/shop", code=2)
    assert "neither a model nor an export" in err
    with locked(model):
        _, err = cli("push", model, "anna/shop", code=2)
        assert "a process is changing it" in err
    with monkeypatch.context() as patch:
        patch.setattr(hub, "get_token", lambda: None)
        _, err = cli("push", model, "anna/shop", code=2)
        assert "no token of the Hub; log in with `hf auth login`, or set HF_TOKEN" in err
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "huggingface_hub", None)
        _, err = cli("push", model, "anna/shop", code=2)
        assert err == 'pearl: push needs huggingface_hub, not installed: pip install "pearl[hub]"\n'
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    _, err = cli("push", model, "anna/shop", code=2)
    assert "the Hub cannot be reached" in err and err.count("\n") == 1
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    _, err = cli("push", model, "anna/shop", code=2)
    assert err.startswith("pearl: push: ") and err.count("\n") == 1
