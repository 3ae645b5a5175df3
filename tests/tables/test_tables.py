"""Tables: the files are right and say what the paper says, cells hold what the runs say, all formats agree."""

import csv
import io
import json
import math
import os
import re
import shutil
import statistics
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

import layouts
import pearl
from pearl.evaluation.metrics import Counts, summary
from pearl.lifecycle.runs import Run, execute
from pearl.methods.pearl import Pearl
from pearl.reports.records import read as read_run
from pearl.reports.text import duration
from pearl.settings.config import ConfigError
from pearl.settings.declared import declared
from pearl.storage.files import read_json
from pearl.tables import spec
from pearl.tables.listing import listing
from pearl.tables.missing import measure, run_missing
from pearl.tables.model_values import CPU_CORE, GPU, parameters, seconds
from pearl.tables.run_metrics import measured
from pearl.tables.show import FORMATS, page, write
from pearl.tables.spec import OF_LAYERS, OF_STREAMS, OF_TASKS, SIZES, PaperTable, Printed, Request, names, read, sized
from pearl.tables.values import Cell, Filled, Missing, chance, difference, fill, verdict
from pearl.tables.words import about, lines

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[3] / "shared" / "reference" / "paper.tex"
TABLES = names()

# ----------------------------------------------------------------------------------------------- the files are right


def known_metrics() -> set[str]:
    stage = {"total": [1], "class_il": [1], "task_il": [1], "confusion": [[1]]}
    counts = Counts.from_results({"tasks": [{"classes": ["a"]}], "stages": [stage]})
    return {*summary(counts, [1], [1]), "mean_rank", "inference_ms", *OF_TASKS, *OF_LAYERS, *OF_STREAMS}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("size", SIZES)
def test_every_run_of_every_table_can_be_configured(
    name: str, size: spec.Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pearl.tables.values.parameters", lambda request: 1)  # counting takes long
    monkeypatch.setattr("pearl.tables.values.implied_rank", lambda request, total: 8.0)
    filled = fill(read(name), size, 2)
    for missing in filled.missing:
        config = missing.request.config
        assert config.smoke == (size == "smoke")
        assert missing.path.name == missing.request.id(missing.seed)
        assert seconds(config, GPU) > 0 and seconds(config, CPU_CORE) > 0


@pytest.mark.parametrize("name", TABLES)
def test_every_metric_is_one(name: str) -> None:
    for column in read(name).columns:
        kind, _, of = column.metric.partition(".")
        assert column.metric in known_metrics() or kind == "settings" or (kind == "seconds" and of in declared(Pearl))


def test_a_seed_is_the_last_of_the_settings() -> None:
    request = Request("digits", ("train.lr=0.01",), False)
    assert request.id(3) == pearl.settings.config.load_config("digits", request.overrides(3)).id
    assert Request("digits", ("seed=2",), False).seeds(3) == [2]


def test_all_tables_and_figures_of_the_paper_are_there() -> None:
    keys_of_tables = [read(name).where for name in TABLES]
    assert {f"Table {number}" for number in range(1, 18)} <= set(keys_of_tables)
    assert {f"Figure {number}" for number in range(1, 6)} <= set(keys_of_tables)
    assert keys_of_tables[:17] == [f"Table {number}" for number in range(1, 18)]


def test_small_recipes_stand_for_the_papers() -> None:
    assert sized("cifar100-20t-resnet18", "cpu") == ("table-resnet18", ["stream.tasks=20"])
    assert sized("imagenet_r-5t-vit", "smoke") == ("table-deit_tiny", ["stream.tasks=5"])
    assert sized("tinyimagenet-10t-bsc", "cpu") is None
    assert sized("cifar100-20t-bsc", "schedule") == ("schedule-bsc", ["stream.tasks=20"])
    assert sized("tinyimagenet-10t-bsc", "schedule") is None
    assert sized("tinyimagenet-10t-bsc", "paper") == ("tinyimagenet-10t-bsc", [])


def test_the_schedule_is_the_papers_on_smaller_networks() -> None:
    load = pearl.settings.config.load_config
    for paper, small in (("cifar100-5t-resnet18", "schedule-resnet18"), ("cifar100-5t-bsc", "schedule-bsc")):
        whole, half = load(paper), load(small)
        assert (half.stream, half.images, half.data) == (whole.stream, whole.images, whole.data)
        for phase in declared(Pearl):  # but for the schedule, which the paper does not state
            mine, theirs = half.train.phase(phase), whole.train.phase(phase)
            assert mine.model_copy(update={"schedule": theirs.schedule, "milestones": theirs.milestones}) == theirs
        assert half.backbone == whole.backbone | {"width": 32}
    whole, tiny = load("imagenet_r-10t-vit").train, load("schedule-deit_tiny").train
    for phase in declared(Pearl):
        assert tiny.phase(phase) == whole.phase(phase)
    rows = [row.name for row in fill(read("fixed_rank"), "schedule").rows]
    assert rows == [row.name for row in fill(read("fixed_rank"), "paper").rows]


def test_rows_of_the_schedule_differ_by_method_and_not_by_network() -> None:
    networks = {
        (request.recipe, json.dumps(request.config.backbone))
        for table in map(read, TABLES)
        for row in table.rows
        for column in table.columns
        if (request := table.request(row, column, "schedule"))
    }
    assert len(networks) == 3


SMALLEST: dict[str, Any] = {
    "name": "mine",
    "title": "Mine",
    "where": "nowhere",
    "recipe": "digits",
    "columns": [{"id": "a", "name": "A_T", "metric": "class_il.final"}],
    "rows": [{"name": "pearl", "set": [], "paper": "50.0 ± 1.0"}],
}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rows": [{"name": "a", "paper": "1 | 2"}]}, "2 values of the paper for 1 columns"),
        ({"rows": [{"name": "a", "add": [1.0, 2.0]}]}, "2 values to add for 1 columns"),
        ({"rows": [{"name": "a"}, {"name": "a"}]}, "is repeated"),
        ({"rows": [{"name": "a", "paper": "about 3"}]}, "is not a value of a paper"),
        ({"rows": [{"name": "a", "mean_of": ["b"]}]}, "there is no cell"),
        ({"rows": [{"name": "a", "notes": "n"}]}, "notes"),
        ({"claims": [{"text": "t", "more": ["b", "a"], "than": [["pearl", "a"]]}]}, "there is no cell"),
        ({"claims": [{"text": "t", "more": ["pearl", "a"]}]}, "give one of `more`, `less`"),
        ({"colums": []}, "Extra inputs"),
    ],
)
def test_a_wrong_file_is_told(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        PaperTable.model_validate(SMALLEST | changes)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("51.97 ± 0.93", Printed("51.97 ± 0.93", 51.97, 0.93)),
        ("1,811.44", Printed("1,811.44", 1811.44)),
        ("-", None),
    ],
)
def test_values_as_printed(text: str, printed: Printed | None) -> None:
    assert Printed.read(text) == printed


