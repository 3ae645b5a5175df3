import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch.func import functional_call

import pearl
from layouts import image_folder
from pearl.errors import ConfigError, DataError, RunError, TrainingError, WeightsError
from pearl.evaluation.metrics import accuracy_matrix
from pearl.lifecycle.runs import Run, execute, prepare
from pearl.lifecycle.saved import build_method, load_method
from pearl.settings.config import check_config, load_config
from pearl.storage.checkpoint import load_state
from pearl.storage.run_directory import RunDirectory

pytestmark = pytest.mark.slow

SMALL = [
    "backbone.width=4",
    "train.epochs=1",
    "stream.per_class=20",
    "stream.test_per_class=10",
    "stream.tasks=[4,3,3]",
]


def small(*overrides):
    return load_config("digits", [*SMALL, *overrides])


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """One run that several tests look at; they must not change it."""
    root = tmp_path_factory.mktemp("finished")
    before = {key: os.environ.get(key) for key in ("PEARL_RUNS", "PEARL_DATA")}
    os.environ.update(PEARL_RUNS=str(root / "runs"), PEARL_DATA=str(root / "data"))
    try:
        return execute(small())
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def test_a_run_directory_holds_what_the_format_says(finished_run):
    names = {str(p.relative_to(finished_run.path)) for p in finished_run.path.rglob("*") if p.is_file()}
    tasks = {f"tasks/00{t}-task{t + 1}/{file}" for t in range(3) for file in ("weights.safetensors", "manifest.json")}
    assert names == {
        ".lock",
        "config.yaml",
        "environment.json",
        "data.json",
        "classes.json",
        "results.json",
        "events.jsonl",
        "reference/weights.safetensors",
        "reference/manifest.json",
        *tasks,
    }
    classes = json.loads((finished_run.path / "classes.json").read_text())["tasks"]
    assert [task["classes"] for task in classes] == [["0", "1", "2", "3"], ["4", "5", "6"], ["7", "8", "9"]]


def test_a_task_stores_only_what_it_added(finished_run):
    first, second = (
        load_file(folder / "weights.safetensors") for folder in RunDirectory(finished_run.path).finished[:2]
    )
    assert all(name.startswith(("backbone.", "heads.blocks.0.")) for name in first)
    assert all(name.startswith(("tensors.1/", "statistics.1/", "heads.blocks.1.")) for name in second)


def test_ranks_and_thresholds_are_in_the_manifest(finished_run):
    first, second, _ = finished_run.manifests
    assert first["layers"] == []
    assert len(second["layers"]) == 20
    for layer in second["layers"]:
        assert 1 <= layer["rank"] <= layer["full_rank"]
        assert 0 <= layer["threshold"] <= 1


def test_the_same_configuration_is_already_done(finished_run, monkeypatch):
    monkeypatch.setenv("PEARL_RUNS", str(finished_run.path.parent))
    before = {p: p.stat().st_mtime_ns for p in finished_run.path.rglob("*")}
    again = execute(finished_run.config)
    assert again.path == finished_run.path
    assert {p: p.stat().st_mtime_ns for p in finished_run.path.rglob("*")} == before


@pytest.mark.parametrize("method", ["pearl", "isolation", "finetune", "joint"])
def test_resume_after_a_task_equals_an_unbroken_run(method, tmp_path, monkeypatch):
    settings = small(f"method={method}", "engine.max_steps=3")
    states, results = [], []
    for root, stops in (("whole", [None]), ("broken", [1, 2, None])):
        monkeypatch.setenv("PEARL_RUNS", str(tmp_path / root))
        for stop in stops:
            run = execute(settings, stop_after=stop)
        states.append(load_state(run.path))
        results.append(run.results)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    counts = ("total", "class_il", "task_il", "confusion", "parameters")
    for whole, broken in zip(results[0]["stages"], results[1]["stages"], strict=True):
        assert {key: whole[key] for key in counts} == {key: broken[key] for key in counts}


