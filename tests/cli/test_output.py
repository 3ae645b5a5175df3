"""Output that cannot be written, and lines that nobody could read: one line and exit code 2, whatever the verb."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pearl
import pearl.cli
import zygote
from pearl.errors import LONGEST
from pearl.settings.config import parse_overrides
from photos import SETTINGS, folders, write_photos

pytestmark = pytest.mark.slow

TINY = ["backbone={name: convnet, width: 2}", "engine.channels_last=false", "engine.max_steps=1", "train.epochs=1"]
TINY += ["stream.classes=4", "stream.tasks=2", "stream.per_class=4", "stream.test_per_class=2"]
VERBS = {command.name for command in pearl.cli.app.registered_commands}
FULL = "pearl: standard output: cannot be written (No space left on device); stored results are complete"
FULL_DISK = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL_DISK.exists(), reason="no device here that is always full")


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """Photos, a model and a run, which tests do not change."""
    root = tmp_path_factory.mktemp("stage")
    write_photos(root / "photos", {"zero": 0, "one": 1}, 4)
    with folders(root):
        small = SETTINGS | {"engine": {"max_steps": 1}, "method": {"name": "pearl", "classifier": "heads"}}
        pearl.learn(root / "model", root / "photos", quiet=True, **small)
        run = pearl.run("digits", quiet=True, **parse_overrides(TINY))
        shutil.copytree(run.path, root / "run")
    return root


def arguments(verb, stage, here):
    """A call of each verb that prints."""
    photos, model = stage / "photos", stage / "model"
    if verb in ("learn", "export", "report", "undo", "rename", "forget", "push"):
        model = shutil.copytree(model, here / "model")
    if verb == "undo":
        pearl.learn(model, write_photos(here / "second", {"five": 5}, 2), quiet=True)
    if verb == "discover":  # which needs class statistics
        model = pearl.load(model).refit(photos, here / "statistics").path
    return {
        "run": ["run", "digits", *TINY, "-q"],
        "resume": ["resume", stage / "run"],
        "refit": ["refit", model, "--data", photos, "--to", here / "new"],
        "sweep": ["sweep", "digits", *TINY, "--dry-run"],
        "learn": ["learn", model, "--data", write_photos(here / "more", {"two": 2}, 2), "-q"],
        "predict": ["predict", model, photos],
        "evaluate": ["evaluate", model, "--data", photos],
        "discover": ["discover", model, photos],
        "undo": ["undo", model],
        "rename": ["rename", model, "zero", "null"],
        "forget": ["forget", model, "--class", "zero"],
        "inspect": ["inspect", model],
        "verify": ["verify", model],
        "push": ["push", model, "anna/shop", "--dry-run"],
        "export": ["export", model, "--to", "peft", "-o", here / "out"],
        "report": ["report", model],
        "table": ["table", "list"],
        "list": ["list", "recipes"],
        "show": ["show", "digits"],
        "cache": ["cache"],
        "doctor": ["doctor"],
        "serve": ["serve", model, "--port", "0", "--no-browser"],
    }[verb]


@needs_full
@pytest.mark.parametrize("verb", sorted(VERBS))
def test_output_on_a_full_disk_is_one_line(verb, stage, tmp_path, cli, monkeypatch):
    monkeypatch.setattr("pearl.tables.listing.listing", lambda *_: "of all tables, which takes seconds")
    for given in (arguments(verb, stage, tmp_path), [verb, "--help"]):
        with FULL_DISK.open("w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            _, err = cli(*given, code=2)
        said = [line for line in err.splitlines() if line.startswith("pearl: ")]
        assert len(said) == 1 and said[0].startswith(FULL), err
        assert "Traceback" not in err


@needs_full
@pytest.mark.parametrize(
    ("where", "code"),
    [("> /dev/full", 2), ("> /dev/full 2>&1", 2), ("2> /dev/full", 0), (">&-", 0), ("<&- >&- 2>&-", 0)],
)
def test_a_process_whose_streams_are_full_or_closed_ends_well(where, code):
    """The interpreter flushes once more when it ends, after all that pearl can catch."""
    command = f"{shlex.quote(sys.executable)} -P -m pearl list recipes {where}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr.count("\n") == (where == "> /dev/full"), done.stderr


@needs_full
def test_progress_on_a_full_disk_ends_no_run():
    with FULL_DISK.open("w") as full, Path(os.devnull).open("w") as nowhere:
        assert zygote.Process(["run", "digits", *TINY], stderr=full, stdout=nowhere).wait() == 0


LONG = "x" * 30_000


@pytest.mark.parametrize("given", [["list", LONG], [f"--{LONG}"], ["inspect", LONG], ["predict", "model", LONG]])
def test_a_line_of_what_is_wrong_is_short(given, cli):
    """Whoever writes it: pearl, the library that reads the command line, or the operating system's own words."""
    _, err = cli(*given, code=2)
    assert max(map(len, err.splitlines())) < LONGEST + 100


@pytest.mark.parametrize("value", ["[", "{name: statistics", "&a [*a]", "a: b: c", "\x01", "\udcff"])
def test_a_classifier_that_is_not_yaml_is_one_line(value, stage, cli):
    _, err = cli("refit", stage / "run", value, code=2)
    assert err.startswith("pearl: CLASSIFIER: the value ") and err.endswith("; quote it\n") and err.count("\n") == 1
