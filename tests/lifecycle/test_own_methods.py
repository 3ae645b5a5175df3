"""Methods that did not come with pearl: out of a user's file, or of an installed package."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import pearl
from pearl.errors import ConfigError
from pearl.export import export_directory
from pearl.settings.config import load_config
from pearl.settings.parts import BACKBONES, METHODS, RANK_RULES, SOURCES
from photos import write_photos

pytestmark = pytest.mark.slow

TINY = ["--smoke", "-q", "backbone.width=4", "stream.tasks=2"]
PROBE = '''
"""A head on a network that stays as it came."""
import torch
import torch.nn.functional as F
from pearl.methods.base import Method, Phase

print("the file has run")

class Probe(Method):
    """Trains heads alone."""

    phases = ("heads",)

    def __init__(self, backbone, *, smoothing: float = 0.0):
        super().__init__(backbone.requires_grad_(False))
        self.smoothing = smoothing

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def learn(self, task):
        self.heads.grow(len(task.classes)).to(self.device)
        yield Phase("heads", self.heads.parameters(), self.loss)

    def loss(self, batch):
        return F.cross_entropy(self(batch.x), batch.y, label_smoothing=self.smoothing)
'''


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No file has been named in this process, and none stays so."""
    monkeypatch.setattr(METHODS, "_files", {})


@pytest.fixture
def probe(tmp_path):
    file = tmp_path / "my methods" / "probe.py"
    file.parent.mkdir()
    file.write_text(PROBE)
    return file


@pytest.fixture
def cli(cli):
    """`pearl` as a process of its own would be: no file has been named in it."""

    def call(*arguments, code=0):
        METHODS._files.clear()
        return cli(*arguments, code=code)

    return call


@pytest.fixture
def run(cli, probe):
    """A run of the file's method, which nobody has named since."""
    cli("run", "digits", "--method", f"{probe}:Probe", *TINY, "method.smoothing=0.1")
    METHODS._files.clear()
    (path,) = Path(os.environ["PEARL_RUNS"]).iterdir()
    return path


