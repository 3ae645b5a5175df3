"""The page of `pearl report`: its numbers are those of the run, nothing in a name can break it, it needs no network."""

import base64
import csv
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml

import layouts
from pearl.evaluation import metrics
from pearl.lifecycle.runs import Run, execute
from pearl.reports import compared, plots
from pearl.reports import page as page_of
from pearl.reports.compared import compare, groups
from pearl.reports.html import Table, shown
from pearl.reports.page import about_run, page, write
from pearl.reports.records import metric_title, read, read_all
from pearl.settings.config import load_config
from photos import learn

pytestmark = pytest.mark.slow

SMALL = [
    "backbone={name: convnet, width: 4}",
    "train.epochs=1",
    "train.phases.probe.epochs=2",
    "stream.per_class=8",
    "stream.test_per_class=4",
    "stream.tasks=[4,3,3]",
]
KINDS = {
    "seed0": ([], None),
    "seed1": (["seed=1"], None),
    "isolation": (["method=isolation"], None),
    "unfinished": (["seed=2"], 1),
}
EVIL = '<script>alert("1")</script> & \'$x$\' "quoted"'


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Run]:
    """Runs that all tests look at; they must not change them."""
    root = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEARL_RUNS", str(root / "runs"))
        patch.setenv("PEARL_DATA", str(root / "data"))
        return {
            name: execute(load_config("digits", [*SMALL, *o]), stop_after=stop) for name, (o, stop) in KINDS.items()
        }


TINY = {"images": {"size": 8, "pad": 1}, "backbone": {"width": 4}, "train": {"epochs": 2}}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model of two tasks, the second trained longer; tests must not change it."""
    root = tmp_path_factory.mktemp("model")
    kinds = {"fruit": ("apple", "pear"), "roots": ("beet", "leek", "swede")}
    for name, classes in kinds.items():
        layouts.image_folder(root / name, splits={"": 4}, classes=classes, size=8)
    learn(root / "shop", root / "fruit", backbone="resnet18", overrides=TINY, device="cpu")
    learn(root / "shop", root / "roots", overrides={"train": {"epochs": 3}}, device="cpu")
    return root / "shop"


@pytest.fixture(scope="module")
def shop(model) -> "Reader":
    """The page about the model."""
    return Reader(page([read(model)]))


@pytest.fixture
def own_model(model, tmp_path) -> Path:
    """A copy of the model that a test may damage."""
    return Path(shutil.copytree(model, tmp_path / "own_model"))


@pytest.fixture(scope="module")
def one(made) -> "Reader":
    """The page about one run."""
    return Reader(page([read(made["seed0"].path)]))


@pytest.fixture(scope="module")
def side_by_side(made) -> str:
    """The page about all of them."""
    return page(read_all([run.path for run in made.values()]))


@pytest.fixture
def run_copy(made, tmp_path) -> Path:
    """A copy of a run that a test may damage."""
    return Path(shutil.copytree(made["seed0"].path, tmp_path / "own"))


@pytest.fixture
def cli(cli):
    """What `pearl` says: its output, or if it fails its complaint."""
    return lambda *arguments, code=0: cli(*arguments, code=code)[code != 0]


class Reader(HTMLParser):
    """What a browser would see: tags, text outside of <style>, CSV files by name, ids."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    @property
    def files(self) -> dict[str, list[list[str]]]:
        actual = {}
        for _, attributes in self.tags:
            if name := attributes.get("download"):
                data = str(attributes["href"]).removeprefix("data:text/csv;charset=utf-8;base64,")
                actual[name] = list(csv.reader(io.StringIO(base64.b64decode(data).decode())))
        return actual


def edit(file: Path, change) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


# ---------------------------------------------------------------------------------------------------- numbers


def test_metrics_are_those_of_the_run(made, one):
    run, files = made["seed0"], one.files
    table = files[f"metrics-of-{run.path.name}.csv"]
    values = {row[2]: float(row[1] or "nan") for row in table[1:]}
    expected = run.summary | {"mean_rank": run.mean_rank}
    assert values.keys() == expected.keys()
    np.testing.assert_array_equal([values[key] for key in expected], list(expected.values()))  # every digit, NaN too


