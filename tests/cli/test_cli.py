"""The command line as a user meets it. Each wrong input: one clear line for each problem, exit code 2, no traceback."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import pearl
import zygote
from layouts import cifar100_npz, image_folder
from pearl.cli import app as command_line
from pearl.lifecycle.saved import config_bytes
from pearl.settings.config import load_config, recipe_names
from pearl.settings.parts import METHODS
from pearl.storage.checkpoint import write_part
from pearl.storage.files import write_file, write_json

pytestmark = pytest.mark.slow

TINY = ["backbone.width=4", "train.epochs=1", "engine.max_steps=1", "stream.per_class=4", "stream.test_per_class=2"]


@pytest.fixture
def cli(cli):
    """What `pearl` says: its output, or if it fails its complaint."""
    return lambda *arguments, code=0: cli(*arguments, code=code)[code != 0]


def test_run_prints_results_and_where_they_are(cli):
    out = cli("run", "digits", *TINY, "-q")
    assert "class-IL accuracy (%)" in out
    assert "class-IL after the last task" in out
    assert os.environ["PEARL_RUNS"] in out
    again = cli("run", "digits", *TINY, "-q")
    assert again == out
    listed = cli("list", "runs")
    assert "done, 5 tasks" in listed
    assert cli("show", listed.split()[0]) == out


def test_smoke_from_the_command_line(cli):
    assert "digits-finetune-seed0-smoke" in cli("run", "digits", "method=finetune", "--smoke", "-q")


def test_progress_is_plain_lines_without_a_terminal(tmp_path):
    done = zygote.run(["run", "digits", *TINY], text=True)
    lines = done.stderr.splitlines()
    assert "task 1/5: 2 classes (0, 1), 8 images" in lines
    assert any(line.startswith("  probe: ") for line in lines)
    assert "\x1b" not in done.stderr


def test_dry_run_tells_and_trains_nothing(cli):
    out = cli("run", "digits", "--dry-run")
    assert len(out.splitlines()) <= 25
    for part in ("5 tasks", "20 targets", "and 15 more (--long shows all)", "estimated memory", "time: about"):
        assert part in out
    assert "  reference: 180 steps in 1 task," in out
    long = cli("run", "digits", "--dry-run", "--long")
    assert "stream:" in long and "layer4.1.conv2.weight: 128x128x3x3" in long
    assert not Path(os.environ["PEARL_RUNS"]).exists()


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("methods", set(METHODS.names())),
        ("backbones", {"resnet18", "bsc", "convnet", "timm/*"}),
        ("data", {"digits", "cifar100", "tinyimagenet", "imagenet_r", "folder", "npz", "torchvision/*", "hf/*"}),
        ("ranks", {"paper", "fixed", "energy", "random", "even", "adalora", "dora", "codyra", "dylora"}),
        ("recipes", set(recipe_names())),
        ("tables", {file.stem for file in Path(pearl.__file__).parent.glob("tables/*.yaml")}),
    ],
)
def test_list(cli, kind, names):
    lines = cli("list", kind).splitlines()
    assert {line.split()[0] for line in lines} == names
    assert all(len(line.split()) > 1 for line in lines), "each with a sentence"


@pytest.mark.parametrize("name", ["pearl", "resnet18", "timm/resnet18", "folder", "fixed", "cifar100-5t-bsc"])
def test_show(cli, name):
    assert len(cli("show", name).splitlines()) > 3


def test_doctor(cli, tmp_path):
    for name in ("photos/cat/a.png", "cifar100.npz", "vit.safetensors", "cache/x", "phases/x", ".hidden"):
        write_file(tmp_path / "data" / name, b"")
    out = cli("doctor")
    assert "torch" in out
    assert "data here: cifar100.npz (cifar100), photos (a folder)\nweights here: vit.safetensors" in out
    assert out.rstrip().endswith("all well")


WRONG = {
    "recipe": (["digitz"], "unknown recipe 'digitz'; did you mean 'digits'?"),
    "recipe file": (["nowhere.yaml"], "recipe file nowhere.yaml not found"),
    "method": (["digits", "method=perl"], "method.name: unknown method 'perl'; did you mean 'pearl'?"),
    "key": (["digits", "train.lrr=1"], "train.lrr: unknown key; did you mean 'lr'?"),
    "option": (["digits", "method.fould=view"], "method.fould: unknown key; did you mean 'fold'?"),
    "no value": (["digits", "seed"], "'seed' is not of the form key=value"),
    "backbone": (["digits", "backbone=resnet19"], "unknown backbone 'resnet19'; did you mean 'resnet18'?"),
    "timm name": (["digits", "backbone=timm/resnet_18"], "unknown timm network 'resnet_18'; did you mean"),
    "data source": (["digits", "data=cifar"], "unknown data source 'cifar'; did you mean 'cifar100'?"),
    "target": (["digits", "method.targets=key"], "method.targets='key' matches no layer"),
    "expression": (["digits", "method.targets=conv("], "not a valid regular expression"),
    "rank": (
        ["digits", "method.rank.name=fixed", "method.rank.r=0"],
        "method.rank.r: input should be greater than or equal to 1",
    ),
    "tasks": (["digits", "stream.tasks=4"], "stream.tasks=4 does not divide 10 classes; use 5"),
    "order": (["digits", "stream.order=[0,1,99]"], "stream.order: no class 99 in a source of 10"),
    "patches": (
        ["digits", "backbone=timm/test_vit", "images.size=30", "images.augment=none"],
        "images.size=30: test_vit cuts patches of 16 pixels; use 32",
    ),
    "hours": (["digits", r"method.targets=((a|e|i|l|w|.|..)+)+\1$"], "takes too long on"),
    "a large number": (["digits", f"backbone.width={10**22}"], "not valid YAML (a number of more than 64 bits)"),
    "width": (["digits", "backbone.width=1000000"], "backbone.width: input should be less than or equal to 1024"),
    "pixels": (["digits", "images.size=1000000"], "images.size: input should be less than or equal to 4096"),
    "depth": (["digits", f"{'a.' * 2000}b=1"], "no setting is nested that deep"),
    "a long line": (["digits", f"train.lr={'x' * 100_000}"], "unable to parse string as a number (given: 'xxx"),
    "nobody's home": (["digits", "data=npz", "data.path=~nouser/x"], "that user has no home directory"),
    "NUL": (["digits", "data=npz", r'data.path="a\0b"'], "not valid YAML (a text with a NUL)"),
    "no data": (["digits", "data=folder", "data.path=nowhere"], "image folder not found: tried nowhere and"),
    "no weights": (["digits", "backbone.weights=w.pth"], "weights not found: tried w.pth and"),
    "device": (["digits", "--device", "warp"], "device 'warp' cannot be used here"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_input_is_one_line(cli, wrong):
    arguments, message = WRONG[wrong]
    err = cli("run", *arguments, code=2)
    (line,) = err.strip().splitlines()[-1:]
    assert message in line
    assert line.startswith("pearl: ")
    assert "Traceback" not in err
    assert not Path(os.environ["PEARL_RUNS"]).exists()


def test_an_option_that_takes_one_value_is_given_once(cli, tmp_path):
    """Of two folders the last would be learnt, and the first not, without a word."""
    error = cli("learn", "shop", "--data", tmp_path, "--data", tmp_path, code=2)
    assert error == "pearl: --data: given 2 times; keep one value\n"
    error = cli("learn", "shop", "--data", tmp_path, "--alias", "a=b", "--alias", "a=c", code=2)
    assert error == "pearl: --alias a: given for two classes; keep one\n"
    assert not Path("shop").exists()


def test_all_mistakes_at_once(cli):
    err = cli("run", "digits", "method=perl", "train.lrr=1", "backbone.with=3", "images.std=0", code=2)
    for part in ("unknown method", "train.lrr", "backbone.with", "images.std"):
        assert part in err
    assert len(err.strip().splitlines()) == 4


def test_classes_without_images_are_named(cli, tmp_path):
    root = image_folder(tmp_path / "tree", size=8)
    (root / "train" / "dog").mkdir()
    err = cli("run", "digits", "data=folder", f"data.path={root}", "stream.tasks=1", code=2)
    assert "no image in" in err
    assert "dog" in err
    for file in (root / "test" / "bee").iterdir():
        file.unlink()
    (root / "train" / "dog").rmdir()
    assert "bee" in cli("run", "digits", "data=folder", f"data.path={root}", "stream.tasks=1", code=2)


def test_a_directory_without_permission(cli, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PEARL_RUNS", str(tmp_path / "file" / "runs"))
    err = cli("run", "digits", *TINY, "-q", code=2)
    assert "cannot be written" in err
    assert "PEARL_RUNS" in err


def test_offline_says_where_to_put_the_data(cli, monkeypatch):
    import torchvision.datasets.utils as utils

    def refused(*_, **__):
        raise OSError("no network in tests")

    monkeypatch.setattr(utils, "_urlretrieve", refused)
    assert "put the official cifar-100-python.tar.gz" in cli("run", "cifar100-5t-resnet18", code=2)
    assert "put tiny-imagenet-200.zip into" in cli("run", "tinyimagenet-5t-bsc", code=2)
    assert "put imagenet-r.tar into" in cli("run", "imagenet_r-5t-vit", "backbone.pretrained=false", code=2)


def test_show_of_nothing(cli):
    assert "unknown name 'perl'; did you mean 'pearl'?" in cli("show", "perl", code=2)


def test_npz_in_place_of_cifar100(cli, monkeypatch, tmp_path):
    monkeypatch.setenv("PEARL_DATA", str(tmp_path))
    cifar100_npz(tmp_path, classes=100, per_class=3)
    out = cli("run", "cifar100-5t-bsc", "backbone.width=4", "engine.channels_last=false", "--smoke", "-q")
    assert "task5" in out


# a command that is refused is refused when it is only asked what it would do, in the same words
REFUSED = {
    "data": ["run", "digits", "data=folder", "data.path=nowhere"],
    "recipe": ["run", "digitz"],
    "method": ["run", "digits", "method=perl"],
    "target": ["run", "digits", "method.targets=key"],
    "tasks": ["run", "digits", "stream.tasks=4"],
    "device": ["run", "digits", "--device", "warp"],
    "no GPU": ["run", "digits", "--device", "cuda"],
    "minutes": ["run", "digits", "--store-every", "nan"],
    "negative minutes": ["run", "digits", "--store-every", "-1"],
    "devices": ["run", "digits", "--devices", "0"],
    "crop": ["run", "digits", "images.size=16", "images.augment=crop"],
    "runs folder": ["run", "digits", "RUNS=HERE/file/runs"],
    "another configuration": ["run", "digits", "RUNS=HERE/other"],
    "a lost task": ["run", "digits", "RUNS=HERE/lost"],
    "other data": ["run", "digits", *TINY, "RUNS=HERE/changed"],
    "sweep of weights": ["sweep", "digits", "backbone.weights=w.pth"],
    "sweep's runs folder": ["sweep", "digits", "RUNS=HERE/file/runs"],
    "sweep's table": ["sweep", "digits", "-o", "HERE/file/table.md"],
    "ending of a sweep's table": ["sweep", "digits", "-o", "table.doc"],
    "sweep's device": ["sweep", "digits", "--device", "warp"],
    "workers": ["sweep", "digits", "--workers", "0"],
    "per GPU": ["sweep", "digits", "--per-gpu", "0"],
    "SLURM": ["sweep", "digits", "--executor", "slurm"],
    "option of SLURM": ["sweep", "digits", "--executor", "slurm", "--slurm", "partition"],
    "workers of SLURM": ["sweep", "digits", "--executor", "slurm", "--workers", "0"],
    "seeds": ["sweep", "digits", "--seeds", "few"],
    "axis": ["sweep", "digits", "method=[perl,er]"],
}


@pytest.fixture
def directories(tmp_path):
    """Run directories that no run goes on in, each in a runs folder of its own; weights, and a file."""
    (tmp_path / "file").write_text("")
    save_file({"odd": torch.zeros(1)}, tmp_path / "odd.safetensors")
    for name, settings, holds in (("other", [], ["seed=5"]), ("lost", [], []), ("changed", TINY, TINY)):
        path = tmp_path / name / load_config("digits", settings).id
        write_file(path / "config.yaml", config_bytes(load_config("digits", holds)))
        if name == "lost":
            write_json(path / "classes.json", {"format": 1, "tasks": [{"name": "one", "classes": ["cat"]}]})
        write_json(path / "data.json", {"format": 1, "images_sha256": {}, "stream_sha256": ""})
        write_part(path / "reference", {}, {})


@pytest.mark.parametrize("refused", REFUSED)
def test_a_dry_run_refuses_what_the_run_refuses(cli, monkeypatch, tmp_path, directories, refused):
    monkeypatch.setenv("PATH", "/nowhere")  # no SLURM
    *command, last = (word.replace("HERE", str(tmp_path)) for word in REFUSED[refused])
    if last.startswith("RUNS="):
        monkeypatch.setenv("PEARL_RUNS", last.removeprefix("RUNS="))
    else:
        command.append(last)
    before = sorted(tmp_path.rglob("*"))
    dry = cli(*command, "--dry-run", code=2).splitlines()
    real = cli(*command, "-q", code=2).splitlines()
    assert dry[-1] == real[-1]
    assert sorted(tmp_path.rglob("*")) == before


def test_version_and_help_come_without_torch(cli):
    assert cli("--version") == f"pearl {pearl.__version__}\n"
    for word in ("--version", "--help"):
        code = f"import sys; sys.argv = ['pearl', '{word}']; import pearl.cli\n"
        code += "try: pearl.cli.main()\nfinally: print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert "typer" in done.stdout.split() and not {"torch", "numpy"} & {*done.stdout.split()}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_verbs_and_recipes(shell):
    def offered(words: str) -> str:
        asked = {
            "_PEARL_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
            "_TYPER_COMPLETE_ARGS": words,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
        command = [sys.executable, "-c", "import sys; sys.argv = ['pearl']; import pearl.cli; pearl.cli.main()"]
        return subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=True).stdout

    assert "refit" in offered("pearl re") and "show" not in offered("pearl re")
    assert "digits" in offered("pearl run di")


def test_completion_is_installed_for_pearl_however_it_is_started(tmp_path):
    asked = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "pearl", "--install-completion", "bash"]
    subprocess.run(command, env=asked, capture_output=True, check=True)
    (script,) = (tmp_path / ".bash_completions").iterdir()
    assert script.name == "pearl.sh" and script.read_text().rstrip().endswith("-F _pearl_completion pearl")
    assert "_PEARL_COMPLETE=complete_bash" in script.read_text()


def test_something_is_said_before_torch_is_imported(monkeypatch, capsys):
    """To who waits before a terminal, and to nobody else: one line of an error stays one line."""
    from pearl.cli import options

    options.begun("run digits", quiet=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    options.begun("run digits", quiet=True)  # which may take minutes without a word
    assert capsys.readouterr().err == "pearl run digits: running without progress display (--quiet)\n"
    options.begun("run digits", quiet=False)
    assert capsys.readouterr().err == "pearl run digits: one moment ...\n"


EVERY = [command.name for command in command_line.registered_commands]


@pytest.mark.parametrize("verb", EVERY)
def test_an_unknown_option_is_one_line_for_every_verb(verb, cli):
    err = cli(verb, "--nonsense", code=2)
    assert re.fullmatch(rf"pearl: {verb}: no such option:? '?--nonsense\b.*; see: pearl {verb} --help\n", err)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("learn", "learn: missing argument 'MODEL'; see: pearl learn --help"),
        ("rename model one", "rename: missing argument 'NEW'; see: pearl rename --help"),
        ("undo one two", r"undo: got unexpected extra argument(\(s\))? \(two\); see: pearl undo --help"),
        ("serve model --port many", "serve: invalid value for '--port': .*integer.*; see: pearl serve --help"),
        ("list nothing", "list: invalid value for .*'nothing' is not one of .*; see: pearl list --help"),
        ("learn model --data", "learn: option '--data' requires an argument; see: pearl learn --help"),
        ("lern", "no such command 'lern'; did you mean 'learn'; see: pearl --help"),
        ("--nonsense", "no such option:? '?--nonsense'?; see: pearl --help"),
        ("undo x\ny z", r"undo: got unexpected extra argument(\(s\))? .*; see: pearl undo --help"),
    ],
)
def test_wrong_syntax_is_one_line_with_the_fix(arguments, line, cli):
    err = cli(*arguments.split(" "), code=2)
    assert re.fullmatch(rf"pearl: {line}\n", err), err


def test_help_is_as_long_as_it_is(cli):
    for arguments in ([], ["learn", "--help"]):
        text = cli(*arguments, code=0 if arguments else 2)
        assert "Usage: pearl" in text and text.count("\n") > 10
