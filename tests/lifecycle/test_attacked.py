"""Models that were changed on purpose, methods' files that end the process, and names that are more than names."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

import pearl
import zygote
from pearl.errors import ConfigError, RunError, TrainingError, short_of_memory
from pearl.lifecycle.saved import verify
from pearl.settings.parts import METHODS
from photos import SETTINGS, digit, learn, write_photos

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_bad_input_of_each_kind():
    """The benchmark in small, with a seed of its own; see there for what each input may do."""
    program = [str(BENCHMARKS / "attack" / "fuzz.py")]
    done = zygote.run(["--cases", "1", "--seed", "1", "--print"], program=program, text=True)
    assert done.returncode == 0, done.stderr
    (counts,) = [line for line in done.stdout.splitlines() if line.startswith("| all |")]
    assert counts.split("|")[2].strip() == "13"


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    root = tmp_path_factory.mktemp("shop")
    write_photos(root / "first", {"zero": 0, "one": 1}, 4)
    write_photos(root / "second", {"two": 2, "three": 3}, 4)
    small = SETTINGS | {"engine": {"max_steps": 1}, "backbone": {"name": "resnet18", "width": 2}}
    for task in ("first", "second"):
        settings = {key: value for key, value in small.items() if task == "first" or key == "train"}
        pearl.learn(root / "model", root / task, quiet=True, **settings)
    (root / "one").mkdir()
    return root


IMAGES = np.stack([np.stack([image] * 3, -1) for image in digit(0)[:2]])


def forge(task: Path, change, name: str = "weights") -> None:
    """Other tensors in a file, with the checksum and the list that fit them."""
    file, manifest = task / f"{name}.safetensors", json.loads((task / "manifest.json").read_text())
    state = load(file.read_bytes())
    others = {key: shape for key, shape in manifest["tensors"].items() if key not in state}
    change(state)
    file.write_bytes(save(state))
    manifest["sha256"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest["bytes"] = sum(each.stat().st_size for each in task.glob("*.safetensors"))
    manifest["tensors"] = others | {key: list(value.shape) for key, value in state.items()}
    (task / "manifest.json").write_text(json.dumps(manifest))


HEAD, TASK = "class_statistics.tensors.task/1/means/0", "tensors.1/"  # what answers for the second task


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.complex64, torch.float16, torch.float64])
def test_tensors_of_another_kind(kind, two):
    """A copy into a network would take any of them, and answer something."""
    name = "backbone.conv1.weight"
    forge(two / "reference", lambda state: state.update({name: state[name].to(kind)}))
    forge(two / "tasks" / "000-first", lambda state: state.pop(name))
    with pytest.raises(RunError, match=rf"backbone\.conv1\.weight is {kind}, not torch\.float32"):
        pearl.load(two).predict(IMAGES)


BIRTH = "class_statistics.tensors.space/1/created_at"


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("statistics", lambda state: state.update({HEAD: state[HEAD] * float("nan")})),
        ("statistics", lambda state: state.update({HEAD: state[HEAD][:, :3].clone()})),
        ("statistics", lambda state: state.pop(HEAD)),
        ("statistics", lambda state: state.update({BIRTH: torch.zeros(7, 3)})),
        ("statistics", lambda state: state.update({BIRTH: torch.tensor(-9)})),
        ("running", lambda state: state.pop("class_statistics.tensors.space/1/scatter")),
        (
            "running",
            lambda state: state.update(
                {"class_statistics.tensors.space/1/scatter": torch.zeros(3, dtype=torch.float64)}
            ),
        ),
        (
            "weights",
            lambda state: state.update({key: value[..., :0].clone() for key, value in state.items() if TASK in key}),
        ),
        (
            "weights",
            lambda state: state.update({key: value.to(torch.complex64) for key, value in state.items() if TASK in key}),
        ),
    ],
)
def test_tensors_that_give_no_answer(file, change, two):
    forge(two / "tasks" / "001-second", change, file)
    with pytest.raises(
        RunError, match=r"state does not fit|tensors do not fit together|give no finite logits|manifest"
    ):
        pearl.load(two).predict(IMAGES)


def test_a_checksum_over_what_holds_no_tensors(two):
    task = two / "tasks" / "001-second"
    manifest = json.loads((task / "manifest.json").read_text())
    manifest["sha256"]["weights.safetensors"] = hashlib.sha256(b"{}").hexdigest()
    (task / "manifest.json").write_text(json.dumps(manifest))
    (task / "weights.safetensors").write_bytes(b"{}")
    with pytest.raises(RunError, match=r"weights\.safetensors: not a file of tensors"):
        pearl.load(two).predict(IMAGES)


def test_other_tensors_than_the_manifest_lists(two):
    task = two / "tasks" / "001-second"
    listed = json.loads((task / "manifest.json").read_text())["tensors"]
    forge(task, lambda state: state.update({"more": torch.zeros(1)}))
    manifest = json.loads((task / "manifest.json").read_text()) | {"tensors": listed}
    (task / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=r"weights\.safetensors: its tensors differ from its manifest's list"):
        pearl.load(two).predict(IMAGES)
    assert len(verify(two)) == 1


@pytest.mark.parametrize("name", ["events.jsonl", "classes.json", ".holder.json", "tasks/001-second/manifest.json"])
def test_nothing_is_written_through_a_link(name, two, tmp_path, shop):
    """A model that came from others could name any file of whoever learns on with it."""
    outside = tmp_path / "diary"
    outside.write_bytes((two / name).read_bytes() if (two / name).exists() else b"dear diary")
    before = outside.read_bytes()
    (two / name).unlink(missing_ok=True)
    (two / name).symlink_to(outside)
    write_photos(tmp_path / "third", {"four": 4, "five": 5}, 2)
    with pytest.raises(RunError, match="leads outside of the directory"):
        learn(two, tmp_path / "third")
    assert outside.read_bytes() == before


@pytest.mark.parametrize("name", ["report.html", "logs", "logs/csv", "logs/csv/metrics.csv"])
def test_no_verb_writes_through_a_link_of_a_received_model(name, two, tmp_path, cli):
    """Nor under a name that could be guessed: links may wait for every number of a process."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "metrics.csv").write_text("dear diary")
    (two / name).parent.mkdir(parents=True, exist_ok=True)
    (two / name).symlink_to(home / "metrics.csv" if "." in name else home)
    for pid in {os.getpid(), *range(1, 500)}:
        (two / f".report.html.{pid}.tmp").symlink_to(home / "metrics.csv")
    if name == "report.html":
        cli("report", two)
        assert (two / name).read_text().startswith("<!") and not (two / name).is_symlink()
    else:
        write_photos(tmp_path / "third", {"four": 4, "five": 5}, 2)
        _, err = cli("learn", two, "--data", tmp_path / "third", "-q", "--log", "csv", code=2)
        assert "leads outside" in err or "is a link, which is never followed for writing" in err
    assert {file.name: file.read_text() for file in home.iterdir()} == {"metrics.csv": "dear diary"}