def test_tables_are_those_of_the_files(made, one):
    run, files = made["seed0"], one.files
    for scenario, title in (("class_il", "class-il"), ("task_il", "task-il")):
        rows = files[f"{title}-accuracy-of-each-task-after-each-task.csv"][1:]
        A = metrics.accuracy_matrix(run.counts, scenario)
        np.testing.assert_array_equal([[float(cell or "nan") for cell in row[1:]] for row in rows], A)
    stages = run.results["stages"]
    grown = files["growth-of-the-model-million-parameters.csv"][1:]
    assert [float(row[1]) for row in grown] == [stage["parameters"] / 1e6 for stage in stages]
    assert [float(row[2]) for row in grown] == [stage["isolation_parameters"] / 1e6 for stage in stages]
    for key in ("threshold", "rank"):
        title = {"threshold": "threshold-of-each-layer.csv", "rank": "selected-rank-of-each-layer.csv"}[key]
        columns = zip(*files[title][1:], strict=True)
        next(columns)  # names
        for manifest, column in zip(run.manifests[1:], columns, strict=True):
            assert [float(cell) for cell in column] == [layer[key] for layer in manifest["layers"]]
    full = [float(row[1]) for row in files["full-rank-of-each-layer.csv"][1:]]
    assert full == [layer["full_rank"] for layer in run.manifests[1]["layers"]]
    shares = files["share-of-the-added-parameters.csv"][1:]
    assert sum(float(row[1]) for row in shares) == pytest.approx(100)
    assert sum(int(row[2]) for row in shares) == stages[-1]["parameters"] - read(run.path).start
    stored = [int(row[2]) for row in files["share-of-the-stored-bytes.csv"][1:]]
    assert stored == [(folder / "weights.safetensors").stat().st_size for folder in sorted(run.path.glob("tasks/*"))]


def test_losses_are_those_of_the_events(made, one):
    run, files = made["seed0"], one.files
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    for phase in ("reference", "probe", "adapt"):
        losses = [e["loss"] for e in events if e["event"] == "epoch" and e["phase"] == phase]
        assert losses and [float(row[3]) for row in files[f"training-loss-phase-{phase}.csv"][1:]] == losses


def test_numbers_are_shown_in_the_page(made, one):
    for key in ("class_il.final", "task_il.average", "growth"):
        assert shown(made["seed0"].summary[key]) in one.text


def test_mean_and_deviation_over_seeds(made, side_by_side):
    records = read_all([run.path for run in made.values()])
    pearl_group, isolation = groups(records)
    assert len(pearl_group.runs) == 3 and len(pearl_group.complete) == 2  # an unfinished one does not count
    both = [made["seed0"].summary, made["seed1"].summary]
    rows = Reader(side_by_side).files["mean-and-standard-deviation-over-seeds.csv"]
    values = {row[0]: row[1:] for row in rows}
    assert values["complete runs (n)"] == ["2", "", "1", ""]
    for key in ("class_il.final", "task_il.final", "growth"):
        mean, std, alone, none = values[metric_title(key)]
        assert float(mean) == np.mean([summary[key] for summary in both])
        assert float(std) == np.std([summary[key] for summary in both], ddof=1)
        assert float(alone) == made["isolation"].summary[key]
        assert none == ""  # one run has no deviation
    assert isolation.statistics("mean_rank") == (None, None)


def test_stage_by_stage_over_seeds(made):
    chapter = compare(read_all([made[name].path for name in ("seed0", "seed1")]))
    tables = {figure.table.file: figure.table for part in chapter.parts for figure in part.figures}
    table = np.array(tables["class-il-mean-over-seeds.csv"].rows, dtype=float)
    curves = [metrics.stage_accuracy(metrics.accuracy_matrix(made[n].counts, "class_il")) for n in ("seed0", "seed1")]
    np.testing.assert_array_equal(table[:, 1], np.mean(curves, axis=0))
    np.testing.assert_array_equal(table[:, 2], np.std(curves, axis=0, ddof=1))


def test_the_paper_beside_the_run(run_copy):
    config = yaml.safe_load((run_copy / "config.yaml").read_text())
    config["expected"] = {"class_il.final": {"mean": 43.21, "std": 0.5, "where": "Table 1"}}
    (run_copy / "config.yaml").write_text(yaml.safe_dump(config))
    rows = Reader(page([read(run_copy)])).files["metrics-of-own.csv"]
    assert rows[1][3:] == ["43.21", "0.5", "Table 1"]


# ------------------------------------------------------------------------------------------- states of a run


