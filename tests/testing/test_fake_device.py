"""Models and runs on a device that is not the CPU: learnt, interrupted, asked, judged and refitted."""

from functools import partial

import numpy as np
import pytest
import torch

import pearl
from pearl.errors import Interrupted
from pearl.lifecycle.learning import resume
from pearl.lifecycle.refit import refit
from pearl.testing.fake_device import FAKE_DEVICE, fake_device
from photos import SETTINGS, StopAt, digit, learn, weights_of, write_photos

pytestmark = pytest.mark.slow

PRECISE = {**SETTINGS, "engine": {"precision": "fp32"}}
CHAIN = {"name": "pearl", "classifier": {"name": "statistics", "train": "all"}}


@pytest.fixture
def photos(tmp_path):
    write_photos(tmp_path / "first", {"zero": 0, "one": 1})
    write_photos(tmp_path / "second", {"two": 2, "three": 3})
    write_photos(tmp_path / "again", {"one": 1, "four": 4}, start=16)
    write_photos(tmp_path / "strange", {"nine": 9})
    return tmp_path


def test_a_model(photos):
    """The second task with images held out, the third with a class that is known."""
    path, data = photos / "model", [photos / "first", photos / "second", photos / "strange"]
    images = [*digit(2)[:10], *digit(3)[:10]]
    pixels = np.stack(images)[..., None].repeat(3, -1)
    how = {"quiet": True, "device": "cpu"}
    with fake_device():
        pearl.learn(path, photos / "first", method=CHAIN, **how, **PRECISE)
        pearl.learn(path, photos / "second", holdout=0.25, **how)
        pearl.learn(path, photos / "again", **how)
        model = pearl.load(path, device="cpu")
        model.device = FAKE_DEVICE
        assert model.outcome is not None and model.method.device == FAKE_DEVICE
        said, seen, judged = model.predict(images), model.evaluate(data), model.logits_and_scores(pixels)
    here = pearl.load(path, device="cpu")
    assert [answer.name for answer in said] == [answer.name for answer in here.predict(images)]
    assert seen.rows() == here.evaluate(data).rows()
    for ours, its in zip(judged, here.logits_and_scores(pixels), strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-3, atol=1e-3)


def test_an_interrupted_task(photos):
    begin = partial(learn, data=photos / "first", overrides=PRECISE, device="cpu")
    with fake_device():
        for name in ("whole", "broken"):
            begin(photos / name)
        learn(photos / "whole", photos / "second", device="cpu")
        with pytest.raises(Interrupted):
            learn(photos / "broken", photos / "second", device="cpu", show=StopAt("adapt", 5))
        resume(photos / "broken", device="cpu")
    assert weights_of(photos / "broken") == weights_of(photos / "whole")


def test_a_run_and_its_refit(tmp_path, monkeypatch):
    with fake_device():
        run = pearl.run("digits", smoke=True, quiet=True, device="cpu", method={"name": "pearl", "classifier": "heads"})
        there = refit(run.path, device="cpu")
    monkeypatch.setenv("PEARL_RUNS", str(tmp_path / "others"))
    here = refit(run.path, device="cpu")
    assert there.path != here.path and there.summary == here.summary