def test_a_stage_that_was_not_evaluated_is_evaluated_on_resume(tmp_path):
    settings = small("engine.max_steps=2")
    run = execute(settings)
    before = run.results
    (run.path / "results.json").unlink()
    after = execute(settings).results
    for old, new in zip(before["stages"], after["stages"], strict=True):
        assert old["class_il"] == new["class_il"]


def test_a_loaded_method_gives_the_logits_of_the_counts(finished_run):
    method = load_method(finished_run.path, finished_run.config)
    prepared = prepare(finished_run.config)
    from pearl.data.augment import View

    view = View(finished_run.config.images)
    task = prepared.stream.tasks[1]
    with torch.no_grad():
        logits = method(view.test(torch.from_numpy(prepared.test[task.test])))
    right = np.bincount(task.test_labels[logits.argmax(1).numpy() == task.test_labels], minlength=10)
    assert right[4:7].tolist() == finished_run.results["stages"][2]["class_il"][4:7]
    assert right.sum() == right[4:7].sum()


def test_earlier_logits_are_bit_identical_after_later_tasks(finished_run):
    x = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    after = [load_method(finished_run.path, finished_run.config, tasks) for tasks in (1, 2, 3)]
    with torch.no_grad():
        for t in range(3):
            first, *later = [method(x, task=t) for method in after[t:]]
            assert all(torch.equal(first, other) for other in later)


def test_a_run_is_a_reference_for_another(finished_run):
    other = load_config("digits", [*SMALL, f"backbone.weights={finished_run.path}"])
    method = build_method(other)
    learnt = load_method(finished_run.path, finished_run.config)
    for name, parameter in method.backbone.named_parameters():
        assert torch.equal(parameter, learnt.backbone.get_parameter(name))
    assert method.first_adapted == 0  # a given reference: task 1 is adapted too


def test_summary_is_derived_from_the_counts(finished_run):
    stage = finished_run.results["stages"][-1]
    pooled = 100 * sum(stage["class_il"]) / sum(stage["total"])
    assert finished_run.summary["class_il.final_pooled"] == pytest.approx(pooled)
    assert finished_run.summary["parameters_million"] == stage["parameters"] / 1e6
    backbone = sum(p.numel() for p in build_method(finished_run.config).backbone.parameters())
    assert stage["isolation_parameters"] == 3 * backbone + 33 * 10


def test_mean_rank_is_weighted_by_rows_and_columns(finished_run):
    ranks, weights = [], []
    for layer in (layer for manifest in finished_run.manifests for layer in manifest["layers"]):
        method = build_method(finished_run.config)
        out, into, kh, kw = method.backbone.get_parameter(layer["layer"]).shape
        ranks.append(layer["rank"])
        weights.append(out * kh + into * kw)
    assert finished_run.mean_rank == pytest.approx(np.average(ranks, weights=weights))


def test_three_lines_of_python(monkeypatch):
    run = pearl.run("digits", smoke=True, quiet=True, backbone={"width": 4}, seed=3)
    assert run.config.seed == 3
    assert 0 <= run.summary["class_il.final"] <= 100


# ------------------------------------------------------------------------------------------------ bad input


def test_tampered_weights_are_named(tmp_path):
    run = execute(small("engine.max_steps=1"), stop_after=2)
    file = run.path / "tasks" / "001-task2" / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(RunError, match=r"001-task2/weights\.safetensors: checksum differs .* remove classes\.json"):
        execute(small("engine.max_steps=1"))


def test_other_data_than_at_the_start_is_refused(tmp_path):
    root = tmp_path / "tree"
    image_folder(root, classes=("a", "b", "c", "d"), size=8)
    raw = small("engine.max_steps=1").model_dump(mode="json")
    raw |= {"data": {"name": "folder", "path": str(root)}, "stream": {"tasks": 2}}
    settings = check_config(raw)
    execute(settings, stop_after=1)
    image = next((root / "train" / "a").glob("*"))
    (image.parent / f"extra{image.suffix}").write_bytes(image.read_bytes())
    with pytest.raises(RunError, match=r"started with other data \(rows, labels or class names differ"):
        execute(settings)