def test_an_unfinished_run_says_so(made, one):
    text = Reader(page([read(made["unfinished"].path)])).text
    assert "Unfinished, 1 of 3 tasks" in text
    assert "Unfinished" not in one.text


def test_no_ranks_where_there_are_none(made, one):
    assert "Rank allocation" in one.text
    for name in ("isolation", "unfinished"):  # after its first task the reference has no adapter
        assert "Rank allocation" not in page([read(made[name].path)])


def test_events_that_end_in_the_middle(run_copy):
    file = run_copy / "events.jsonl"
    whole = read(run_copy).epochs
    file.write_text(file.read_text() + '{"time": "2026-01-01T00:00:00+00:00", "event": "epo')
    assert read(run_copy).epochs == whole
    file.write_bytes(file.read_bytes()[: len(file.read_bytes()) // 2])
    assert 0 < len(read(run_copy).epochs) < len(whole)
    assert page_of._losses(read(run_copy), "m")
    file.unlink()
    assert read(run_copy).epochs == []
    assert "Training loss" not in page([read(run_copy)])


def test_what_was_trained_twice_counts_once(run_copy):
    file = run_copy / "events.jsonl"
    whole, lines = read(run_copy).epochs, file.read_text().splitlines()
    events = [json.loads(line) for line in lines]
    last = max(i for i, event in enumerate(events) if event["event"] == "task")
    assert [event["event"] for event in events[last:]][:5] == ["task", "phase", "epoch", "epoch", "phase"]
    first_epochs = [json.dumps(events[i] | {"loss": 9}) for i in (last + 2, last + 3)]
    begun = [*lines[: last + 2], *first_epochs]  # killed after these
    file.write_text("\n".join([*begun, *lines[last:]]) + "\n")  # then from the start
    assert read(run_copy).epochs == whole

    on = json.dumps(events[last + 1] | {"done": 1})
    cut = [*lines[: last + 3], first_epochs[1]]
    file.write_text("\n".join([*cut, lines[last], on, *lines[last + 3 :]]) + "\n")  # then from within the second epoch
    assert read(run_copy).epochs == whole

    on = json.dumps(events[last + 1] | {"done": 2})
    file.write_text(
        "\n".join([*lines[: last + 5], lines[last], on, *lines[last + 4 :]]) + "\n"
    )  # from the second phase
    assert read(run_copy).epochs == whole


# ------------------------------------------------------------------------------------------------------ a model


def test_a_model_shows_what_its_files_hold(model, shop):
    files, manifests = shop.files, [json.loads(file.read_text()) for file in sorted(model.glob("tasks/*/*.json"))]
    assert "shop (model, 2 tasks)" in shop.text
    start = json.loads((model / "reference" / "manifest.json").read_text())["parameters"]
    first, second = manifests
    added = [first["parameters"] - start, second["parameters"] - first["parameters"]]
    folders = sorted((model / "tasks").iterdir())
    stored = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in folders]
    assert stored == [first["bytes"], second["bytes"]], "the statistics before the last task are stored, for undo"
    assert files["tasks-of-shop.csv"][1:] == [
        ["1", "fruit", "8", str(added[0]), str(stored[0]), "apple, pear"],
        ["2", "roots", "12", str(added[1]), str(stored[1]), "beet, leek, swede"],
    ]
    for key, name in (("threshold", "threshold"), ("rank", "selected-rank"), ("full_rank", "full-rank")):
        rows = files[f"{name}-of-each-layer.csv"][1:]
        assert [float(row[1]) for row in rows] == [layer[key] for layer in second["layers"]]
    grown = [[float(cell) * 1e6 for cell in row[1:]] for row in files["growth-of-the-model-million-parameters.csv"][1:]]
    sizes = [[manifest["parameters"], manifest["isolation_parameters"]] for manifest in manifests]
    np.testing.assert_allclose(grown, sizes, rtol=1e-12)
    shares = [float(row[1]) for row in files["share-of-the-stored-bytes.csv"][1:]]
    assert sum(shares) == pytest.approx(100)
    assert shares[0] / shares[1] == pytest.approx(stored[0] / stored[1])
    values = {row[2]: float(row[1]) for row in files["metrics-of-shop.csv"][1:]}
    assert values.keys() == {"parameters_million", "growth", "mean_rank"}
    assert values["growth"] == second["parameters"] / second["isolation_parameters"]
    assert len(files["training-loss-phase-reference.csv"]) == 1 + 2
    assert len(files["training-loss-phase-adapt.csv"]) == 1 + 3
    assert any("device" in row for row in files["environment-of-shop.csv"])


def test_a_model_says_what_is_left_out(shop):
    assert "`pearl evaluate MODEL --data FOLDER` measures them" in shop.text
    assert "Unfinished" not in shop.text and "was cut off" not in shop.text
    assert "Confusion between tasks" not in shop.text and "accuracy of each task" not in shop.text


def test_settings_of_a_model(shop):
    assert "method:\n  name: pearl" in shop.text and "format:" not in shop.text
    table = shop.files["training-that-differs-between-tasks.csv"]
    assert table == [["task", "name", "train.epochs"], ["1", "fruit", "2"], ["2", "roots", "3"]]


def test_isolation_is_the_same_in_manifests_and_results(made):
    for name in ("seed0", "isolation", "unfinished"):
        stages = made[name].results["stages"]
        recorded = [manifest["isolation_parameters"] for manifest in made[name].manifests]
        assert recorded == [stage["isolation_parameters"] for stage in stages]


def test_runs_and_models_side_by_side(made, model):
    paths = [made["seed0"].path, model, made["seed1"].path]
    records = read_all(paths)
    assert [len(group.runs) for group in groups(records)] == [2, 1]
    chapter = compare(records)
    tables = {table.title: table for part in chapter.parts for table in part.tables}
    tables |= {figure.table.title: figure.table for part in chapter.parts for figure in part.figures}
    runs, shop = tables["Runs and models"], tables["Runs and models"].rows[1]
    row = dict(zip(runs.columns, shop, strict=True))
    assert row["state"] == "model, 2 tasks" and row["group"] == "2. shop pearl"
    assert row["class-IL after the last task, mean over tasks"] is None
    assert row["parameters, share of isolation"] == records[1].summary["growth"]
    assert not any("shop" in column for column in tables["Mean and standard deviation over seeds"].columns)
    assert not any("shop" in column for column in tables["class-IL, mean over seeds (%)"].columns)
    growth = tables["Parameters, mean over seeds (million)"]
    assert [row[3] for row in growth.rows][:2] == [size / 1e6 for size in records[1].parameters]
    assert "format" not in tables["Settings that differ"].columns


def test_models_side_by_side(model, own_model):
    records = read_all([model, own_model])  # of one configuration and seed, which does not make them the same
    assert page_of._runs_and_models(records) == "2 models"
    assert [part.title for part in compare(records).parts] == [
        "Models",
        "Stage by stage",
        "Resource allocation",
        "Settings",
    ]


def test_runs_that_differ_by_their_seed_are_a_group(made, run_copy):
    config = yaml.safe_load((run_copy / "config.yaml").read_text())
    (run_copy / "config.yaml").write_text(yaml.safe_dump(config | {"seed": 7}))
    records = read_all([made["seed0"].path, run_copy])
    assert len(groups(records)) == 1
    assert compared._differing(records) == ["seed"]


def test_a_model_of_an_earlier_version_that_learns_one_more_task(own_model):
    edit(own_model / "tasks" / "000-fruit" / "manifest.json", lambda value: value.pop("isolation_parameters"))
    (own_model / "resume").mkdir()
    (own_model / "resume" / "task.json").write_text("{}")
    record = read(own_model)
    chapter = about_run(record, "m")
    assert chapter.unfinished == "One more task was cut off: `pearl resume` continues it."
    assert "growth" not in record.summary
    (part,) = [part for part in chapter.parts if part.title == "Parameters"]
    assert "Complete isolation is left out" in part.note
    assert part.figures[-1].table.columns == ["after task", "this model"]


def test_a_run_that_lost_its_task_folders(run_copy):
    shutil.rmtree(run_copy / "tasks")
    assert len(page_of._tasks(read(run_copy)).rows) == 3
    assert page_of._parameters(read(run_copy), "m")


# ---------------------------------------------------------------------------------------- what a name can do


def test_names_cannot_break_the_page(run_copy):
    for file in (run_copy / "results.json", run_copy / "classes.json"):
        edit(file, lambda value: value["tasks"][1].update(name=EVIL, classes=[EVIL, "b", "c"]))
    manifest = run_copy / "tasks" / "001-task2" / "manifest.json"
    edit(manifest, lambda value: value["layers"][0].update(layer=EVIL))
    edit(manifest, lambda value: value.update(name=EVIL, classes=[EVIL, "b", "c"]))
    config = yaml.safe_load((run_copy / "config.yaml").read_text())
    (run_copy / "config.yaml").write_text(yaml.safe_dump({**config, "about": f"</pre>{EVIL}"}))
    reader = Reader(page([read(run_copy)]))
    assert not [tag for tag, _ in reader.tags if tag == "script"]
    assert EVIL in reader.text
    rows = reader.files["class-il-accuracy-of-each-task-after-each-task.csv"]
    assert rows[2][0] == EVIL
    assert reader.files["tasks-of-own.csv"][2][1::5] == [EVIL, f"{EVIL}, b, c"]


@pytest.mark.parametrize("name", ["\x00\x08\ud800", "a\n数字 ☃", "", "$\\frac{1}$ --> ]]>" * 50])
def test_odd_names(run_copy, name, tmp_path):
    edit(run_copy / "results.json", lambda value: value["tasks"][0].update(name=name))
    reader = Reader(write([run_copy], tmp_path / "page.html").read_text())
    assert not [tag for tag, _ in reader.tags if tag == "script"]
    assert len(reader.files["class-il-accuracy-of-each-task-after-each-task.csv"]) > 2


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@x", "\t=1", " =1", "\r=1", "＝1"])
def test_a_name_is_no_formula(name):
    assert Table("t", ["a"], [[name]]).csv.split("\r\n", 1)[1].lstrip('"').startswith("'")
    assert Table("t", ["a"], [[-1.5]]).csv == "a\r\n-1.5\r\n"  # a number stays one


def test_csv_round_trip():
    rows = [["a,b", 'c"d', "e f"], ["ä", "", "1"]]  # see tests/storage/test_files.py for odder ones
    table = Table("x", ["1", "2", "3"], rows)
    assert list(csv.reader(io.StringIO(table.csv))) == [["1", "2", "3"], *rows]
    assert base64.b64decode(table.link.partition("base64,")[2]).decode() == table.csv


# ----------------------------------------------------------------------------------------------- the page itself


def test_the_page_needs_nothing_from_elsewhere(side_by_side):
    for tag, attributes in Reader(side_by_side).tags:
        assert tag not in {"script", "link", "img", "iframe", "object", "embed", "base"}
        for key, value in attributes.items():
            if not key.startswith("xmlns"):
                assert "://" not in (value or ""), f"{tag} {key}={value}"
            assert not key.startswith("on")
            if key in {"href", "xlink:href", "src"}:
                assert (value or "").startswith(("#", "data:text/csv;"))
    assert all(address.startswith("#") for address in re.findall(r"url\(([^)]*)\)", side_by_side))
    assert "@import" not in side_by_side


def test_every_figure_has_words_numbers_and_its_own_ids(side_by_side):
    reader = Reader(side_by_side)
    drawings = [attributes for tag, attributes in reader.tags if tag == "svg"]
    assert len(drawings) > 30
    assert all(attributes["role"] == "img" and len(attributes["aria-label"] or "") > 20 for attributes in drawings)
    assert sum(tag == "details" for tag, _ in reader.tags) == len(drawings)
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = [a[key] for _, a in reader.tags for key in ("href", "xlink:href") if (a.get(key) or "").startswith("#")]
    assert {name[1:] for name in used} <= set(ids)


def test_the_same_runs_give_the_same_bytes(made):
    record = read(made["seed0"].path)
    assert page([record]) == page([record])


@pytest.mark.parametrize("target", ["current folder", "user's"])
def test_what_a_matplotlibrc_says_changes_nothing(tmp_path, monkeypatch, target):
    """matplotlib reads it on import, so that needs an interpreter."""
    draw = "plots.heat_map(np.eye(2), name='n', alt='a', rows='ab', columns='cd', x='x', y='y', unit='%')"
    file = tmp_path / "matplotlibrc"
    file.write_text("font.size: 30\nlines.linewidth: 9\nxtick.labelsize: 40\npath.sketch: 1, 100, 2\n")
    if target == "user's":
        monkeypatch.setenv("MATPLOTLIBRC", str(file.rename(tmp_path / "mine")))
    code = f"import numpy as np; from pearl.reports import plots; print({draw}, end='')"
    drawn = subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True, text=True)
    assert drawn.stdout == eval(draw, {"np": np, "plots": plots})


