"""The page about runs of streams: its numbers against results that are written by hand."""

import base64
import csv
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pearl.lifecycle.saved import config_bytes
from pearl.reports.stream_page import page
from pearl.reports.streams import online_page
from pearl.settings.config import load_config
from pearl.storage.run_directory import RunDirectory

FACTS = {"passes": 2, "images_bytes": 2_000_000, "statistics_bytes": 3_500_000, "seconds_per_image": 0.004}
FACTS |= {"longest_pause_seconds": 2.5, "evaluation_seconds": 1.0, "classes": 2}
GROWN = {"grown_at": [3], "reasons": ["since 2 classes were confused"], "sub_networks": [{}]}


def store(path: Path, *changes: str, facts: dict[str, Any] | None = None) -> Path:
    """A finished run: 60 % after 2 images, then 50 %: 8 of 10 test images of the first class, 2 of the other."""
    directory = RunDirectory(path)
    path.mkdir(parents=True)
    directory.config_file.write_bytes(config_bytes(load_config("online-digits", [*changes])))
    curve = [{"seen": 1, "regular": False, "total": [10], "right": [6]}]
    curve += [{"seen": 2, "regular": True, "total": [10, 10], "right": [9, 3]}]
    curve += [{"seen": 4, "regular": True, "total": [10, 10], "right": [8, 2]}]
    online = {"curve": curve, "facts": {**FACTS, **(facts or GROWN)}, "names": ["apple", "pear"]}
    directory.write(directory.results_file, {"tasks": [], "stages": [], "complete": True, "online": online})
    return path


def tables(html: str) -> list[list[list[str]]]:
    """The tables that the page offers as CSV."""
    found = re.findall(r"data:text/csv;charset=utf-8;base64,([^\"]+)", html)
    return [[*csv.reader(base64.b64decode(each).decode().splitlines())] for each in found]


def test_the_page_of_a_run(cli: Any, tmp_path: Path) -> None:
    run = store(tmp_path / "one")
    out, _ = cli("report", run)
    assert out.strip() == str(run / "report.html")
    html = (run / "report.html").read_text()
    assert "<svg" in html and "Accuracy over images seen" in html
    assert "sub-network 1 was trained after 3 images, since 2 classes were confused." in html
    metrics, curve, classes = tables(html)
    assert {row[2]: float(row[1]) for row in metrics[1:]} == {
        "a_auc": 55.0,
        "a_last": 50.0,
        "forgetting": 10.0,
        "sub_networks": 1.0,
        **{key: value for key, value in FACTS.items() if key not in ("evaluation_seconds", "classes")},
    }
    assert curve[0] == ["images seen", "classes", "accuracy (%)", "sub-networks"]
    assert [[float(cell) for cell in row] for row in curve[1:]] == [[1, 1, 60, 0], [2, 2, 60, 0], [4, 2, 50, 1]]
    assert [[name, *map(float, rest)] for name, *rest in classes[1:]] == [["apple", 10, 80], ["pear", 10, 20]]


def test_the_same_as_text(tmp_path: Path) -> None:
    results = RunDirectory(store(tmp_path / "one")).results["online"]
    out = online_page(SimpleNamespace(path=tmp_path / "one", results=results, done=True))  # type: ignore[arg-type]
    lines = [line.split() for line in out.splitlines()]
    assert ["4", "2", "50.00", "1"] in lines and ["2", "2", "60.00", "0"] in lines
    assert "most forgotten: apple 10.00 points, pear 10.00 points" in out
    assert "longest pause 2.5 s" in out and "2.00 MB of images" in out


def test_runs_side_by_side(cli: Any, tmp_path: Path) -> None:
    runs = [store(tmp_path / "one"), store(tmp_path / "two", "online.learner=slda", facts={"note": "none"})]
    cli("report", *runs, "-o", tmp_path / "both.html")
    html = (tmp_path / "both.html").read_text()
    assert "Streams side by side" in html and html.count("<svg") == 3
    assert ">one<" in html and ">two<" in html


def test_a_run_of_tasks_does_not_go_with_streams(cli: Any, tmp_path: Path) -> None:
    other = tmp_path / "tasks"
    other.mkdir()
    (other / "config.yaml").write_bytes(config_bytes(load_config("digits")))
    _, err = cli("report", store(tmp_path / "one"), other, code=2)
    assert err == f"pearl: {other}: not a run of a stream, as others are; make a page of each kind\n"


def test_an_unfinished_run_without_an_evaluation(tmp_path: Path, cli: Any) -> None:
    run = tmp_path / "new"
    run.mkdir()
    (run / "config.yaml").write_bytes(config_bytes(load_config("online-digits")))
    _, err = cli("report", run, code=2)
    assert "no evaluation at the fixed interval yet" in err and err.count("\n") == 1
    with pytest.raises(Exception, match="no evaluation"):
        page([run])