@pytest.fixture
def photo(tmp_path):
    Image.fromarray(np.full((8, 8, 3), 99, np.uint8)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


# --------------------------------------------------------------------------------------------------------- out of files


def test_a_run_says_which_class_it_was_and_keeps_the_file(run, probe):
    assert run.name.startswith("digits-Probe-seed0-smoke-")
    assert (run / "method.py").read_bytes() == probe.read_bytes()
    settings = yaml.safe_load((run / "config.yaml").read_text())
    name, _, digest = settings["method"]["name"].partition("@")
    said = subprocess.run(["sha256sum", probe], capture_output=True, text=True, check=True).stdout
    assert name == "Probe" and len(digest) == 12 and said.startswith(digest)
    assert settings["method"] == {"name": f"Probe@{digest}", "smoothing": 0.1}
    assert str(probe.parent) not in (run / "config.yaml").read_text(), "where the file lay is nobody's business"


def test_every_way_to_name_it_is_the_same_run(run, probe, cli, tmp_path):
    for way in (["--method", f"{probe}:Probe"], [f"method={probe}:Probe"], [f"method.name={probe}:Probe"]):
        out, _ = cli("run", "digits", *way, *TINY, "method.smoothing=0.1")
        assert f"run directory: {run}" in out
    moved = shutil.move(probe, tmp_path / "renamed.py")
    settings = {"name": f"{moved}:Probe", "smoothing": 0.1}
    again = pearl.run("digits", smoke=True, quiet=True, backbone={"width": 4}, stream={"tasks": 2}, method=settings)
    assert again.path == run
    assert len(list(run.parent.iterdir())) == 1


def test_an_edited_file_is_another_run(run, probe, cli):
    probe.write_text(PROBE.replace("smoothing=self.smoothing", "smoothing=0.2"))
    cli("run", "digits", "--method", f"{probe}:Probe", *TINY, "method.smoothing=0.1")
    assert len(list(run.parent.iterdir())) == 2


def test_dry_run_and_show(probe, cli):
    out, _ = cli("run", "digits", "--method", f"{probe}:Probe", "--dry-run", "train.phases.heads.epochs=3")
    assert "run directory: digits-Probe-seed0-" in out and "heads:" in out
    out, _ = cli("show", f"{probe}:Probe")
    assert "Trains heads alone." in out and "smoothing = 0.0" in out
    assert cli("run", "digits", "--method", "finetune", *TINY)[0].count("digits-finetune-") == 1


def test_options_are_checked_as_those_of_any_method(probe, cli):
    _, err = cli("run", "digits", f"method={probe}:Probe", "method.smothing=0.1", "train.phases.head.lr=1", code=2)
    assert "pearl: method.smothing: unknown key; did you mean 'smoothing'?\n" in err
    assert "pearl: train.phases.head: no such phase; did you mean 'heads'?\n" in err


# ------------------------------------------------------------------------------------------------ only if it is named


def runs_code(out):
    return "the file has run" in out[0] + out[1]


@pytest.mark.parametrize("verb", ["predict", "evaluate", "export", "resume"])
def test_what_came_with_a_model_does_not_run_by_itself(verb, run, photo, cli, tmp_path, monkeypatch):
    """And runs, from any folder, if it is named as the message says."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    write_photos(tmp_path / "test", {"0": 0, "1": 1}, 2)
    more = {"predict": [photo], "evaluate": ["--data", tmp_path / "test"], "export": ["--to", "torch"], "resume": []}
    refused = cli(verb, run, *more[verb], code=2)
    assert not runs_code(refused)
    wanted = f"--method {run}/method.py:Probe"
    assert refused[1] == (
        f"pearl: {run}: its method Probe is code stored with it, which runs only if you name it; read "
        f"{run}/method.py, and if you trust it add {wanted}\n"
    )
    assert runs_code(cli(verb, run, *more[verb], *wanted.split()))


def test_what_reads_needs_no_code(run, cli, tmp_path):
    for told in (
        cli("inspect", run),
        cli("show", run),
        cli("list", "runs"),
        cli("report", run, "-o", tmp_path / "page.html"),
    ):
        assert not runs_code(told)
    cli("run", "digits", *TINY, "method=finetune")
    cli("report", *run.parent.iterdir(), "-o", tmp_path / "both.html")
    assert "digits Probe" in (tmp_path / "both.html").read_text()


def test_neither_a_recipe_nor_a_configuration_names_a_file_for_its_reader(run, probe, photo, cli, tmp_path):
    recipe = tmp_path / "theirs.yaml"
    for name in (f"{probe}:Probe", yaml.safe_load((run / "config.yaml").read_text())["method"]["name"]):
        recipe.write_text(yaml.safe_dump({"extends": "digits", "method": name}))
        refused = cli("run", recipe, *TINY, code=2)
        assert not runs_code(refused)
        assert refused[1].endswith(
            "code in a file, which runs only if the command names it; add --method path/to/file.py:Probe\n"
        )
        assert runs_code(cli("run", recipe, *TINY, "--method", f"{probe}:Probe"))
    text = (run / "config.yaml").read_text()
    settings = yaml.safe_load(text)
    (run / "config.yaml").write_text(text.replace(settings["method"]["name"], f"{probe}:Probe"))
    refused = cli("predict", run, photo, code=2)
    assert not runs_code(refused) and "code in a file, which runs only if" in refused[1]


def test_another_version_is_refused(run, probe, photo, cli):
    probe.write_text(PROBE + "\n# a remark\n")
    _, err = cli("predict", run, photo, "--method", f"{probe}:Probe", code=2)
    assert "another class or version of the file" in err and f"--method {run}/method.py:Probe" in err
    (run / "method.py").write_text("print('evil')")
    for named in ([], ["--method", f"{run}/method.py:Probe"], ["--method", f"{probe}:Probe"]):
        _, err = cli("predict", run, photo, *named, code=2)
        assert "evil" not in err and err.count("\n") == 1
    assert f"{run}/method.py has changed; restore the file whose SHA-256 begins with" in err
    assert f"{run}/method.py has changed" in cli("inspect", run, code=1)[0]
    (run / "method.py").unlink()
    _, err = cli("predict", run, photo, code=2)
    assert f"{run}/method.py is missing; restore the file whose SHA-256 begins with" in err
    probe.write_text(PROBE)
    assert cli("predict", run, photo, "--method", f"{probe}:Probe")[0], "the user's own file will do"


def test_a_file_for_a_method_of_pearl(probe, photo, cli):
    cli("run", "digits", *TINY, "method=finetune")
    (path,) = Path(os.environ["PEARL_RUNS"]).iterdir()
    _, err = cli("predict", path, photo, "--method", f"{probe}:Probe", code=2)
    assert err == f"pearl: {path}: its method is finetune, not Probe; leave out --method\n"
    assert cli("predict", path, photo, "--method", "finetune")[0]


BAD = {
    "": ("", "the class is missing; give the file and its class, as bad.py:MyMethod"),
    "Prob": (PROBE, "has no class 'Prob'; did you mean 'Probe'?"),
    "Anything": ("import torch\nfrom torch import nn", "has no class 'Anything'; it defines none"),
    "A": ("import torch\n\nx = torch.zeros(1) + undefined\n", "bad.py, line 3: NameError: name 'undefined'"),
    "B": ("x = 1\ndef f(:\n", "bad.py, line 2: SyntaxError: invalid syntax; fix the file"),
    "C": ("import no_such_package", "bad.py, line 1: ModuleNotFoundError: No module named 'no_such_package'"),
    "D": ("import sys\nsys.exit(3)", "bad.py, line 2: SystemExit: 3; fix the file"),
    "E": ("class E: pass", "bad.py: E: does not derive from pearl.methods.base:Method"),
    "F": ("F = 3", "bad.py: F: does not derive from pearl.methods.base:Method"),
    "G": ("from pearl.methods.base import Method\nclass G(Method): pass", "bad.py: G: declares no phases; list the"),
    "H": (PROBE.replace(": float", "").replace("Probe", "H"), "options cannot be read (KeyError: 'smoothing'); annot"),
    "I": (PROBE.replace("float", "'Missing'").replace("Probe", "I"), "NameError: name 'Missing' is not defined"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_used_is_one_line(name, cli, tmp_path):
    text, words = BAD[name]
    (tmp_path / "bad.py").write_text(text)
    before = set(sys.modules)
    _, err = cli("run", "digits", "--method", f"{tmp_path}/bad.py:{name}".removesuffix(":"), code=2)
    assert words in err and err.startswith("pearl: method: ") and err.count("\n") == 1
    left = [key for key in set(sys.modules) - before if key.startswith("pearl_file")]
    assert not left or name not in "ABCD", "a module that failed is no module"
    assert not Path(os.environ["PEARL_RUNS"]).exists()


def test_a_file_that_is_not_there(cli, tmp_path):
    _, err = cli("run", "digits", "--method", f"{tmp_path}/none.py:A", code=2)
    assert err.startswith(f"pearl: method: {tmp_path}/none.py: cannot be read (No such file or directory); give the")


# ------------------------------------------------------------------------------------------------ learning, resuming


def test_learn_resume_and_begin_from(probe, cli, tmp_path):
    for t, name in enumerate(("first", "second")):
        write_photos(tmp_path / name, {f"{name}{c}": 2 * t + c for c in range(2)}, 4)
    shop, small = tmp_path / "shop", ["-q", "images.size=8", "images.pad=1", "train.batch_size=4", "train.epochs=1"]
    probe_class, first = f"{probe}:Probe", [*small, "backbone.width=4"]
    cli("learn", shop, "--data", tmp_path / "first", "--backbone", "resnet18", "--method", probe_class, *first)
    _, err = cli("learn", shop, "--data", tmp_path / "second", code=2)
    assert "runs only if you name it" in err
    assert "4 in all" in cli("learn", shop, "--data", tmp_path / "second", "--method", probe_class, "-q")[0]
    METHODS._files.clear()
    with pytest.raises(ConfigError, match="runs only if you name it"):
        pearl.load(shop)
    assert len(pearl.load(shop, method=probe_class).classes) == 4
    write_photos(tmp_path / "third", {"third": 4, "fourth": 5}, 4)
    other = ["learn", tmp_path / "other", "--from", shop, "--data", tmp_path / "third", "-q"]
    assert "runs only if you name it" in cli(*other, code=2)[1]
    assert "6 in all" in cli(*other, "--method", f"{shop}/method.py:Probe")[0]


CUT = """        if os.environ.pop("CUT", None):
            signal.raise_signal(signal.SIGINT)
"""


def test_what_was_cut_off_says_how_to_go_on(probe, cli, tmp_path, monkeypatch):
    text = PROBE.replace("def loss(self, batch):\n", "def loss(self, batch):\n" + CUT)
    probe.write_text("import os, signal\n" + text)
    monkeypatch.setenv("CUT", "now")
    _, said = cli("run", "digits", "--method", f"{probe}:Probe", *TINY[1:], "train.epochs=1", code=130)
    (run,) = Path(os.environ["PEARL_RUNS"]).iterdir()
    assert said.endswith(f"resume with: pearl resume {run} --method {run}/method.py:Probe\n"), said
    probe.unlink()
    monkeypatch.chdir(tmp_path)
    out, _ = cli(*said.rpartition("resume with: pearl ")[2].split(), "-q")
    assert "class-IL after the last task" in out
    done = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["done"] for event in done if event["event"] == "phase"] == [0, 1, 0]


def test_export_of_such_a_run(run, tmp_path):
    said = export_directory(str(run), to="torch", out=tmp_path / "p.pt2", method=f"{run}/method.py:Probe")
    assert (tmp_path / "p.pt2").is_file() and said


# --------------------------------------------------------------------------------------------------- out of packages


@pytest.fixture
def package(tmp_path, monkeypatch, probe):
    """What `pip install` leaves of a package with entry points."""
    site = tmp_path / "site"
    facts = site / "own_parts-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: own-parts\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[pearl.methods]\nprobe = own_parts:Probe\nbroken = own_parts.none:A\nno_method = own_parts:flat\n"
        "pearl = own_parts:Probe\n"
        "[pearl.backbones]\nflat = own_parts:flat\n"
        "[pearl.data]\nnoise = own_parts:noise\n"
        "[pearl.rank_rules]\nhalf = own_parts:Half\n"
    )
    (site / "own_parts.py").write_text(PARTS + PROBE)
    monkeypatch.syspath_prepend(site)
    registries = (METHODS, BACKBONES, SOURCES, RANK_RULES)
    for registry in registries:
        registry.__dict__.pop("installed", None)
    yield
    for registry in registries:
        registry.__dict__.pop("installed", None)
    sys.modules.pop("own_parts", None)


PARTS = '''
from dataclasses import dataclass
import numpy as np
from torch import nn
from pearl.data.sources import digits
from pearl.nn.rank_rules import Choice, PaperRule

def flat(image_size, *, dim: int = 6):
    """One linear layer on pixels."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, dim))
    net.dim, net.pretrained = dim, False
    return net

def noise(*, classes: int = 4):
    """As digits."""
    return digits()

@dataclass(frozen=True, kw_only=True)
class Half(PaperRule):
    """Half of full rank."""
    needs_probe = False
    def choose(self, reference, tuned):
        full = min(reference.shape)
        return Choice(rank=full // 2, full=full, threshold=0.5)
'''


def test_parts_of_an_installed_package(package, cli):
    assert "probe" in cli("list", "methods", "--long")[0]
    assert "Half of full rank." in cli("show", "half")[0]
    out, _ = cli("run", "digits", "method=probe", "backbone=flat", "data=noise", "--smoke", "-q", "stream.tasks=2")
    assert "digits-probe-seed0-smoke-" in out
    assert load_config("digits", ["method.rank.name=half"]).method["rank"]["name"] == "half"
    assert type(METHODS.load("pearl")).__name__ and METHODS.load("pearl").__module__ == "pearl.methods.pearl"


def test_a_broken_package_spoils_only_what_it_offers(package, cli):
    _, err = cli("run", "digits", "method=broken", code=2)
    assert err.startswith("pearl: method.name: method broken of the package own-parts: cannot be imported (")
    assert err.count("\n") == 1
    _, err = cli("run", "digits", "method=no_method", code=2)
    assert "method no_method of the package own-parts: does not derive from pearl.methods.base:Method" in err
    out, _ = cli("list", "methods", "--long")
    assert "broken" in out and "cannot be imported" in out
    cli("run", "digits", *TINY, "method=finetune")