def test_links_inside_stay(two, tmp_path):
    (two / "events.jsonl").rename(two / "events-of-old.jsonl")
    (two / "events.jsonl").symlink_to("events-of-old.jsonl")
    write_photos(tmp_path / "third", {"four": 4, "five": 5}, 2)
    learn(two, tmp_path / "third")
    assert len(pearl.load(two).tasks) == 3


def test_fifos_are_no_images(shop, tmp_path):
    for name in ("zero", "one"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        os.mkfifo(tmp_path / "photos" / name / "pipe.png")
    (tmp_path / "photos" / "one" / "zero.jpg").symlink_to("/dev/zero")
    with pytest.raises(pearl.PearlError) as caught:
        pearl.load(shop / "model").evaluate(tmp_path / "photos")
    assert str(caught.value).count("neither a file nor a folder") == 3


# ---------------------------------------------------------------------------------------------------- methods' files

METHOD = """
from pearl.methods import Method, Phase
{top}
class Own(Method):
    phases = ("own",)
    def __init__(self, backbone):
        super().__init__(backbone)
        {init}
    def learn(self, task):
        self.heads.grow(len(task.classes))
        {learn}
    def loss(self, batch):
        {loss}
"""
ENDS = ["raise SystemExit(0)", "exit()", "raise GeneratorExit", "raise type('Mine', (KeyboardInterrupt,), {})('x')"]
ENDS += ["raise BaseException('x')", "1 / 0"]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("where", ["top", "init", "learn", "loss"])
def test_code_that_ends_the_process_is_named_by_its_line(where, end, tmp_path, monkeypatch):
    """Exit code 0 and not a word was what a run with `exit()` in it answered."""
    monkeypatch.setattr(METHODS, "_files", {})
    learns = "yield Phase('own', self.parameters(), self.loss)"
    parts = {"top": "", "init": "pass", "learn": learns, "loss": "return self(batch.x).sum()"}
    parts[where] = end if where != "learn" else f"{end}; yield"
    (tmp_path / "own.py").write_text(METHOD.format(**parts))
    line = next(n for n, text in enumerate(METHOD.splitlines(), 1) if f"{{{where}}}" in text)
    with pytest.raises(ConfigError, match=rf"own\.py, line {line}: .*; fix the file"):
        pearl.run("digits", smoke=True, quiet=True, backbone={"width": 2}, method=f"{tmp_path / 'own.py'}:Own")


@pytest.mark.parametrize(
    ("learns", "words"),
    [
        ("yield None", "Own.learn yields NoneType; let it yield a Phase"),
        ("yield 'own'", "Own.learn yields str"),
        ("yield Phase('own', [1], self.loss)", "line 11: TypeError: phase own: its params must be parameters"),
        ("yield Phase('own', [], self.loss)", "line 11: TypeError: phase own: its params must be parameters"),
        ("yield Phase('own', self.parameters(), 1)", "line 11: TypeError: phase own: its loss must be a function"),
        ("yield Phase(1, self.parameters(), self.loss)", "line 11: TypeError: a phase's name must be a string"),
        ("return 1", "own.py: TypeError"),
    ],
)
def test_what_is_no_phase(learns, words, tmp_path, monkeypatch):
    monkeypatch.setattr(METHODS, "_files", {})
    (tmp_path / "own.py").write_text(METHOD.format(top="", init="pass", learn=learns, loss="return 0"))
    with pytest.raises((ConfigError, TrainingError), match=words):
        pearl.run("digits", smoke=True, quiet=True, backbone={"width": 2}, method=f"{tmp_path / 'own.py'}:Own")


# ----------------------------------------------------------------------------------------------------------- the rest


def test_too_little_memory_is_a_line(tmp_path):
    """Python's own error and torch's, wherever they arise."""
    for error in ("MemoryError()", 'RuntimeError("DefaultCPUAllocator: can\'t allocate memory")'):
        code = f"import pearl.cli\ndef fail(*_, **__): raise {error}\npearl.cli.app = fail\npearl.cli.main()"
        done = zygote.run([], program=["-c", code], text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "pearl: out of memory; process less at a time, or free memory\n"


class PanicException(BaseException):
    """As safetensors has it."""


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("pearl.storage.checkpoint.load", PanicException("PyObject pointer is null")),
        ("torch.nn.Module.load_state_dict", RuntimeError("DefaultCPUAllocator: can't allocate memory")),
    ],
)
def test_too_little_memory_is_no_damage(two, where, error, monkeypatch):
    """Who is told to restore a model from a copy would gain nothing by it."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(where, fail)
    with pytest.raises((MemoryError, RuntimeError)) as actual:
        _ = pearl.load(two).method
    assert short_of_memory(actual.value)


def test_what_is_said_is_no_command_to_a_terminal(two, tmp_path):
    escape = "\x1b]0;owned\x07\r"
    folder = two.rename(tmp_path / f"model{escape}")
    for arguments in (["inspect", folder], ["report", folder], [f"--{escape}"], ["run", escape], ["list", escape]):
        done = zygote.run(arguments, text=True)
        assert done.returncode == (0 if folder in arguments else 2)
        assert all(line.isprintable() for line in f"{done.stdout}{done.stderr}".split("\n")), arguments
