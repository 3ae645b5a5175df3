"""What is said of a task before it is trained, and of files that are not read."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.data.sources import left_out, tree
from pearl.lifecycle.notes import notes
from pearl.lifecycle.small import SIZE, config, learn, make_task, small_vit
from pearl.methods.adapters.ada import Ada
from pearl.methods.adapters.sema import Sema
from pearl.methods.pearl import Pearl
from pearl.methods.prompts.coda_prompt import CodaPrompt
from pearl.methods.prompts.l2p import L2P
from pearl.methods.prompts.pool import PromptMethod
from pearl.methods.regularization.lwf import Lwf
from pearl.methods.sparse.clnp import Clnp
from pearl.nn.dynamic.pruned import AdaLoraRule, DoraRule
from pearl.nn.lowrank import select_targets
from pearl.nn.timm import timm_backbone
from pearl.training.engine import Engine, Observer
from zoo import ZOO


def task(counts: list[int], index: int = 1) -> Task:
    labels = np.repeat(np.arange(len(counts)), counts)
    pixels = np.zeros((len(labels), SIZE, SIZE, 3), np.uint8)
    names = tuple("abcdefg"[: len(counts)])
    view = View(config().images, channels_last=False)
    return Task(index, "new", names, 3, pixels, labels + 3, view, torch.device("cpu"))


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([20, 20], []),
        ([20, 4], ["fewer than 5 images of 'b' (4)"]),
        ([5, 49], []),
        ([5, 50], ["'b' (50 images) will be named too often where it is 'a' (5 images)"]),
        ([1] * 7, ["'a' (1), 'b' (1), 'c' (1), 'd' (1), 'e' (1) and 2 more"]),
        ([30], ["a task of one class"]),
    ],
)
def test_tasks_that_are_hard_to_learn(counts, said):
    found = list(notes(ZOO["pearl"](), task(counts)))
    assert len(found) == len(said)
    assert all(words in line for words, line in zip(said, found, strict=True)), found


class Losses(Observer):
    def __init__(self):
        self.seen = []

    def event(self, kind, **facts):
        if kind == "epoch" and facts["task"] == 1:
            self.seen.append(facts["loss"])


WITH_OTHER_TERMS = (Lwf, L2P, PromptMethod, CodaPrompt, Sema, Ada, Clnp, AdaLoraRule, DoraRule)  # beside cross-entropy


@pytest.mark.parametrize("method", ZOO)
def test_one_class_is_a_note_where_there_is_nothing_to_learn_from(method):
    """A method that says it compares with other classes has a loss; a cross-entropy of one class is 0."""
    made, losses = ZOO[method](), Losses()
    learn(made, range(2), Engine(config(), device="cpu", observer=losses), classes=1, per_class=6)
    said = any("a task of one class" in line for line in notes(made, task([6])))
    assert said == made.own_classes
    if not made.own_classes:
        assert not losses.seen or max(losses.seen) > 0
    elif not any(isinstance(part, WITH_OTHER_TERMS) for part in (made, getattr(made, "rank", None))):
        assert max(losses.seen) == 0


@pytest.mark.parametrize("model", ["mixer_s32_224", "convnext_atto", "resmlp_12_224"])
def test_networks_without_attention_adapt_linear_layers(model):
    network = timm_backbone(model, 224)
    linear = {f"{n}.weight" for n, m in network.named_modules() if isinstance(m, torch.nn.Linear)}
    assert linear <= {target.parameter for target in select_targets(network)}


def test_how_much_is_adapted():
    network = small_vit()
    layers = {n: p.numel() for n, p in network.named_parameters() if n.endswith("weight") and p.ndim > 1}
    keys = sum(size // 3 for name, size in layers.items() if "qkv" in name)
    share = round(100 * keys / sum(layers.values()))
    assert Pearl(network).notes(make_task(0)) == [
        f"a task adapts 3 of {len(layers)} layers, which hold {share} % of weights"
    ]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(5):
            Image.fromarray(np.full((SIZE, SIZE, 3), 40 * i, np.uint8)).save(tmp_path / name / f"{i}.png")
    return tmp_path


def test_files_that_are_not_read_are_counted(photos):
    assert left_out(photos) == []
    for name in ("a/1.xyz", "a/2.XYZ", "b/notes.txt", "b/.DS_Store", "readme.md"):
        (photos / name).write_text("")
    (photos / "b" / "more").mkdir()
    (photos / "b" / "0.png").rename(photos / "b" / "more" / "0.png")
    assert left_out(photos) == [
        f"{photos}: files that are no image known here (2 .xyz, 1 .txt) are left out",
        f"{photos}: 1 image deeper than class folders left out; --nested makes classes of their folders",
    ]


def test_they_are_said_by_every_verb(photos, cli):
    (photos / "a" / "scan.xyz").write_text("")
    words = "1 .xyz"
    model = photos.parent / "model"
    small = ["backbone=resnet18", "backbone.width=2", "images.size=16", "train.epochs=1"]
    assert words in cli("learn", model, "--data", photos, *small)[1]
    assert words in cli("evaluate", model, "--data", photos)[0]
    assert words in json.loads(cli("evaluate", model, "--data", photos, "--json")[0])["notes"][0]
    assert words in cli("predict", model, photos / "a")[1]
    run = cli("run", "digits", "--smoke", "data=folder", f"data.path={photos}", "stream.tasks=1")[1]
    assert words in run


@pytest.mark.parametrize("suffix", [".avif", ".heic", ".webp", ".tiff"])
def test_what_phones_write_is_read(photos, suffix):
    image = Image.open(photos / "a" / "3.png")
    if suffix == ".heic":
        pytest.importorskip("pillow_heif").register_heif_opener()
    image.save(photos / "a" / f"photo{suffix}")
    assert photos / "a" / f"photo{suffix}" in tree(photos)["a"]
    assert left_out(photos) == []