# --------------------------------------------------------------------------------- the paper's values are the paper's

needs_source = pytest.mark.skipif(not SOURCE.is_file(), reason="needs the paper's source beside the repository")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?: ± \d+(?:\.\d+)?)?")


def environments(kind: str) -> list[str]:
    return re.findall(rf"\\begin{{{kind}\*?}}.*?\\end{{{kind}\*?}}", SOURCE.read_text(), re.DOTALL)


def rows_of(label: str) -> list[list[str]]:
    """The numbers of each line of a table, as printed."""
    (text,) = (one for one in environments("table") if f"\\label{{{label}}}" in one)
    text = re.sub(r"\\cite[pt]?\{[^}]*\}|\\(?:text|math)[a-z]+|\\underline|[${}]|\\:", " ", text).replace("\\pm", "±")
    actual = []
    for line in text.split("\\\\"):
        line = re.sub(r"(?<=\d),(?=\d{3})", "", re.sub(r"\s*±\s*", " ± ", line))
        actual.append([re.sub(r"\s+", " ", number) for number in NUMBER.findall(line)])
    return actual


def in_order(values: list[str], line: list[str]) -> bool:
    rest = iter(line)
    return all(value in rest for value in values)


@needs_source
@pytest.mark.parametrize("name", [name for name in TABLES if any(row.paper for row in read(name).rows)])
def test_every_value_stands_in_the_papers_table(name: str) -> None:
    table = read(name)
    printed = rows_of(table.label)
    for row in table.rows:
        values = [cell.text for cell in row.paper if cell]
        if name == "reinit":  # there the paper has a column where we have a row
            assert all(any(value in line for line in printed) for value in values)
        else:
            assert any(in_order(values, line) for line in printed), (row.name, values)


@needs_source
def test_a_changed_value_would_be_seen() -> None:
    assert not any(in_order(["51.97", "63.52"], line) for line in rows_of("tab:exemplar_non_exeplar"))
    assert any(in_order(["51.97", "63.51"], line) for line in rows_of("tab:exemplar_non_exeplar"))


@needs_source
def test_tables_and_figures_have_the_papers_numbers() -> None:
    for kind, title in (("table", "Table"), ("figure", "Figure")):
        labels = [re.findall(r"\\label\{([^}]*)\}", text)[-1] for text in environments(kind)]
        ours = {read(name).label: read(name).where for name in TABLES if read(name).where.startswith(title)}
        assert ours == {label: f"{title} {number}" for number, label in enumerate(labels, start=1)}


# ------------------------------------------------------------------------------------------------ counted on objects


def cells(name: str, row: str, size: spec.Size = "paper") -> dict[str, Cell]:
    filled = fill(read(name), size)
    return {id: cell for (of, id), cell in filled.cells.items() if of == row}


