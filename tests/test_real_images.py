"""The script that writes the tables of docs/results, on digits made tiny."""

import json
from pathlib import Path
from statistics import mean, stdev

import pytest

import real_images

pytestmark = pytest.mark.slow

MEMORY = real_images.memory
TINY = ["backbone.width=4", "train.epochs=1", "engine.max_steps=1", "stream.per_class=4", "stream.test_per_class=2"]


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    """Where the tables go; all methods are tiny, and their memory takes a process each."""
    monkeypatch.setattr(real_images, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(real_images, "memory", lambda recipe, settings: 100 + len(settings))
    tiny = {"pearl": TINY, "finetune": ["method=finetune", *TINY]}
    monkeypatch.setattr(real_images, "METHODS", tiny)
    return tmp_path / "results"


def rows(results):
    return json.loads((results / "digits.json").read_text())


def table(results):
    """Cells by method."""
    lines = (results / "digits.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    head, *body = cells
    return {line[0]: dict(zip(head, line, strict=True)) for line in body}


def test_rows_of_other_methods_and_seeds_stay(results):
    first = ["--recipes", "digits", "--methods", "finetune", "--seeds", "0"]
    second = ["--recipes", "digits", "--methods", "pearl", "finetune", "--seeds", "1"]
    assert real_images.main(first) == real_images.main(second) == 0
    actual = rows(results)
    assert [(r["method"], r["seed"]) for r in actual] == [("finetune", 0), ("pearl", 1), ("finetune", 1)]
    assert actual[0]["command"] == f"python benchmarks/real_images.py {' '.join(first)}"

    both = [r["class_il.final"] for r in actual if r["method"] == "finetune"]
    shown = table(results)
    assert shown["finetune"]["n"] == "2" and shown["pearl"]["n"] == "1"
    assert shown["finetune"]["class-IL A_T"] == f"{mean(both):.2f} ± {stdev(both):.2f}"
    assert shown["finetune"]["mean rank"] == "-"
    assert shown["pearl"]["class-IL A_T"] == f"{actual[1]['class_il.final']:.2f}"
    text = (results / "digits.md").read_text(encoding="utf-8")
    assert "- finetune seed 0: `python benchmarks/real_images.py --recipes digits --methods finetune --seeds 0`" in text
    assert "- pearl seed 1, finetune seed 1: `python" in text
    assert str(Path.cwd()) not in text and str(results.parent) not in text

    assert [r["memory_mb"] for r in actual] == [106, 105, 106] and shown["pearl"]["memory (MB)"] == "105"

    assert real_images.main(first) == 0  # a finished run again takes its own place
    assert [(r["method"], r["seed"], r["run"]) for r in rows(results)] == [
        (r["method"], r["seed"], r["run"]) for r in actual
    ]


def test_the_table_can_be_written_without_running(results, monkeypatch, capsys):
    real_images.main(["--recipes", "digits", "--methods", "finetune"])
    before = (results / "digits.md").read_text(encoding="utf-8")
    (results / "digits.md").unlink()
    monkeypatch.setattr(real_images, "execute", None)
    assert real_images.main(["--only-table", "--recipes", "cifar100-5t-bsc", "digits"]) == 2
    assert (results / "digits.md").read_text(encoding="utf-8") == before
    assert "cifar100-5t-bsc: there is no cifar100-5t-bsc.json" in capsys.readouterr().err


def test_missing_data_is_a_line_and_the_next_recipe_goes_on(results, capsys, monkeypatch):
    monkeypatch.setattr(real_images, "METHODS", {"pearl": TINY})
    assert real_images.main(["--recipes", "cpu-grocery-deit_tiny", "digits"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cpu-grocery-deit_tiny: ")]
    assert len(lines) == 1
    assert [r["method"] for r in rows(results)] == ["pearl"]


def test_memory_can_be_measured_alone(results, monkeypatch):
    real_images.main(["--recipes", "digits"])
    before = rows(results)
    monkeypatch.setattr(real_images, "memory", lambda recipe, settings: 7)
    monkeypatch.setattr(real_images, "execute", None)
    assert real_images.main(["--only-memory", "--recipes", "digits", "--methods", "pearl"]) == 0
    assert rows(results) == [before[0] | {"memory_mb": 7}, before[1]]
    assert table(results)["pearl"]["memory (MB)"] == "7"


def test_memory_is_that_of_a_process_of_its_own():
    """A ResNet-18 of width 32 has 2.8 million weights, and as many gradients and velocities."""
    actual = MEMORY("digits", ["method=finetune", *TINY, "backbone.width=32", "stream.classes=2", "stream.tasks=1"])
    assert 3 * 4 * 2.8 < actual < 1000


@pytest.mark.parametrize(
    ("values", "digits", "text"), [([1.5], 2, "1.50"), ([1, 3], 1, "2.0 ± 1.4"), ([7], 0, "7"), ([None], 1, "-")]
)
def test_cell(values, digits, text):
    assert real_images.cell(values, digits) == text