def test_command(made, cli, tmp_path, monkeypatch):
    run = made["seed0"].path
    assert cli("report", run, "-o", tmp_path / "new" / "a.html").strip() == str(tmp_path / "new" / "a.html")
    copy = Path(shutil.copytree(run, tmp_path / "runs" / run.name))  # where PEARL_RUNS points
    assert cli("report", run.name).strip() == str(copy / "report.html")
    monkeypatch.chdir(tmp_path)
    assert cli("report", run, made["isolation"].path).strip() == "report.html"
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert not list(tmp_path.glob(".*.tmp"))


def test_report_does_not_import_torch(made, tmp_path):
    code = (
        "import sys; from pathlib import Path; from pearl.reports.page import write; "
        "write([sys.argv[1]], Path(sys.argv[2])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(made["seed0"].path), str(tmp_path / "a.html")], check=True)


def test_tensorboard(made, model, cli, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = made["seed0"]
    out = cli("report", run.path, "--tensorboard", tmp_path / "boards", "-o", tmp_path / "a.html")
    assert out.splitlines() == [str(tmp_path / "boards"), str(tmp_path / "a.html")]
    board = EventAccumulator(str(tmp_path / "boards" / run.path.name)).Reload()
    losses = [event.value for event in board.Scalars("loss/probe")]
    np.testing.assert_allclose(losses, [e["loss"] for e in read(run.path).epochs if e["phase"] == "probe"], rtol=1e-6)
    assert [event.step for event in board.Scalars("loss/probe")] == list(range(1, len(losses) + 1))
    final = board.Scalars("mean_accuracy_percent/class_il")[-1].value
    assert final == pytest.approx(run.summary["class_il.final"])
    assert "ranks" in board.Tags()["histograms"]
    cli("report", model, "--tensorboard", tmp_path / "boards", "-o", tmp_path / "b.html")
    tags = EventAccumulator(str(tmp_path / "boards" / model.name)).Reload().Tags()["scalars"]
    assert {"loss/adapt", "parameters"} <= {*tags} and not [tag for tag in tags if "accuracy" in tag]
    again = cli("report", run.path, "--tensorboard", tmp_path / "boards", code=2)
    assert "exists; move it away" in again


# ------------------------------------------------------------------------------------------------------ wrong input


def wrong_inputs() -> Iterator[tuple[str, str]]:
    yield "no such run", "neither a model nor a run, it has no config.yaml"
    yield "a file", "neither a model nor a run"
    yield "an empty folder", "neither a model nor a run"
    yield "no config.yaml", "config.yaml: missing, though tasks are there; restore it from a copy"
    yield "no stage", "no task is finished yet; let `pearl run` finish"
    yield "no stage in it", "no task is finished yet"
    yield "half a results.json", "results.json: damaged ("
    yield "counts that disagree", "results.json: damaged (stages[0]"
    yield "no parameters", "results.json: damaged (stages.0.parameters: field required)"
    yield "a newer format", "this pearl reads up to 1"
    yield "a list for results", "results.json: damaged"
    yield "half a config.yaml", "config.yaml: cannot be read"
    yield "another config.yaml", "config.yaml: damaged, not the settings of a run or model (seed: field required)"
    yield "a run without its stream", "(value error, a run has a recipe and a stream, a model has neither)"
    yield "a config.yaml of a newer format", "config.yaml: format 99, this pearl reads up to 1"
    yield "no format number", "config.yaml: cannot be read (no format number)"
    yield "odd config.yaml", "config.yaml: damaged, not the settings of a run or model (seed: input should be"
    yield "half a manifest", "manifest.json: damaged"
    yield "odd layers", "manifest.json: damaged (layers.0.threshold: field required)"
    yield "no reference", "reference/manifest.json: missing"
    yield "-o is a folder", "is a folder; give the page a name in it"
    yield "-o is no page", "give the page a name that ends in .html"
    yield "-o below a file", "cannot be written"
    yield "the same run twice", "the same configuration and seed as"
    yield "tensorboard below a file", "cannot be written"


@pytest.mark.parametrize(("what", "message"), wrong_inputs())
def test_wrong_input_is_one_line(what, message, run_copy, tmp_path, cli):
    results, config = run_copy / "results.json", run_copy / "config.yaml"
    manifest = run_copy / "tasks" / "001-task2" / "manifest.json"
    (tmp_path / "file").write_text("")
    arguments: list[object] = [run_copy]
    match what:
        case "no such run":
            arguments = [tmp_path / "nowhere"]
        case "a file":
            arguments = [tmp_path / "file"]
        case "an empty folder":
            (tmp_path / "empty").mkdir()
            arguments = [tmp_path / "empty"]
        case "no config.yaml":
            config.unlink()
        case "no stage":
            results.unlink()
        case "no stage in it":
            edit(results, lambda value: value.update(stages=[], tasks=[]))
        case "half a results.json":
            results.write_text(results.read_text()[:200])
        case "counts that disagree":
            edit(results, lambda value: value["stages"][0].update(class_il=[9, 9, 9, 9]))
        case "no parameters":
            edit(results, lambda value: value["stages"][0].pop("parameters"))
        case "a newer format":
            edit(results, lambda value: value.update(format=99))
        case "a list for results":
            results.write_text("[]")
        case "half a config.yaml":
            config.write_text("a: [1,")
        case "another config.yaml":
            config.write_text("{format: 1, version: 3}")
        case "a run without its stream":
            config.write_text("{format: 1, seed: 0, recipe: a, method: {name: b}, train: {}}")
        case "a config.yaml of a newer format":
            config.write_text("format: 99\n")
        case "no format number":
            config.write_text("{seed: 0, recipe: a, method: {name: b}, train: {}, stream: {tasks: 3}}")
        case "odd config.yaml":
            config.write_text("{format: 1, seed: x, recipe: a, method: {name: b}, train: {}, stream: {tasks: 3}}")
        case "half a manifest":
            manifest.write_text(manifest.read_text()[:90])
        case "odd layers":
            edit(manifest, lambda value: value["layers"][0].pop("threshold"))
        case "no reference":
            (run_copy / "reference" / "manifest.json").unlink()
        case "-o is a folder":
            arguments += ["-o", tmp_path]
        case "-o is no page":
            arguments += ["-o", results]
        case "-o below a file":
            arguments += ["-o", tmp_path / "file" / "a.html"]
        case "the same run twice":
            arguments += [run_copy]
        case "tensorboard below a file":
            pytest.importorskip("tensorboard")
            arguments += ["--tensorboard", tmp_path / "file" / "boards"]
    before = results.read_bytes() if results.exists() else None
    (line,) = cli("report", *arguments, code=2).splitlines()
    assert line.startswith("pearl: ") and message in line
    assert not (run_copy / "report.html").exists()
    assert (results.read_bytes() if results.exists() else None) == before


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no task", "no task is finished yet; let `pearl resume"),
        ("a task is lost", "manifest.json: missing, though 001-roots is there"),
        ("half a manifest", "manifest.json: damaged"),
        ("no bytes", "manifest.json: damaged (bytes: field required)"),
        ("odd config.yaml", "config.yaml: damaged, not the settings of a run or model (train: input should be"),
        ("the same model twice", "the same configuration and seed as"),
    ],
)
def test_a_wrong_model_is_one_line(what, message, own_model, cli):
    manifest = own_model / "tasks" / "000-fruit" / "manifest.json"
    arguments = [own_model]
    match what:
        case "no task":
            shutil.rmtree(own_model / "tasks")
            (own_model / "classes.json").unlink()
        case "a task is lost":
            manifest.unlink()
        case "half a manifest":
            manifest.write_text(manifest.read_text()[:90])
        case "no bytes":
            edit(manifest, lambda value: value.pop("bytes"))
        case "odd config.yaml":
            (own_model / "config.yaml").write_text("{format: 1, seed: 0, method: {name: b}, train: 3}")
        case "the same model twice":
            arguments += [own_model]
    (line,) = cli("report", *arguments, code=2).splitlines()
    assert line.startswith("pearl: ") and message in line
    assert not (own_model / "report.html").exists()


def test_every_wrong_run_has_its_line(run_copy, tmp_path, cli):
    (run_copy / "results.json").write_text("{")
    err = cli("report", run_copy, tmp_path / "nowhere", code=2)
    assert len(err.splitlines()) == 2


def test_without_tensorboard(made, cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    err = cli("report", made["seed0"].path, "--tensorboard", "boards", code=2)
    assert err == "pearl: TensorBoard is not installed; install it with: pip install 'pearl[tensorboard]'\n"


def test_two_directories_of_one_name(made, run_copy, tmp_path, cli):
    other = Path(shutil.copytree(made["seed1"].path, tmp_path / "elsewhere" / "own"))
    assert "rename one of the directories" in cli("report", run_copy, other, code=2)