def test_fixed_ranks_have_the_papers_parameters() -> None:
    filled = fill(read("fixed_rank"), "paper")
    for rank in ("2", "4", "8", "16", "32"):
        for column, near in (("r18.parameters", 0.011), ("bsc.parameters", 0.0051), ("vit.parameters", 0.0051)):
            cell = filled.cells[rank, column]
            assert cell.counted and cell.paper
            assert cell.mean == pytest.approx(cell.paper.mean, abs=near)


def test_growth_is_complete_but_for_ranks_that_must_be_learnt() -> None:
    filled = fill(read("growth"), "paper")
    for (row, id), cell in filled.cells.items():
        if id.startswith("t") and not row.endswith("PEARL"):
            assert cell.counted
        if id.startswith("t") and row.endswith("isolation") and cell.paper:
            assert cell.mean == pytest.approx(cell.paper.mean, rel=2e-4, abs=0.0101)
    implied = [filled.cells["CIFAR-100, R18, PEARL", id].paper for id in ("r5", "r10", "r20")]
    assert [rank.mean for rank in implied if rank] == [  # the rank costs 23,241 a task of what is left for ranks
        pytest.approx((total * 1e6 - 11_168_832 - 513 * 100 - adapted * 9_600) / (adapted * 23_241), abs=0.01)
        for total, adapted in ((12.56, 4), (13.27, 9), (13.55, 19))
    ]


def test_ranks_that_depend_on_data_cannot_be_counted() -> None:
    assert parameters(Request("digits", (), False)) is None
    assert parameters(Request("digits", ("method=er",), False)) is None
    assert parameters(Request("digits", ("method.rank=fixed",), False)) is not None


# -------------------------------------------------------------------------------------- empty, partial, complete

TINY = ("backbone.width=4", "train.epochs=1", "train.phases.probe.epochs=1", "stream.per_class=8", "seed=0")[:-1]
MINE = PaperTable.model_validate(
    SMALLEST
    | {
        "rows_are": "method",
        "columns": [
            {"id": "final", "name": "A_T", "group": "digits", "metric": "class_il.final", "notes": "odd"},
            {"id": "parameters", "name": "parameters (M)", "metric": "parameters_million"},
            {"id": "task_il", "name": "task-IL | A_T", "metric": "task_il.final"},
            {"id": "ms", "name": "ms per image", "metric": "inference_ms"},
        ],
        "rows": [
            {"name": "pearl", "set": [], "paper": "50.0 ± 1.0 | 1.5 | - | -"},
            {"name": "finetune", "set": ["method=finetune"], "paper": "20.0 | - | - | -"},
            {"name": "other & co", "quoted": "A_1 et al.", "paper": "30.0 ± 2.0 | - | 40.0 | -"},
            {"name": "average", "mean_of": ["pearl", "finetune"]},
        ],
        "claims": [
            {"text": "PEARL ends above.", "more": ["pearl", "task_il"], "than": [["finetune", "task_il"]]},
            {
                "text": "PEARL ends above another, which is quoted.",
                "more": ["pearl", "final"],
                "than": [["other & co", "final"]],
            },
        ],
        "notes": {"odd": "An odd column."},
    }
)