@pytest.mark.parametrize(
    ("changed", "named"),
    [(["train"], "train images"), (["test"], "test images"), (["train", "test"], "train images and test images")],
)
def test_other_pixels_than_at_the_start_are_refused(tmp_path, changed, named):
    root = tmp_path / "tree"
    image_folder(root, classes=("a", "b", "c", "d"), size=8)
    raw = small("engine.max_steps=1").model_dump(mode="json")
    raw |= {"data": {"name": "folder", "path": str(root)}, "stream": {"tasks": 2}}
    settings = check_config(raw)
    run = execute(settings, stop_after=1)
    files = [next((root / split / "b").glob("*")) for split in changed]
    before = [file.read_bytes() for file in files]
    for file in files:
        with Image.open(file) as image:
            ImageOps.invert(image).save(file)
    with pytest.raises(RunError, match=rf"other data \({named} differ from data\.json\); restore .* or move") as caught:
        execute(settings)
    assert len(str(caught.value).splitlines()) == 1

    for file, content in zip(files, before, strict=True):
        file.write_bytes(content)  # with another time: what counts is the pixels
    assert execute(settings).path == run.path


def test_a_newer_format_is_refused(tmp_path):
    run = execute(small("engine.max_steps=1"), stop_after=1)
    file = run.path / "results.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    with pytest.raises(RunError, match=r"results\.json: format 99, this pearl reads up to 1; install a newer pearl"):
        execute(small("engine.max_steps=1"))


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    settings = small("engine.max_steps=1")
    run = execute(settings, stop_after=1)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match="No space left on device"):
            execute(settings)
    assert len(RunDirectory(run.path).finished) == 1
    assert not list(run.path.rglob("*.tmp"))
    assert execute(settings).done


def test_unreadable_images_of_all_splits_are_listed_before_training(tmp_path):
    root = tmp_path / "tree"
    image_folder(root, classes=("a", "b"), size=8)
    broken = [next((root / split / "a").glob("*")) for split in ("train", "test")]
    for file in broken:
        file.write_bytes(b"not an image")
    raw = small().model_dump(mode="json") | {"data": {"name": "folder", "path": str(root)}, "stream": {"tasks": 1}}
    with pytest.raises(DataError) as caught:
        execute(check_config(raw))
    assert all(str(file) in str(caught.value) for file in broken)
    assert not Path(os.environ["PEARL_RUNS"]).exists()


@pytest.mark.parametrize("evaluate_on", ["test", "validation"])
def test_images_that_no_task_uses_are_not_opened(tmp_path, evaluate_on):
    root = tmp_path / "tree"
    image_folder(root, classes=("a", "b"), size=8)
    stream = {"tasks": 1, "per_class": 1, "test_per_class": 1, "validation": 0.5, "evaluate_on": evaluate_on}
    raw = small().model_dump(mode="json") | {"data": {"name": "folder", "path": str(root)}, "stream": stream}
    before = prepare(check_config(raw))
    (task,) = before.stream.tasks
    splits = {"train": before.source.train, "test": before.source.test}
    used = {splits["train"].images[row] for row in task.train}
    used |= {splits[before.stream.test_from].images[row] for row in task.test}
    unused = {file for split in splits.values() for file in split.images} - used
    assert len(used) == 4 and unused
    for file in unused:
        file.write_bytes(b"not an image")
    after = prepare(check_config(raw))
    assert np.array_equal(before.train[task.train], after.train[task.train])
    assert np.array_equal(before.test[task.test], after.test[task.test])

    for file in used:
        file.write_bytes(b"not an image")
    with pytest.raises(DataError) as caught:
        prepare(check_config(raw))
    assert {file for file in used | unused if str(file) in str(caught.value)} == used


