"""The page about an evaluation, and its JSON: the evaluation's numbers, small pictures, nothing from elsewhere."""

import base64
import io
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from test_report import EVIL, Reader

import pearl
from pearl.reports.evaluated import SHOWN, page
from photos import SETTINGS, folders, write_photos


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A model of four classes in two tasks, and photos of these and of a stranger."""
    root = tmp_path_factory.mktemp("shop")
    write_photos(root / "first", {"zero": 0, "one": 1}, 12)
    write_photos(root / "second", {"two": 2, "thre\u00e9": 3}, 12)
    write_photos(root / "test", {"zero": 0, "one": 1, "two": 2, "thre\u00e9": 3, "nine": 9}, 12, start=50)
    with folders(root):
        pearl.learn(root / "model", root / "first", quiet=True, **SETTINGS)
        pearl.learn(root / "model", root / "second", quiet=True, fast=True)
    return root


@pytest.fixture(scope="module")
def evaluation(shop):
    return pearl.load(shop / "model").evaluate(shop / "test")


@pytest.fixture(scope="module")
def made(evaluation):
    return page(evaluation, "shop on test")


def test_its_numbers_are_the_evaluations(evaluation, made):
    reader = Reader(made)
    matrix = reader.files["predicted-class-of-the-images-of-each-class.csv"][1:]
    np.testing.assert_allclose([[float(cell) for cell in row[1:]] for row in matrix], evaluation.confusion / 12 * 100)
    rows = {row[0]: row[1:] for row in reader.files["accuracy-of-each-class.csv"][1:]}
    assert float(rows["two"][2]) == pytest.approx(100 * evaluation.class_il[evaluation.classes.index("two")] / 12)
    (stranger,) = reader.files["unknown-classes.csv"][1:]
    assert stranger[:2] == ["nine", "12"]
    assert float(stranger[2]) == pytest.approx(100 * evaluation.refused[~evaluation.is_known].mean())
    coverage = {float(row[1]): float(row[2]) for row in reader.files["coverage-against-accuracy.csv"][1:]}
    assert coverage == pytest.approx(evaluation.coverage)
    assert f"calibration error {evaluation.calibration_error:.1f}" in reader.text
    assert f"AUROC {evaluation.auroc:.1f}" in reader.text


def test_the_worst_mistakes_are_shown_the_surest_first(evaluation, made):
    pictures = [attributes for tag, attributes in Reader(made).tags if tag == "img"]
    wrong = np.flatnonzero(evaluation.is_known & (evaluation.answers.best != evaluation.answers.true))
    assert 0 < len(pictures) == min(len(wrong), SHOWN)
    first = wrong[evaluation.answers.sure[wrong].argmax()]
    assert pictures[0]["alt"].startswith(evaluation.classes[evaluation.answers.true[first]])
    shown = Image.open(io.BytesIO(base64.b64decode(pictures[0]["src"].partition("base64,")[2]))).convert("L")
    meant = Image.open(evaluation.files[first]).resize(shown.size, Image.Resampling.BICUBIC)
    assert np.abs(np.asarray(shown, float) - np.asarray(meant, float)).mean() < 5
    assert len(made) < 1_500_000


def test_it_needs_nothing_from_elsewhere_and_no_name_breaks_it(shop, evaluation):
    tasks = tuple(replace(task, name=EVIL, classes=(EVIL, *task.classes[1:])) for task in evaluation.tasks)
    reader = Reader(page(replace(evaluation, tasks=tasks, notes=(EVIL,)), EVIL))
    assert EVIL in reader.text
    for tag, attributes in reader.tags:
        assert tag not in {"script", "link", "iframe", "object"}
        assert all(not key.startswith("on") for key in attributes)
        assert (attributes.get("src") or "data:").startswith("data:")
    policy = next(a["content"] for _, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_without_strangers_or_statistics_or_mistakes(evaluation):
    known = evaluation.is_known
    files = tuple(np.array(evaluation.files)[known])
    sure = evaluation.answers[known]
    plain = replace(evaluation, unknown_classes=(), files=files, answers=sure, in_distribution=None)
    text = Reader(page(plain, "x")).text
    assert "Unknown classes" not in text and "Calibration" in text
    right = replace(plain, answers=replace(sure, best=sure.true, best_own=sure.true))
    assert "worst mistakes" not in Reader(page(right, "x")).text


def test_of_many_classes_those_with_most_mistakes_are_shown(evaluation):
    """Of 40 classes the last two are taken for each other, the others are right."""
    task = replace(evaluation.tasks[0], classes=tuple(f"c{i}" for i in range(40)))
    true = np.repeat(np.arange(40), 2)
    best = np.where(true >= 38, 77 - true, true)
    answers = replace(evaluation.answers, true=true, best=best, best_own=best, sure=np.full(80, 0.9))
    files = (evaluation.files[0],) * 80
    many = replace(
        evaluation, tasks=(task,), unknown_classes=(), files=files, answers=answers, in_distribution=np.arange(80.0)
    )
    reader = Reader(page(many, "x"))
    matrix = reader.files["predicted-class-of-the-images-of-each-class.csv"]
    assert len(matrix) == SHOWN + 1 and {"c38 39", "c39 40"} <= {row[0] for row in matrix}
    assert f"The {SHOWN} of 40 classes with the most mistakes." in reader.text


def test_command(shop, evaluation, cli, tmp_path, monkeypatch):
    out, _ = cli("evaluate", shop / "model", "--data", shop / "test", "-o", tmp_path / "new" / "p.html")
    assert "Confusion between classes" in (tmp_path / "new" / "p.html").read_text()
    assert out.endswith(f"wrote {tmp_path}/new/p.html\n")
    assert f"AUROC {evaluation.auroc:.1f} %" in out and "'nine'" in out
    assert re.search(rf"correct \(%\) +{evaluation.coverage[100]:.1f} ", out)
    strange = 12 - evaluation.refused[~evaluation.is_known].sum()
    assert f"{12 - strange} of 12 images of unknown classes" in out
    facts = json.loads(cli("evaluate", shop / "model", "--data", shop / "test", "--json")[0])
    assert facts["unknown"]["unknown_classes"]["classes"] == ["nine"]
    assert facts["accuracy"] == pytest.approx(evaluation.accuracy)
    before = shutil.copytree(shop / "model", tmp_path / "model")
    for name, complaint in (("model/classes.json", "ends in .html"), ("new", "is a folder")):
        _, err = cli("evaluate", before, "--data", shop / "test", "-o", tmp_path / name, code=2)
        assert complaint in err
    assert "unknown_rate=2" in cli("evaluate", before, "--data", shop / "test", "--unknown-rate", 2, code=2)[1]
