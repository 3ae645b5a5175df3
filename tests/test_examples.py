"""examples/ and docs/researchers.md as a reader uses them: scripts run, commands too, and both show the same method."""

import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest
import torch

import pearl
import photos
from pearl.settings.parts import METHODS
from pearl.storage.paths import runs_root
from pearl.tables.spec import names
from pearl.testing import checks, maker
from pearl.testing.conformance import after

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
OWN = EXAMPLES / "slow_backbone.py"
PAGE = (ROOT / "docs" / "researchers.md").read_text(encoding="utf-8")
HELD = ("strict_reload", "resume_inside_a_task_bit_exact", "only_the_phase_changes")
SMALL = {"backbone": {"width": 4}, "stream": {"tasks": 2}}


def main_of(script):
    return runpy.run_path(str(EXAMPLES / script))["main"]


def test_a_model_is_made_of_folders(tmp_path, capsys):
    first = photos.write_photos(tmp_path / "first", {"zero": 0, "one": 1})
    second = photos.write_photos(tmp_path / "second", {"two": 2, "three": 3})
    test = photos.write_photos(tmp_path / "test", {"one": 1, "two": 2}, 8, start=16)
    main_of("photos.py")(tmp_path / "model", [first, second], test, **photos.SETTINGS)
    said = capsys.readouterr().out
    assert pearl.load(tmp_path / "model").tasks[1].classes == ("three", "two")
    assert re.search(r"second: \d+\.\d % of the new classes right", said)
    assert "4 classes: one, zero, three, two" in said and re.search(r"all +16 ", said)


def test_methods_are_compared(capsys):
    main_of("compare.py")(seeds=(0, 1), smoke=True, **SMALL)
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["class_il.final", "task_il.final", "parameters_million"]
    assert [row[0] for row in rows] == ["finetune", "SlowBackbone", "pearl"]
    assert float(rows[2][3]) > float(rows[0][3])  # a sub-network per task
    assert len(list(runs_root().iterdir())) == 6


@pytest.mark.parametrize("check", [check for check in checks() if check.__name__.removeprefix("shows_") in HELD])
def test_the_method_keeps_the_contract(check):
    check(maker(f"{OWN}:SlowBackbone"))


def test_its_backbone_goes_a_share_of_the_way():
    def moved(share):
        make = maker(f"{OWN}:SlowBackbone", share=share)
        return [not torch.equal(one, other) for one, other in zip(*(_backbone(make, t) for t in (1, 2)), strict=True)]

    assert not any(moved(0.0)) and all(moved(0.5))


def _backbone(make, tasks):
    return [*after(make, tasks).backbone.parameters()]


def test_the_page_shows_the_example():
    assert re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) == [OWN.read_text(encoding="utf-8")]


def test_its_commands_run(tmp_path, monkeypatch, cli):
    shutil.copy(OWN, tmp_path)
    monkeypatch.chdir(tmp_path)
    said = []
    for line in "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)).splitlines():
        program, verb, *rest = shlex.split(line)
        assert program == "pearl"
        if verb == "table":  # counts for seconds; tests of tables do it
            assert {*rest} <= {"list", *names()}
            continue
        METHODS._files.clear()  # each would be a process of its own
        ours = [] if verb != "run" or "--dry-run" in rest else ["--smoke", "-q", "backbone.width=4"]
        ours += ["stream.tasks=2"] if ours and "stream.tasks=1" not in rest else []
        name = max(runs_root().glob("digits-*"), key=lambda run: run.stat().st_mtime_ns, default=Path("NAME"))
        said.append(cli(verb, *(word.replace("runs/NAME", str(name)) for word in rest), *ours)[0])
    text = "\n".join(said)
    assert "share = 0.1" in text and "report.html" in text and "domain-IL, the worst domain" in text
