"""docs/adding.md as a new user follows it: its files are written, its commands run."""

import re
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import zygote
from pearl.settings.parts import METHODS
from pearl.testing.conformance import maker, shows_strict_reload

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "adding.md").read_text()
SMALL = ["--smoke", "-q", "backbone.width=4", "stream.tasks=2"]

FORGETS = """    def forward(self, x, task=None):
        return super().forward(x, task) + getattr(self, "shift", 0)

"""


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The page's files, in a folder that has nothing to do with pearl."""
    path = tmp_path / "mine"
    path.mkdir()
    for text in blocks("python"):
        (path / re.match(r"# (\w+\.py)\n", text)[1]).write_text(text)
    Image.fromarray(np.full((8, 8, 3), 99, np.uint8)).save(path / "photo.jpg")
    monkeypatch.chdir(path)
    monkeypatch.setenv("PEARL_RUNS", "runs")
    monkeypatch.setattr(METHODS, "_files", {})
    return path


def test_its_commands_run(folder, cli):
    commands = [line for text in blocks("sh") for line in text.splitlines()]
    verbs = [line.split()[:2] for line in commands]
    assert verbs == [["pearl", verb] for verb in ("show", "run", "resume", "predict")] + [["python", "-m"]]
    said = {}
    for line in commands[:-1]:
        (name,) = [run.name for run in Path("runs").glob("*")] or ["NAME"]
        _, *arguments = shlex.split(line.replace("runs/NAME", f"runs/{name}"))
        METHODS._files.clear()  # each would be a process of its own
        said[arguments[0]], _ = cli(*arguments, *(SMALL if arguments[0] == "run" else []))
    assert "smoothing = 0.0" in said["show"]
    assert "class-IL after the last task" in said["run"] and said["resume"] == said["run"]
    assert said["predict"].startswith("photo.jpg")
    assert list(Path("runs").glob("digits-LinearProbe-seed0-smoke-*/method.py"))


def test_its_test_passes(folder):
    _, *program, file = shlex.split(blocks("sh")[-1])
    few = ["-q", "-p", "no:cacheprovider", "-k", "strict_reload or classes_of_one or only_the_phase"]
    done = zygote.run([file, *few], program=program, text=True)
    assert "3 passed" in done.stdout, done.stdout


def test_its_test_would_find_what_is_not_kept(folder):
    file = folder / "linear_probe.py"
    text = file.read_text().replace(
        "        self.heads.grow(", "        self.shift = torch.rand(1)\n        self.heads.grow("
    )
    file.write_text(text.replace("    def loss(self", FORGETS + "    def loss(self"))
    with pytest.raises(AssertionError, match="a reloaded method gives other logits"):
        shows_strict_reload(maker("linear_probe.py:LinearProbe"))


def test_its_entry_points_are_those_that_are_read():
    (text,) = blocks("toml")
    (group,) = tomllib.loads(text)["project"]["entry-points"]
    assert group == METHODS.group
