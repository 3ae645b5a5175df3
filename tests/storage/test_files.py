"""Files that are none, JSON of other shapes, paths that no file can have, and CSV of names that are more than names."""

import csv
import io
import json
import os
from pathlib import Path

import pytest

from pearl.errors import ConfigError, DataError, RunError
from pearl.storage.files import open_regular, read_json
from pearl.storage.paths import as_path, find, runs_root
from pearl.storage.schemas import Classes, Environment, Results, TaskManifest
from pearl.storage.stored_task import MANIFEST
from pearl.storage.tabular import cell, rows_as_csv

TASK = {
    "format": 1,
    "sha256": {"weights.safetensors": "00"},
    "bytes": 1,
    "tensors": {"a": [1, 2]},
    "task": 0,
    "name": "first",
    "classes": ["cat"],
    "parameters": 3,
    "seconds": {"adapt": 0.5},
    "layers": [{"layer": "a", "threshold": 0.9, "rank": 1, "full_rank": 2, "rows_and_columns": 3, "more": "of later"}],
}


@pytest.mark.parametrize("kind", ["FIFO", "device", "folder", "loop", "NUL", "nothing"])
def test_only_files_are_opened(kind, tmp_path):
    """A FIFO would wait for ever, and of /dev/zero there is no end."""
    path = {"device": Path("/dev/zero"), "NUL": Path("a\0b")}.get(kind, tmp_path / "x")
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    with pytest.raises(OSError) as caught:
        open_regular(path)
    assert caught.value.strerror and caught.value.filename == str(path)


def test_a_file_is_opened_by_a_link_too(tmp_path):
    (tmp_path / "there").write_bytes(b"x")
    (tmp_path / "link").symlink_to("there")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"x"


def write(tmp_path, value):
    (tmp_path / MANIFEST).write_text(value if isinstance(value, str) else json.dumps(value))
    return tmp_path / MANIFEST


def test_what_is_right_comes_as_it_is_written(tmp_path):
    odd = TASK | {"classes": ["cat", "\udcff", "\x1b[31m"], "of a later version": {"a": [None]}}
    assert read_json(write(tmp_path, odd), TaskManifest) == odd


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"classes": "cat"}, "classes"),
        ({"classes": [1]}, "classes.0"),
        ({"name": None}, "name"),
        ({"parameters": "3"}, "parameters"),
        ({"parameters": True}, "parameters"),
        ({"parameters": -1}, "parameters"),
        ({"parameters": 10**30}, "parameters"),
        ({"bytes": 1.5}, "bytes"),
        ({"tensors": []}, "tensors"),
        ({"tensors": {"a": [-1]}}, "tensors.a.0"),
        ({"sha256": ["00"]}, "sha256"),
        ({"seconds": {"adapt": float("nan")}}, "seconds.adapt"),
        ({"seconds": 1}, "seconds"),
        ({"layers": {}}, "layers"),
        ({"layers": [{}]}, "layers.0.layer"),
        ({"train": []}, "train"),
    ],
)
def test_a_manifest_of_another_shape(change, where, tmp_path):
    with pytest.raises(RunError, match=rf"manifest\.json: damaged \({where.replace('.', '[.]')}: .*; restore it"):
        read_json(write(tmp_path, TASK | change), TaskManifest)


@pytest.mark.parametrize("key", ["name", "classes", "parameters", "bytes", "sha256", "tensors", "task", "seconds"])
def test_a_manifest_that_lacks_something(key, tmp_path):
    with pytest.raises(RunError, match=rf"damaged \({key}: field required\)"):
        read_json(write(tmp_path, {name: value for name, value in TASK.items() if name != key}), TaskManifest)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": true}', '{"format": 1.0}', "[1]", "\xff", "9" * 5000, ""])
def test_no_json_of_ours(text, tmp_path):
    with pytest.raises(RunError, match="damaged"):
        read_json(write(tmp_path, text))


@pytest.mark.parametrize(
    ("shape", "value"),
    [
        (Results, {"tasks": [], "stages": [{}]}),
        (Results, {"tasks": [], "stages": [], "complete": 1}),
        (Classes, {"tasks": ["first"]}),
        (Environment, {"precision": "fp8"}),
    ],
)
def test_other_files_of_another_shape(shape, value, tmp_path):
    with pytest.raises(RunError, match="damaged"):
        read_json(write(tmp_path, {"format": 1, **value}), shape)


# ------------------------------------------------------------------------------------------------------------- paths


def test_homes_of_nobody_and_nul(monkeypatch):
    with pytest.raises(ConfigError, match="data file: ~nouser/x: that user has no home directory"):
        as_path("~nouser/x", what="data file")
    with pytest.raises(DataError, match=r"weights: 'a\\x00b' contains a NUL"):
        find("a\0b", what="weights", error=DataError)
    monkeypatch.setenv("PEARL_RUNS", "~nouser")
    with pytest.raises(ConfigError, match="PEARL_RUNS: ~nouser"):
        runs_root()
    assert as_path("~/x", what="") == Path.home() / "x"


# --------------------------------------------------------------------------------------------------------------- CSV


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@x", " =1", "\t=1", "＝1", "\rx", "\nx"])
def test_no_cell_is_a_formula(name):
    assert cell(name).startswith("'")


def test_a_row_is_a_line_whatever_is_in_it():
    rows = [["a\rb", "c\nd", 'quoted "twice"', "x,y"], ["\x1b[31m", "\udcff", "\u202e", "日本"], [1, 0.5, None, True]]
    text = rows_as_csv(rows, end="\n")
    assert text.count("\n") == 3 and all(line.isprintable() for line in text.split("\n"))
    assert text.encode()  # surrogates are gone
    first, second, third = csv.reader(io.StringIO(text, newline=""))
    assert first == [r"a\rb", r"c\nd", 'quoted "twice"', "x,y"]
    assert second == [r"\x1b[31m", r"\udcff", r"\u202e", "日本"]
    assert third == ["1", "0.5", "", "True"]