def mine(seeds: int = 2) -> Filled:
    return fill(MINE, "paper", seeds, TINY)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs with which `MINE` is complete."""
    root = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEARL_RUNS", str(root / "runs"))
        patch.setenv("PEARL_DATA", str(root / "data"))
        for missing in mine().missing:
            config = missing.request.config.model_copy(update={"seed": missing.seed})
            measure(execute(config).path)
    return root / "runs"


@pytest.fixture
def complete(made: Path, monkeypatch: pytest.MonkeyPatch) -> Filled:
    monkeypatch.setenv("PEARL_RUNS", str(made))
    return mine()


def test_without_runs_only_the_paper_and_what_is_counted_are_there() -> None:
    filled = mine()
    assert filled.cells["pearl", "final"].values == ()
    assert filled.cells["finetune", "parameters"].counted
    assert len(filled.missing) == 4
    assert filled.ours == (1, 8)
    assert [verdict.holds for verdict in filled.verdicts] == ["open", "open"]
    assert "quoted from A_1 et al.: other & co" in page(filled)
    assert ["other & co", "quoted", "30.0 ± 2.0", "", "40.0", ""] in lines(filled)


def test_what_runs_were_made_with_is_told(complete: Filled) -> None:
    made = read_json(complete.cells["pearl", "final"].runs[0] / "environment.json")
    assert f"4 runs in {duration(sum(map(took, complete.runs)))}: {made['device']}, " in page(complete)
    assert f"torch {made['packages']['torch']}" in page(complete)


def took(run: Path) -> float:
    manifests = [read_json(file)["seconds"] for file in run.glob("tasks/*/manifest.json")]
    stages = read_json(run / "results.json")["stages"]
    return sum(sum(one.values()) for one in manifests) + sum(stage["evaluation_seconds"] for stage in stages)


def test_seconds_of_a_phase_are_a_mean_over_tasks(complete: Filled) -> None:
    run = complete.cells["pearl", "final"].runs[0]
    took = [read_json(file)["seconds"] for file in run.glob("tasks/*/manifest.json")]
    probes = [one["probe"] for one in took if "probe" in one]
    assert 0 < len(probes) < len(took)  # none in the task that trains the reference
    assert measured(read_run(run), "seconds.probe") == pytest.approx(sum(probes) / len(probes))
    assert measured(read_run(run), "seconds.allocate") is None


def test_half_the_seeds(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEARL_RUNS", str(made))
    filled = mine(seeds=3)
    cell = filled.cells["pearl", "final"]
    assert (cell.n, len(cell.missing)) == (2, 1)
    assert "(n=2 of 3)" in page(filled)
    assert filled.cells["average", "final"].values == ()  # a mean over rows of unlike seeds would mislead


def test_an_unfinished_run_counts_as_missing(tmp_path: Path, made: Path) -> None:
    (waiting, *_) = mine().missing
    execute(waiting.request.config, stop_after=1)
    assert waiting.path.is_dir()
    assert waiting.path in [missing.path for missing in mine().missing]


@pytest.mark.usefixtures("forks")
def test_a_damaged_run_is_as_good_as_missing_and_told(tmp_path: Path, cli: Any) -> None:
    (waiting, *_) = mine().missing
    waiting.path.mkdir(parents=True)
    (waiting.path / "results.json").write_text("{")
    filled = mine()
    assert waiting.path in [missing.path for missing in filled.missing]
    assert f"counted as missing: {waiting.path / 'results.json'}: damaged" in page(filled)
    alone = {key: replace(cell, missing=(waiting,)) for key, cell in filled.cells.items() if cell.missing}
    assert [outcome.state for outcome in run_missing(replace(filled, cells=alone))] == ["failed"]


def test_a_run_that_cannot_be_measured_fails_alone(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Path(shutil.copytree(made, tmp_path / "runs", dirs_exist_ok=True))
    monkeypatch.setenv("PEARL_RUNS", str(runs))
    for file in runs.glob("*/inference.json"):
        file.unlink()
    filled = mine()
    broken, whole = filled.missing[0].path, filled.missing[1].path
    (next((broken / "tasks").iterdir()) / "weights.safetensors").write_bytes(b"")
    outcomes = run_missing(filled)
    assert [outcome.run for outcome in outcomes if outcome.state == "failed"] == [broken]
    assert (whole / "inference.json").is_file()


def test_values_are_those_of_the_runs(complete: Filled) -> None:
    assert complete.missing == []
    for row in ("pearl", "finetune"):
        cell = complete.cells[row, "final"]
        summaries = [Run.open(path).summary for path in cell.runs]
        assert cell.values == tuple(one["class_il.final"] for one in summaries)
        assert cell.mean == pytest.approx(statistics.mean(cell.values))
        assert cell.std == pytest.approx(statistics.stdev(cell.values))
        assert complete.cells[row, "ms"].mean > 0
    learnt, counted = complete.cells["pearl", "parameters"], complete.cells["finetune", "parameters"]
    assert not learnt.counted
    assert counted.mean == Run.open(complete.cells["finetune", "final"].runs[0]).summary["parameters_million"]
    means = [complete.cells[row, "final"].mean for row in ("pearl", "finetune")]
    assert complete.cells["average", "final"].values == tuple(means)


def test_difference_in_standard_errors(complete: Filled) -> None:
    cell = complete.cells["pearl", "final"]
    a, b = cell.values
    error = math.sqrt(((a - b) ** 2 / 2) / 2 + 1.0**2 / 3)
    assert complete.difference(cell) == (pytest.approx((a + b) / 2 - 50), pytest.approx(((a + b) / 2 - 50) / error))
    assert complete.difference(complete.cells["other & co", "final"]) == (None, None)


@pytest.mark.parametrize(
    ("ours", "other", "errors"),
    [
        ((11.0, 3.0, 9), (10.0, 4.0, 16), 1 / math.sqrt(1 + 1)),
        ((11.0, None, 1), (10.0, 2.0, 4), 1.0),
        ((11.0, None, 1), (10.0, None, 3), None),
        ((11.0, 0.0, 1), (10.0, 0.0, 1), None),
    ],
)
def test_standard_errors(ours: Any, other: Any, errors: float | None) -> None:
    assert difference(ours, other) == (1.0, errors if errors is None else pytest.approx(errors))


def test_settings_that_are_not_the_papers_are_not_held_against_it(complete: Filled) -> None:
    smaller = Filled(complete.table, "cpu", 2, complete.cells)
    assert smaller.difference(complete.cells["pearl", "final"]) == (None, None)


# ------------------------------------------------------------------------------------------------------- claims


def claimed(a: Cell, b: Cell) -> str:
    claim = spec.Claim(text="a is above b", more=("a", "x"), than=[("b", "x")])
    return verdict(claim, {("a", "x"): a, ("b", "x"): b}, {"x": "X"}).holds


def test_verdicts() -> None:
    high, low, wide = Cell(values=(10.0, 10.1)), Cell(values=(5.0, 5.1)), Cell(values=(0.0, 20.0))
    assert claimed(high, low) == "yes"
    assert claimed(low, high) == "no"
    assert claimed(wide, low) == "within noise"
    assert claimed(Cell(values=(10.0,)), low) == "within noise"  # one seed does not tell
    assert claimed(Cell(), low) == "not here"
    waiting = spec.Request("digits", (), False)
    assert claimed(Cell(values=(10.0, 10.1), missing=(Missing(waiting, 2),)), low) == "open"
    assert claimed(Cell(values=(10.0, 10.3)), Cell(values=(9.0, 9.4))) == "within noise"  # 4 standard errors, 2 seeds
    assert claimed(Cell(values=(2.0,), counted=True), Cell(values=(1.0,), counted=True)) == "yes"


RIVALS = spec.Claim(text="a is below all", less=("a", "x"), than=[("b", "x"), ("c", "x"), ("d", "x")])


def against(**others: Cell) -> tuple[str, str]:
    cells = {(row, "x"): others.get(row, Cell(values=(5.0, 5.1))) for row in "abcd"}
    actual = verdict(RIVALS, {**cells, ("a", "x"): Cell(values=(1.0, 1.01))}, {"x": "X"})
    return actual.holds, actual.because


def test_a_claim_of_several_rivals() -> None:
    waiting = Cell(missing=(Missing(spec.Request("digits", (), False), 0),))
    lower = Cell(values=(0.0, 0.0001))
    assert against()[0] == "yes"
    assert against(b=Cell(values=(1.0, 1.1)))[0] == "within noise"
    holds, because = against(b=waiting)
    assert holds == "open" and because.startswith("-4.0") and because.endswith("runs are missing: b")
    assert against(b=waiting, c=lower)[0] == "no", "one rival refutes it, whatever the missing runs will say"
    holds, because = against(c=Cell())
    assert holds == "yes" and because.endswith("no run at this size: c")
    assert against(b=Cell(), c=Cell(), d=Cell())[0] == "not here"
    assert against(b=Cell(), c=waiting, d=Cell())[0] == "open"


def test_vectors_are_compared_by_their_means_or_by_their_unevenness() -> None:
    low = Cell(values=(np.array([1.0, 9.0]), np.array([1.0, 9.1])), labels=("s", "t"))
    high = Cell(values=(np.array([10.0, 10.0]), np.array([10.0, 10.1])), labels=("s", "t"))
    for by, holds in (("mean", "no"), ("unevenness", "yes")):
        claim = spec.Claim(text="more", more=("a", "x"), than=[("b", "x")], measure=by)
        assert verdict(claim, {("a", "x"): low, ("b", "x"): high}, {"x": "X"}).holds == holds


def test_a_claim_that_nothing_can_decide_is_refused() -> None:
    for wrong in ({}, {"more": ("a", "x")}, {"rises": ("a", "x"), "peaks": ("a", "x")}, {"than": [("a", "x")]}):
        with pytest.raises(ValueError, match="give one of `more`, `less`"):
            spec.Claim(text="All is well.", **wrong)


def printed(table: spec.PaperTable, key: spec.CellKey) -> float | None:
    (row,) = [row for row in table.rows if row.name == key[0]]
    at = [column.id for column in table.columns].index(key[1])
    value = row.paper[at] if row.paper else None
    return value.mean if value else None


@pytest.mark.parametrize("name", spec.names())
def test_the_papers_own_values_fit_its_claims(name: str) -> None:
    table = read(name)
    for claim in table.claims:
        key = claim.more or claim.less
        for other in claim.than if key else ():
            mine, theirs = printed(table, key), printed(table, other)
            if mine is not None and theirs is not None:
                assert (mine > theirs) == bool(claim.more), (claim.text, other)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        *((name, f"PEARL ({net})") for name in ("benchmark", "necil") for net in ("R18", "BSC")),
        ("imagenet_r", "PEARL (ViT)"),
        ("adapters", "PEARL"),
        ("prompts", "PEARL"),
        ("inference", "PEARL (ViT)"),
    ],
)
def test_claims_are_as_wide_as_the_papers(name: str, row: str) -> None:
    """In every column against every baseline that has a value there, but for those that its own values put above."""
    table = read(name)
    ours = {other.name for other in table.rows if other.name.startswith("PEARL")} | {"JOINT"}
    for column in table.columns:
        if printed(table, (row, column.id)) is None:
            continue
        (claim,) = [claim for claim in table.claims if (claim.more or claim.less) == (row, column.id)]
        there = {other.name for other in table.rows if printed(table, (other.name, column.id)) is not None} - ours
        left = there - {other for other, _ in claim.than}
        assert all(f"but {other}" in claim.text for other in left) and len(left) <= 1, (column.id, left)


def test_a_spread_is_of_the_means() -> None:
    assert spread([[1.0, 1.0], [4.0, 4.0], [9.0, 9.0]]) == "no"
    assert spread([[1.0, 1.0], [1.01, 1.01], [1.02, 1.02]]) == "yes"
    assert spread([[1.0, 1.0], [2.0, 2.0], [3.5, 3.5]]) == "within noise"
    assert spread([[1.0, 17.0], [4.0, 20.0], [9.0, 25.0]]) == "within noise"  # seeds vary as much
    assert spread([[1.0], [4.0], [9.0]]) == "within noise"  # one seed does not tell
    claim = spec.Claim(text="alike", spread=[("a", "x"), ("b", "x")])
    actual = verdict(claim, {("a", "x"): Cell(values=(1.0, 3.0)), ("b", "x"): Cell(values=(4.0, 6.0))}, {"x": "X"})
    assert f"{statistics.stdev([2.0, 5.0]):.2f} over 2, against 1; seeds alone give 1.00" in actual.because


def spread(values: list[list[float]]) -> str:
    cells = {(str(row), "x"): Cell(values=tuple(seeds)) for row, seeds in enumerate(values)}
    return verdict(spec.Claim(text="alike", spread=[*cells]), cells, {"x": "X"}).holds


@settings(deadline=None)
@given(st.lists(st.floats(0, 100), min_size=2, max_size=5), st.lists(st.floats(0, 100), min_size=2, max_size=5))
def test_chance_is_welchs(a: list[float], b: list[float]) -> None:
    one, other = Cell(values=tuple(a)), Cell(values=tuple(b))
    assume(one.std > 1e-3 or other.std > 1e-3)
    known = [part for x in (a, b) for part in (statistics.mean(x), statistics.stdev(x), len(x))]
    welch = stats.ttest_ind_from_stats(*known, equal_var=False).pvalue
    assert chance(one.sample, other.sample) == pytest.approx(welch, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("seeds", [2, 3])
def test_seeds_alone_seldom_decide(seeds: int) -> None:
    """Seven rows and five orders that do not differ, a thousand times."""
    rng = np.random.default_rng(seeds)
    decided = {"means": 0, "spread": 0}
    for _ in range(1000):
        cells = {(str(row), "x"): Cell(values=tuple(rng.normal(50, 2, seeds))) for row in range(7)}
        first, *others = cells
        claim = spec.Claim(text="more than all", more=first, than=others)
        decided["means"] += verdict(claim, cells, {"x": "X"}).holds in ("yes", "no")
        claim = spec.Claim(text="alike", spread=others, below=0.01)
        decided["spread"] += verdict(claim, cells, {"x": "X"}).holds == "no"
    assert decided["means"] <= 70
    assert decided["spread"] <= 40  # half of the level: too small is no mistake here


@pytest.mark.parametrize(
    ("seeds", "holds"),
    [
        ([[1, 2, 2, 5], [1, 2, 3, 5], [1, 2, 2.5, 5]], "yes"),
        ([[5, 2, 2, 1], [5, 3, 2, 1], [5, 2.5, 2, 1]], "no"),
        ([[1, 2, 2, 5], [5, 2, 2, 1]], "within noise"),
        ([[1, 2, 2, 5]], "within noise"),
    ],
)
def test_a_vector_that_rises(seeds: list[list[float]], holds: str) -> None:
    claim = spec.Claim(text="deeper is higher", rises=("a", "x"))
    values = tuple(np.array(vector, dtype=float) for vector in seeds)
    assert verdict(claim, {("a", "x"): Cell(values=values, labels=tuple("abcd"))}, {"x": "X"}).holds == holds


@pytest.mark.parametrize(
    ("vector", "holds"), [([1, 1, 5, 5, 2, 2], "yes"), ([1, 1, 2, 2, 5, 5], "no"), ([5, 5, 2, 2, 1, 1], "no")]
)
def test_a_vector_that_peaks(vector: list[float], holds: str) -> None:
    claim = spec.Claim(text="highest in the middle", peaks=("a", "x"))
    values = tuple(np.array(vector) + shift for shift in (0.0, 0.1, 0.2))
    assert verdict(claim, {("a", "x"): Cell(values=values, labels=tuple("abcdef"))}, {"x": "X"}).holds == holds


# ------------------------------------------------------------------------------------------------------ formats


class Rows(HTMLParser):
    """The cells of the first table, and all links to directories."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.links: list[str] = []
        self.inside = self.done = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr" and not self.done:
            self.rows.append([])
        self.inside = tag in {"td", "th"} and not self.done
        if self.inside:
            self.rows[-1].append("")
        address = dict(attrs).get("href", "")
        if tag == "a" and not address.startswith(("data:", "#")):
            self.links.append(address)

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.done |= tag == "table"
        self.inside &= tag not in {"td", "th"}


