import copy
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, confusion_matrix

from pearl.data.augment import View
from pearl.evaluation.evaluate import Ensemble, Evaluator, count
from pearl.evaluation.evaluate import TestSet as Images
from pearl.evaluation.metrics import Counts, summary
from pearl.methods.base import Expert
from pearl.methods.bounds.finetune import Finetune
from pearl.methods.bounds.isolation import Isolation
from pearl.methods.pearl import Pearl
from pearl.methods.prompts.sprompts import SiPrompts
from pearl.nn.resnet import resnet18
from pearl.nn.timm import timm_backbone
from pearl.testing.tiny import config, learn, make_task, small_vit
from zoo import same, taught


def test_counts_of_a_worked_example():
    logits = [torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 3.0]]), torch.tensor([[5.0, 0.0, 1.0], [0.0, 0.0, 9.0]])]
    stage = count(logits, [torch.tensor([0, 0]), torch.tensor([2, 2])], [np.array([0, 1]), np.array([2])])
    assert stage.total.tolist() == [2, 0, 2]
    assert stage.class_il.tolist() == [1, 0, 1]
    assert stage.task_il.tolist() == [1, 0, 2]  # image 2 prefers class 1 to class 0; a task of one class is easy
    assert stage.confusion.tolist() == [[1, 1], [1, 1]]


def test_in_domains_an_answer_is_right_in_whatever_task():
    logits = [torch.tensor([[0.0, 1.0, 2.0, 0.0], [0.0, 1.0, 0.0, 2.0]]), torch.tensor([[0.0, 3.0, 1.0, 2.0]])]
    labels = [torch.tensor([0, 0]), torch.tensor([3])]  # told as class 2, 3 and 1
    stage = count(logits, labels, [np.array([0, 1]), np.array([2, 3])], domains=True)
    assert stage.domain_il.tolist() == [1, 0, 0, 1]
    assert stage.class_il.sum() == 0
    assert count(logits, labels, [np.array([0, 1]), np.array([2, 3])]).domain_il is None
    first = count([logits[0][:, :2]], labels[:1], [np.array([0, 1])], domains=True)
    results = {
        "tasks": [{"classes": ["a", "b"]}, {"classes": ["A", "B"]}],
        "stages": [first.to_json(), stage.to_json()],
    }
    counts = Counts.from_results(results)
    assert summary(counts)["place.final"] == (50 + 100) / 2
    assert "domain_il.final" not in summary(counts)  # nobody said that these tasks are domains
    for entry in results["stages"]:
        del entry["domain_il"]  # of all other methods
    assert "place.final" not in summary(Counts.from_results(results))


def test_who_is_made_for_domains_is_counted_so():
    method = SiPrompts(small_vit(), prompt_length=2)
    learn(method, range(2))
    stage = evaluator().stage(method, images_of(2), [np.array([0, 1]), np.array([2, 3])])
    assert stage.domain_il is not None and (stage.domain_il >= stage.class_il).all()


def test_a_class_of_two_tasks_is_counted_in_both():
    scores = torch.tensor([[3.0, 1.0, 0.0, 0.0], [0.0, 1.0, 2.0, 0.0], [0.0, 1.0, 0.0, 2.0]])
    labels = [torch.tensor([0, 1, 1]), torch.tensor([0, 2, 2])]
    stage = count([scores, scores], labels, [np.array([0, 1, 3]), np.array([0, 2])])
    assert stage.total.tolist() == [1, 2, 0, 1, 2]  # classes 0, 1, 3 of the first task, 0 and 2 of the second
    assert stage.class_il.tolist() == [1, 0, 0, 1, 1]
    assert stage.task_il.tolist() == [1, 1, 0, 1, 1]  # without class 2, the second image is of class 1
    # images named 0 (of both), 2 (of the second alone) and 3 (of the first alone)
    assert stage.confusion.tolist() == [[2, 1], [1, 2]]


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(0, 10_000))
def test_counts_equal_scikit_learn(sizes, seed):
    rng = np.random.default_rng(seed)
    bounds = np.cumsum([0, *sizes])
    labels = [torch.from_numpy(rng.integers(bounds[t], bounds[t + 1], 9)) for t in range(len(sizes))]
    logits = [torch.from_numpy(rng.standard_normal((9, bounds[-1])).astype("float32")) for _ in sizes]
    stage = count(logits, labels, np.split(np.arange(bounds[-1]), bounds[1:-1]))
    truth, best = torch.cat(labels).numpy(), torch.cat(logits).argmax(1).numpy()
    assert stage.class_il.sum() / stage.total.sum() == accuracy_score(truth, best)
    task_of = np.repeat(np.arange(len(sizes)), sizes)
    expected = confusion_matrix(task_of[truth], task_of[best], labels=range(len(sizes)))
    assert (stage.confusion == expected).all()
    masked = torch.cat(logits).clone()
    masked[torch.from_numpy(task_of[truth][:, None] != task_of[None])] = -torch.inf
    assert stage.task_il.sum() == (masked.argmax(1).numpy() == truth).sum()


def images_of(tasks):
    made = [make_task(t, per_class=5) for t in range(tasks)]
    return [Images(task.images, task.labels) for task in made]


def evaluator(batch_size=4):
    view = View(config().images, channels_last=False)
    return Evaluator(view, device=torch.device("cpu"), batch_size=batch_size, autocast=nullcontext)