def test_weights_of_another_shape_are_each_named(finished_run):
    wrong = load_config("digits", [*SMALL, f"backbone.weights={finished_run.path}", "backbone.width=5"])
    with pytest.raises(WeightsError, match=r"conv1\.weight is \(4, 3, 3, 3\), the network needs \(5, 3, 3, 3\)"):
        execute(wrong)


def test_crop_at_another_size_is_refused():
    with pytest.raises(DataError, match=r"these are 8 pixels; set images\.size=8, or use images\.augment=resized_crop"):
        execute(small("images.size=16"))


def test_a_target_that_matches_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"method\.targets='keys' matches no layer"):
        execute(small("method.targets=keys"))


DOMAINS = ["stream.tasks=1", "stream.domains=[plain, inverted]", "stream.per_class=30"]
DOMAINS += ["backbone={name: convnet, width: 4}"]


@pytest.mark.parametrize("method", ["finetune", "er", "joint", "{name: pearl, classifier: statistics}"])
def test_domains_are_learnt_one_after_the_other(method, tmp_path):
    settings = small(*DOMAINS, f"method={method}", "train.epochs=8")
    run = execute(settings, stop_after=1)
    run = execute(settings)  # in two goes
    assert len(run.results["tasks"][1]["classes"]) == 10 and run.manifests[1]["classes"] == []
    assert [*run.manifests[1]["also"]] == run.results["tasks"][1]["classes"]
    summary = run.summary
    assert summary["domain_il.final"] == summary["class_il.final"] == summary["task_il.final"] > 30
    assert summary["domain_il.worst"] == min(accuracy_matrix(run.counts, "class_il")[:, -1])
    whole = execute(settings, path=tmp_path / "whole")
    first, second = (load_state(one.path) for one in (run, whole))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_domains_of_a_method_that_learns_a_class_once():
    with pytest.raises(ConfigError, match=r"stream\.domains: method=pearl learns a class once; choose finetune"):
        execute(small(*DOMAINS))


def test_not_finite_loss_keeps_finished_tasks(tmp_path):
    settings = small("train.phases.adapt.lr=1e30", "train.phases.adapt.optimizer=sgd", "train.epochs=3")
    with pytest.raises(TrainingError, match=r"task 2 \(task2\), phase adapt"):
        execute(settings)
    assert len(RunDirectory(Run.open(Path(os.environ["PEARL_RUNS"]) / settings.id).path).finished) == 1


def test_not_a_run_directory(tmp_path):
    with pytest.raises(RunError, match=r"no config\.yaml"):
        Run.open(tmp_path)


def test_sub_networks_are_merged_by_functional_call(finished_run):
    """What an expert computes is the reference with task t's weights, nothing else."""
    method = load_method(finished_run.path, finished_run.config)
    x = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        features = functional_call(method.backbone, method.weights(2), (x,))
        torch.testing.assert_close(method(x, task=2), method.heads[2](features))


@pytest.mark.parametrize(
    "options", [["method=ranpac", "method.M=50"], ["method=klda", "method.D=50"]], ids=["ranpac", "klda"]
)
def test_random_features_are_drawn_again_when_a_run_is_loaded(options, tmp_path, monkeypatch):
    """They are not stored. Loading keeps away from the process's generator, but not from theirs."""
    monkeypatch.setenv("PEARL_RUNS", str(tmp_path))
    monkeypatch.setenv("PEARL_DATA", str(tmp_path))
    run = execute(small(*options, "engine.max_steps=1"))
    model = pearl.load(run.path)
    lift = next(part for part in model.method.modules() if hasattr(part, "matrix"))
    drawn = torch.randn(lift.shape, generator=torch.Generator().manual_seed(int(lift.seed)))
    assert torch.equal(lift.matrix, drawn)