def body(filled: Filled, output: Path) -> list[list[str]]:
    """The lines of a written table, as they were before they were written."""
    text = write(filled, output).read_text()
    if output.suffix == ".html":
        return [["" if cell == "–" else cell for cell in row] for row in Rows(text).rows[1:]]
    if output.suffix == ".md":
        rows = [line for line in text.split("\n\n")[2].splitlines() if line.startswith("|")][2:]
        return [[cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    inside = text.split("\\midrule\n")[1].split("\\bottomrule")[0]
    for escaped, letter in {r"$\pm$": "±", r"\&": "&", r"\_": "_"}.items():
        inside = inside.replace(escaped, "\0" if letter == "&" else letter)
    return [[cell.strip().replace("\0", "&") for cell in row.split(" & ")] for row in inside.split("\\\\\n") if row]


@pytest.mark.parametrize("ending", [".md", ".html", ".tex"])
def test_formats_parse_back(complete: Filled, tmp_path: Path, ending: str) -> None:
    assert body(complete, tmp_path / f"mine{ending}") == lines(complete)


def test_csv_has_every_digit(complete: Filled, tmp_path: Path) -> None:
    rows = [*csv.DictReader(io.StringIO(write(complete, tmp_path / "mine.csv").read_text()))]
    assert len(rows) == len(complete.cells)
    first = rows[0]
    cell = complete.cells["pearl", "final"]
    assert float(first["ours"]) == cell.mean
    assert float(first["ours std"]) == cell.std
    assert float(first["standard errors"]) == complete.difference(cell)[1]
    assert [Path(tmp_path, run).resolve() for run in first["runs"].split()] == [path.resolve() for path in cell.runs]


@pytest.mark.parametrize("ending", [".md", ".html"])
def test_links_lead_to_the_runs(complete: Filled, ending: str) -> None:
    above = Path(os.path.commonpath([path.resolve() for path in complete.runs]))
    text = write(complete, above / f"mine{ending}").read_text()
    actual = Rows(text).links if ending == ".html" else re.findall(r"\]\(([^)]*)\)", text)
    assert {Path(above, link).resolve() for link in actual} == {path.resolve() for path in complete.runs}


@pytest.mark.parametrize("ending", [".md", ".html"])
def test_no_link_leaves_the_folder_of_the_page(complete: Filled, tmp_path: Path, ending: str) -> None:
    """Runs stay behind when a page is committed or sent: elsewhere they are named, not linked."""
    (tmp_path / "pages").mkdir()
    text = write(complete, tmp_path / "pages" / f"mine{ending}").read_text()
    assert all(path.name in text for path in complete.runs)
    assert not re.findall(r"""\]\([^)]*\)|href=["'](?!#|data:)[^"']*""", text)


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_written_in_every_format_without_a_run(name: str, tmp_path: Path) -> None:
    filled = fill(read(name), "cpu", 2)
    assert read(name).title in page(filled)
    for ending in FORMATS:
        assert write(filled, tmp_path / f"{name}{ending}").stat().st_size > 0


FIGURE = PaperTable.model_validate(
    SMALLEST
    | {
        "kind": "figure",
        "values": "A_T (%)",
        "over": "tasks",
        "columns": [
            {"id": "tasks", "name": "task-IL", "metric": "task_il.each"},
            {"id": "layers", "name": "rank", "metric": "rank.layers"},
        ],
        "rows": [{"name": "PEARL", "set": []}],
    }
)


def test_figures_are_of_the_runs(made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PEARL_RUNS", str(made))
    filled = fill(FIGURE.model_copy(update={"values": ""}), "paper", 2, TINY)
    runs = [Run.open(path) for path in filled.cells["PEARL", "layers"].runs]
    ranks = [[layer["rank"] for layer in run.manifests[-1]["layers"]] for run in runs]
    expected = [statistics.mean(both) for both in zip(*ranks, strict=True)]
    assert filled.cells["PEARL", "layers"].mean.tolist() == pytest.approx(expected)
    assert len(filled.cells["PEARL", "tasks"].labels) == 5
    html = write(filled, tmp_path / "figure.html").read_text()
    assert html.count("<svg") == 2
    assert f"{expected[0]:.2f}" in page(filled)


def test_a_curve_over_columns(complete: Filled, tmp_path: Path) -> None:
    columns = [column for column in MINE.columns if column.id in {"final", "task_il"}]
    columns = [column.model_copy(update={"at": float(at)}) for at, column in zip((5, 10), columns, strict=True)]
    drawn = MINE.model_copy(update={"columns": columns, "values": "accuracy (%)", "over": "tasks", "kind": "figure"})
    html = write(Filled(drawn, "paper", 2, complete.cells), tmp_path / "figure.html").read_text()
    assert html.count("<svg") == 1
    assert "pearl (n=2)" in html


# ------------------------------------------------------------------------------------------------ the command line


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["grwth"], "unknown table 'grwth'; did you mean 'growth'? (`pearl table list`)"),
        (["growth", "--size", "huge"], "unknown size 'huge'; choose from cpu, paper, schedule, smoke"),
        (["growth", "-o", "growth.pdf"], "growth.pdf: give the table a name that ends in .md, .html, .csv, .tex"),
        (["folds", "backbone.wdth=3"], "backbone.wdth: unknown key; did you mean 'width'?"),
        (["list", "-o", "list.md"], "table list: prints names only; give the name of a table to run or write it"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], complaint: str, cli: Any) -> None:
    _, said = cli("table", *arguments, code=2)
    assert said == f"pearl: {complaint}\n"


@pytest.mark.usefixtures("forks")
def test_run_missing_then_already_done(tmp_path: Path, cli: Any) -> None:
    """The whole way, with small files in the official layout and a narrow network."""
    layouts.cifar100_npz(tmp_path / "data", classes=100, per_class=3)
    narrow = ["backbone.width=4", "engine.channels_last=false", "stream.classes=10"]
    command = ["folds", *narrow, "--size", "smoke", "--seeds", "1", "-q"]
    out, _ = cli("table", *command)
    assert "1 of 16" not in out and "4 runs missing" in out
    output = tmp_path / "folds.html"
    out, _ = cli("table", *command, "--run-missing", "-o", str(output))
    assert "16 of 16 cells complete, 0 runs missing" in out
    assert output.is_file()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    again, _ = cli("table", *command, "--run-missing")
    assert again.splitlines()[:3] == out.splitlines()[:3]
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}


