"""What is said of a task before it is trained, and of files that are not read."""

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.data.sources import folder_scan, left_out, tree
from pearl.errors import DataError
from pearl.lifecycle.notes import notes
from pearl.lifecycle.predict import named
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
from pearl.settings.sections import ImagesConfig
from pearl.testing.tiny import SIZE, config, learn, make_task, small_vit
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
        ([5, 50], ["'b' (50 images) will be predicted too often instead of 'a' (5 images)"]),
        ([1] * 7, ["'a' (1), 'b' (1), 'c' (1), 'd' (1), 'e' (1) and 2 more"]),
        ([30], ["a task of one class"]),
    ],
)
def test_tasks_that_are_hard_to_learn(counts, said):
    actual = list(notes(ZOO["pearl"](), task(counts)))
    assert len(actual) == len(said)
    assert all(words in line for words, line in zip(said, actual, strict=True)), actual


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
    assert said == made.task_local_loss
    if not made.task_local_loss:
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
        f"a task adapts 3 of {len(layers)} layers, which hold {share} % of the weights"
    ]


def test_a_crop_that_throws_most_of_a_picture_away_is_said():
    def said(**images):
        task = make_task(0)
        task.view = View(ImagesConfig(**images))
        return [note for note in notes(ZOO["pearl"](), task) if "of the picture" in note]

    assert said(size=224, resize=256) == said(size=112) == []
    (line,) = said(size=112, resize=256)
    assert line.startswith("the network reads the central 112 of 256 pixels, 19 % of the picture")
    assert line.endswith("or set it to 128 (auto)")


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
        f"{photos}: files that are not images (2 .xyz, 1 .txt) are left out",
        f"{photos}: 1 image deeper than class folders left out; move them up into these",
    ]
    for path in (photos / "b").glob("*.png"):
        path.unlink()
    with pytest.raises(
        DataError, match=r"no image in .*/b \(1 .txt, 1 image in folders\): .*; --nested makes classes of"
    ):
        tree(photos)
    assert {*tree(photos, nested=True)} == {"a", "b/more"}


def test_what_operating_systems_leave_is_no_class_and_no_image(photos):
    for folder in ("__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN", "#recycle", ".Trashes", "a/@eaDir", "a/notes"):
        (photos / folder).mkdir()
    for name in ("a/Thumbs.db", "a/desktop.ini", "b/@eaDir"):
        (photos / name).touch()
    (photos / "a" / "0.png").rename(photos / "a" / "@eaDir" / "thumbnail.png")
    assert {*tree(photos)} == {*tree(photos, nested=True)} == {"a", "b"}
    assert left_out(photos) == [] and len(named([str(photos)])) == 9


@pytest.mark.parametrize(
    ("suffix", "words"),
    [
        (".heic", r"5 .heic\): HEIC needs pip install 'pearl\[heic\]'$"),
        ("", r"5 no suffix\): give images without a suffix one, as .jpg$"),
        (".nef", r"5 .nef\): convert images of other kinds to JPEG or PNG$"),
    ],
)
def test_a_class_without_images_says_what_is_there_and_what_reads_it(photos, suffix, words, monkeypatch):
    monkeypatch.setattr(folder_scan, "suffixes", lambda: frozenset({".png"}))
    for file in (photos / "a").iterdir():
        file.rename(file.with_suffix(suffix))
    with pytest.raises(DataError, match=f"^no image in {photos}/a \\({words}"):
        tree(photos)


def test_linked_class_folders_are_predicted_as_they_are_evaluated(photos, tmp_path_factory):
    links = tmp_path_factory.mktemp("links")
    for name in ("a", "b"):
        (links / name).symlink_to(photos / name)
    (photos / "a" / "up").symlink_to(links)
    assert named([str(links)]) == [file for files in tree(links).values() for file in files]


def test_a_name_in_two_forms_is_one_class(photos):
    composed, decomposed = (unicodedata.normalize(form, "Açaí") for form in ("NFC", "NFD"))
    (photos / "a").rename(photos / f"{decomposed} ")
    assert [*tree(photos)] == [composed, "b"]
    (photos / "b").rename(photos / composed)
    with pytest.raises(DataError, match=f"both are class '{composed}'; put them into one folder"):
        tree(photos)


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