def test_logits_do_not_depend_on_the_batch_size():
    torch.manual_seed(0)
    method = Finetune(resnet18(8, width=4))
    learn(method, range(2))
    method.eval()
    for small, large in zip(
        evaluator(1).logits(method, images_of(2)), evaluator(64).logits(method, images_of(2)), strict=True
    ):
        torch.testing.assert_close(small, large, rtol=1e-4, atol=1e-5)


def test_frozen_sub_networks_are_run_once_per_test_set():
    torch.manual_seed(0)
    method = Isolation(resnet18(8, width=4))
    calls = []
    original = method.experts

    def counted():
        def wrap(expert):
            def forward(x):
                calls.append(expert.key)
                return expert.forward(x)

            return Expert(expert.key, forward, expert.frozen)

        return [wrap(expert) for expert in original()]

    method.experts = counted
    stages, kept = [], evaluator(batch_size=64)
    for t in range(3):
        learn(method, range(t, t + 1))
        stages.append(kept.logits(method, images_of(t + 1)))
    assert len(calls) == 9  # 3 sub-networks x 3 test sets, not 1 + 4 + 9
    afresh = evaluator(batch_size=64).logits(method, images_of(3))
    assert all(torch.equal(a, b) for a, b in zip(afresh, stages[-1], strict=True))


def test_a_method_that_goes_on_learning_is_always_run_anew():
    torch.manual_seed(0)
    method = Finetune(resnet18(8, width=4))
    kept = evaluator()
    learn(method, range(1))
    first = kept.logits(method, images_of(1))[0]
    learn(method, range(1, 2))
    assert not torch.equal(kept.logits(method, images_of(2))[0][:, :2], first)


def vit(tasks):
    torch.manual_seed(0)
    return taught(Pearl(timm_backbone("test_vit", 32), reference="given"), tasks)


@pytest.mark.parametrize("make", [lambda: vit(3), lambda: taught(Pearl(resnet18(8, width=4)), 3)])
@pytest.mark.parametrize("count", [1, 8, 70])
@pytest.mark.parametrize("kept", [True, False])
@torch.no_grad()
def test_an_ensemble_is_the_method_whatever_way_it_takes(make, count, kept, monkeypatch):
    method = make()
    x = torch.randn(count, 3, 32, 32)
    if not kept:
        monkeypatch.setattr("pearl.evaluation.evaluate.KEPT", 0)
    plain = method(x)
    for fast in (True, False):
        method.fast = fast
        ensemble = Ensemble(method)
        for _ in range(2):
            same(ensemble(x), plain)
            same(ensemble(x, 1), plain[:, method.heads.columns(1)])


@torch.no_grad()
def test_few_images_take_one_pass_and_merge_nothing(monkeypatch):
    method = vit(3)
    ensemble, few = Ensemble(method), 66  # x 3 tasks x 5 tokens
    monkeypatch.setattr(Pearl, "weights", None)
    assert ensemble(torch.randn(few, 3, 32, 32)).shape == (few, 9)
    with pytest.raises(TypeError):
        ensemble(torch.randn(few + 1, 3, 32, 32))


@torch.no_grad()
def test_sub_networks_that_fit_are_merged_once(monkeypatch):
    method, merged = taught(Pearl(resnet18(8, width=4)), 3), []
    original = Pearl.weights
    monkeypatch.setattr(Pearl, "weights", lambda self, t: merged.append(t) or original(self, t))
    ensemble = Ensemble(method)
    for _ in range(3):
        ensemble(torch.randn(1, 3, 8, 8), 2)
    assert merged == [2]
    for _ in range(3):
        ensemble(torch.randn(1, 3, 8, 8))
    assert merged == [2, 1]  # task 0 is the reference


def growing(network, tasks):
    """A model after each of so many tasks."""
    method = taught(Pearl(network, reference="given"), tasks)
    for t in range(1, tasks + 1):
        grown = copy.deepcopy(method)
        grown.heads.blocks = grown.heads.blocks[:t]
        yield grown


@pytest.mark.parametrize("network", [lambda: resnet18(8, width=4), small_vit])
@torch.no_grad()
def test_a_task_asked_by_itself_says_the_same_bit_by_bit_as_tasks_are_added(network, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    known: list[torch.Tensor] = []
    for method in growing(network(), 5):
        for kept in (2**30, 0):  # as they fit into memory, and as they no longer do
            monkeypatch.setattr("pearl.evaluation.evaluate.KEPT", kept)
            ensemble = Ensemble(method)
            said = [ensemble(x, task=t) for t in range(len(method.heads))]
            assert all(torch.equal(new, old) for new, old in zip(said, known, strict=False))
            known = said


@torch.no_grad()
def test_all_tasks_in_one_batch_differ_by_rounding_alone_as_tasks_are_added(double):
    """A sum of n terms rounds by n eps at most: a dozen layers of fewer than 100 by 3e-13 of the largest."""
    torch.manual_seed(0)
    x, said = torch.randn(2, 3, 8, 8), []
    for method in growing(small_vit(), 6):
        ensemble = Ensemble(method)
        assert ensemble._at_once[1] >= len(x), "another way was taken"
        said.append(ensemble(x))
        same(said[-1], torch.cat([ensemble(x, task=t) for t in range(len(method.heads))], dim=1), 1e-12)
    for before, after in pairwise(said):
        same(after[:, : before.shape[1]], before, 1e-12)
