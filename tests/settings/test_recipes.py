"""Every recipe runs end to end on small files in the official layouts, one step per phase."""

import pytest

from conftest import SHARED
from layouts import cifar100_npz, image_folder, imagenet_r, tiny_imagenet
from pearl.lifecycle.runs import execute, load_method
from pearl.settings.config import load_config, recipe_names

pytestmark = pytest.mark.slow


def narrower(name: str) -> list[str]:
    """The whole network takes minutes on a CPU; a narrower one goes the same way."""
    if name.endswith("-vit"):
        return ["backbone.name=timm/test_vit", "backbone.pretrained=true", "images.size=32", "images.resize=40"]
    if name.endswith("deit_tiny"):
        return ["backbone.name=timm/test_vit", "backbone.weights=none.safetensors", "images.size=32"]
    return ["backbone.width=4"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("official")
    cifar100_npz(root, classes=100, per_class=3)
    tiny_imagenet(root, classes=200, per_class=2)
    imagenet_r(root, classes=200, per_class=3, size=40)
    image_folder(root / "photos", classes=("a", "b"), size=80)
    image_folder(root / "grocery", classes=tuple(f"product {i}" for i in range(81)), splits={"train": 2, "test": 1})
    return root


@pytest.mark.parametrize("name", recipe_names())
def test_smoke(name, data, monkeypatch):
    monkeypatch.setenv("PEARL_DATA", str(data))
    config = load_config(name, narrower(name), smoke=True)
    run = execute(config)
    tasks = config.stream.tasks
    assert run.done
    assert len(run.results["stages"]) == tasks
    assert sum(run.results["stages"][-1]["total"]) >= len(run.results["tasks"][0]["classes"]) * tasks
    load_method(run.path, run.config)


@pytest.mark.parametrize("name", recipe_names())
def test_expected_figures_name_a_metric_and_a_place(name):
    from pearl.evaluation.metrics import Counts, summary
    from pearl.reports.text import HEADLINES

    one = {"total": [1], "class_il": [1], "task_il": [1], "confusion": [[1]]}
    counts = Counts.from_results({"tasks": [{"classes": ["a"]}], "stages": [one]})
    known = summary(counts, [1], [1])
    for metric, figure in load_config(name).expected.items():
        assert metric in known
        assert figure.where.startswith("Table ")
        assert metric in HEADLINES or metric.endswith("_pooled")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real CIFAR-100, which a user may not have")
def test_real_cifar100_reads(tmp_path):
    """The archive of the measurements, laid out as its own script does."""
    import subprocess
    import sys

    subprocess.run([sys.executable, "unpack.py", str(tmp_path), "cifar100"], cwd=SHARED, check=True)
    from pearl.data.sources import cifar100

    source = cifar100(path=str(tmp_path / "cifar100.npz"))
    assert source.classes[:3] == ("apple", "aquarium_fish", "baby")
    assert source.train.images.shape == (50000, 32, 32, 3)
    # per-channel means as published for CIFAR-100
    means = source.train.images.reshape(-1, 3).mean(0) / 255
    assert means.round(4).tolist() == [0.5071, 0.4865, 0.4409]


def test_the_paper_recipes_are_all_there():
    expected = {f"cifar100-{t}t-{net}" for t in (5, 10, 20) for net in ("resnet18", "bsc")}
    expected |= {f"tinyimagenet-{t}t-{net}" for t in (5, 10) for net in ("resnet18", "bsc")}
    expected |= {f"imagenet_r-{t}t-vit" for t in (5, 10, 20)}
    assert expected <= set(recipe_names())