@pytest.mark.usefixtures("forks")
def test_a_run_that_fails_is_told(tmp_path: Path, cli: Any) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cifar100.npz").write_bytes(b"no archive")
    _, said = cli(
        "table",
        "task_resources_runs",
        "data.path=cifar100.npz",
        "--size",
        "smoke",
        "--run-missing",
        "-q",
        code=1,
    )
    assert "3 runs failed" in said


@pytest.mark.parametrize("name", ["benchmark", "imagenet_r", "necil", "rank_rules"])
def test_pearl_has_a_second_row_of_the_same_sub_networks(name: str) -> None:
    rows = {row.name: row for row in read(name).rows}
    ends = ", class statistics"
    pairs = [(rows[one.removesuffix(ends)], rows[one]) for one in rows if one.endswith(ends)]
    assert pairs
    for row, second in pairs:
        method, other = (dict(Request("digits", tuple(one.set or ()), False).config.method) for one in (row, second))
        assert method.pop("classifier") == {"name": "heads"}
        assert other.pop("classifier").items() >= {"name": "statistics", "train": "all"}.items()
        assert method == other
        assert not second.paper


def test_the_list_names_all(monkeypatch: pytest.MonkeyPatch, made: Path) -> None:
    text = listing("cpu", 2)
    assert all(f"\n{name} " in text for name in TABLES)


