import json
from collections.abc import Callable
from pathlib import Path

import which_method
from pearl.reports.measured import lines_of

Cli = Callable[..., tuple[str, str]]
ROWS = Path(__file__).parents[2] / "docs" / "results" / "cpu-cifar20-resnet18.json"


def test_what_is_told_is_what_was_measured() -> None:
    for file, text in which_method.pages():
        assert file.read_text(encoding="utf-8") == text, (
            f"{file.name}: python benchmarks/which_method.py writes it anew"
        )


def test_methods_are_listed_with_what_was_measured(cli: Cli) -> None:
    (row,) = (row for row in json.loads(ROWS.read_text()) if row["method"] == "packnet")
    lines = cli("list", "methods", "--long")[0].splitlines()
    (line,) = (line for line in lines[_at(lines, "packnet") :][:5] if line.startswith("    cpu-cifar20-resnet18: "))
    assert f"class-IL (%) {row['class_il.final']:.1f}, " in line and f"training (s) {row['training_seconds']}, " in line
    assert f"passes per image {row['inference_cost']:.1f}" in line
    assert any(
        "deit_tiny, statistics: class-IL" in line for line in lines[_at(lines, "pearl") :][:8]
    )  # as `learn` makes it
    assert "one seed" in lines[-1] and "cpu-cifar20" not in cli("list", "methods")[0]


def test_a_method_without_a_row_has_no_line() -> None:
    assert lines_of("packnet") and not lines_of("mine") and not lines_of("pack")


def _at(lines: list[str], method: str) -> int:
    return next(number for number, line in enumerate(lines) if line.startswith(f"{method} "))


def test_a_mean_over_seeds_is_of_all_or_none() -> None:
    assert which_method._mean([1.0, 2.0]) == 1.5
    assert which_method._mean([1.0, None]) is None


def test_who_chooses_a_method_is_told_where_they_are_compared(cli: Cli) -> None:
    assert "pearl list methods --long" in " ".join(cli("learn", "--help")[0].replace("│", " ").split())
