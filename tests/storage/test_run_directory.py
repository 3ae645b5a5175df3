"""How far a directory is, by its files alone. What they hold is read in test_files and test_report."""

import ast
import json
from pathlib import Path

import pytest
import yaml

from pearl.errors import RunError
from pearl.storage.locks import locked
from pearl.storage.run_directory import Below, RunDirectory, State
from test_rooms import SOURCE

MODEL = {"format": 1, "seed": 0, "method": {"name": "finetune"}, "train": {}}
RUN = {**MODEL, "recipe": "digits", "stream": {"tasks": 2}}


def add_task(directory: RunDirectory, index: int, name: str, **facts: object) -> None:
    folder = directory.folder_of(index, name)
    folder.mkdir(parents=True)
    manifest = {"format": 1, "sha256": {}, "bytes": 7, "tensors": {}, "task": index, "name": name, "classes": [name]}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"parameters": 5, "seconds": {}} | facts))


def directory_of(path: Path, config: object, tasks: int) -> RunDirectory:
    directory = RunDirectory(path)
    directory.config_file.write_text(yaml.safe_dump(config))
    for index in range(tasks):
        add_task(directory, index, f"t{index}")
    return directory


def write_results(directory: RunDirectory, tasks: int, *, complete: bool) -> None:
    listed = [{"name": f"t{index}", "classes": [f"t{index}"]} for index in range(tasks)]
    directory.write(directory.results_file, {"tasks": listed, "stages": [], "complete": complete})


def test_states_of_a_run(tmp_path):
    assert RunDirectory(tmp_path / "nowhere").state == State.MISSING and not (tmp_path / "nowhere").exists()
    run = directory_of(tmp_path, RUN, 0)
    assert run.state == State.MISSING
    add_task(run, 0, "t0")
    write_results(run, 1, complete=False)
    assert run.state == State.UNFINISHED
    checkpoint = run.resume_folder / "001-00-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    assert run.state == State.INTERRUPTED and run.checkpoints == [checkpoint]
    with locked(tmp_path):
        assert run.state == State.LEARNING
    add_task(run, 1, "t1")
    write_results(run, 2, complete=True)
    assert run.state == State.FINISHED and run.is_done
    run.results_file.write_text("{")
    assert run.state == State.DAMAGED


def test_states_of_a_model(tmp_path):
    model = directory_of(tmp_path, MODEL, 1)
    assert model.state == State.FINISHED and not model.is_done
    model.resume_folder.mkdir()
    note = {"index": 1, "data": "", "name": "next", "config": {}}
    model.write(model.pending_file, note)
    assert model.state == State.INTERRUPTED and model.interrupted_task["name"] == "next"
    model.write(model.pending_file, {**note, "index": 0})  # its process died after the manifest was written
    assert model.state == State.FINISHED and not model.interrupted_task
    model.pending_file.write_text("{}")
    assert model.state == State.INTERRUPTED  # resuming it reports the damage
    with pytest.raises(RunError, match="damaged"):
        _ = model.interrupted_task


def test_tasks_count_their_classes(tmp_path):
    model = directory_of(tmp_path, MODEL, 0)
    add_task(model, 0, "t0", classes=["t0", "another"])
    add_task(model, 1, "t1")
    add_task(model, 2, "more", classes=[], also=["t1", "t0"])
    first, second, again = model.tasks
    assert [task.first_class for task in (first, second, again)] == [0, 2, 3]
    assert (second.names, again.names, again.classes) == (("t1",), ("t1", "t0"), ())
    assert (second.bytes, second.parameters, second.isolation, second.images) == (7, 5, None, None)
    assert [task.name for task in model.first_tasks(1)] == ["t0"]


def test_no_other_file_names_the_files_of_a_directory():
    names = {item.name for item in vars(RunDirectory).values() if isinstance(item, Below)}
    names -= {"reference", "tasks", "resume", "logs", "online"}  # words of other meanings, too
    assert {"config.yaml", "results.json", "events.jsonl", "classes.json"} <= names
    actual = [
        f"{module}, line {node.lineno}: {node.value}"
        for module, text in SOURCE.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value in names and module != "storage.run_directory"
    ]
    assert actual == [], "take it from storage.run_directory"