def test_the_same_from_python(tmp_path: Path) -> None:
    filled = pearl.table("pretraining", size="cpu", seeds=1, output=tmp_path / "t.md", train={"lr": 0.01})
    assert [missing.request.config.train.lr for missing in filled.missing] == [0.01, 0.01]
    assert (tmp_path / "t.md").is_file()
    with pytest.raises(ConfigError, match="unknown table"):
        pearl.table("nothing")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("folds", "All are runs of table-resnet18."),
        (
            "reinit",
            "R18, Seq-CIFAR100 (5T): runs of table-resnet18. ViT, ImageNet-R (10T): runs of table-deit_tiny.",
        ),
        ("task_identification", "All are runs of table-resnet18, table-deit_tiny."),  # as the row has it
    ],
)
def test_at_a_smaller_size_a_table_names_its_recipes(name: str, said: str) -> None:
    assert about(pearl.table(name, size="cpu", seeds=1))[-1] == said
    assert "runs of" not in " ".join(about(pearl.table(name, seeds=1)))


@pytest.mark.parametrize("name", ["isolation_tasks", "rank_rules"])
def test_these_tables_miss_no_method(name: str) -> None:
    assert [row.name for row in spec.read(name).rows if row.set is None] == []


def test_the_tables_of_prompts_have_runs_for_all_prompts() -> None:
    assert [row.name for row in spec.read("prompts").rows if row.set is None] == []
    for name in ("imagenet_r", "inference"):
        (row,) = [row for row in spec.read(name).rows if row.name == "DualPrompt"]
        assert row.set == ["method=dualprompt"]


def test_the_tables_of_adapters_have_runs_for_what_there_is() -> None:
    for table, row, method in (
        ("imagenet_r", "EASE", "ease"),
        ("imagenet_r", "TSVD", "loranpac"),
        ("adapters", "Adam-ssf", "aper"),
        ("adapters", "SSIAT", "ssiat"),
        ("inference", "Adam-ssf", "aper"),
    ):
        (actual,) = [one for one in spec.read(table).rows if one.name == row]
        assert actual.set == [f"method={method}"]
