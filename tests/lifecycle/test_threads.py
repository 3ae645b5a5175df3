"""Threads use one model at once, beside training and beside foreign networks: each answer is what one thread gets."""

import copy
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import pearl
from pearl.evaluation.evaluate import Ensemble
from pearl.methods.base import Method
from pearl.methods.common.by_statistics import Statistics
from pearl.methods.common.subnetworks import HEADS
from pearl.methods.pearl import Pearl
from pearl.nn.fast.folding import norms_after_convs
from pearl.nn.functional import functional_call, shallow_copy
from pearl.nn.once import once
from pearl.testing.tiny import images, learn, on_threads, small_resnet
from photos import SETTINGS, digit, folders, weights_of, write_photos

PIXELS = np.stack([np.stack([image] * 3, -1) for label in range(4) for image in digit(label)[:1]])
SMALL = SETTINGS | {"backbone": {"name": "resnet18", "width": 2}, "engine": {"max_steps": 6}}


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A model with class statistics after one task, the next task's photos, and the model after that one."""
    root = tmp_path_factory.mktemp("shop")
    write_photos(root / "first", {"zero": 0, "one": 1}, 6)
    write_photos(root / "second", {"two": 2, "three": 3}, 6)
    with folders(root):
        pearl.learn(root / "one", root / "first", quiet=True, **SMALL)
        shutil.copytree(root / "one", root / "two")
        pearl.learn(root / "two", root / "second", quiet=True)
    return root


class Foreign(nn.Module):
    """A network of somebody else's."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))

    def forward(self, x):
        return self.layers(x)


def all_answer(questions, *, rounds):
    """Each round asks something new from eight threads, beside a foreign network: what they say is what it says alone.

    `questions` gives pairs of a question and its answer.
    """
    foreign, x = Foreign().eval(), images()
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        of_foreign = foreign(x)

        def others():
            with torch.no_grad():
                return all(torch.equal(foreign(x), of_foreign) for _ in range(30))

        for _ in range(rounds):
            asked = questions() * 4
            beside = pool.submit(others)
            assert all(on_threads(lambda: (pair := asked.pop())[1].equal(pair[0]()), len(asked)))  # noqa: B023
            assert beside.result()


@pytest.mark.parametrize("classifier", [HEADS, Statistics()], ids=["heads", "statistics"])
def test_first_questions_to_sub_networks(classifier):
    """Which are read, folded, merged and fused when they are first asked. 50 times, 25 with either classifier."""
    method = Pearl(small_resnet(), classifier=classifier)
    learn(method, range(2))
    alone, x = Ensemble(copy.deepcopy(method)), images()
    expected = alone(x), alone(x, 0)
    judged = alone.scorer(x)[1] if alone.scorer else None

    def questions():
        fresh = Ensemble(copy.deepcopy(method))
        asked = [(lambda: fresh(x), expected[0]), (lambda: fresh(x, 0), expected[1])]
        return [
            *asked[: 1 if fresh.scorer else 2],
            *([(lambda: fresh.scorer(x)[1], judged)] if fresh.scorer else []),
        ]

    all_answer(questions, rounds=25)


def test_first_requests_to_a_model(shop):
    """As of a web server that has just started; half of the requests ask what is unknown."""
    alone = pearl.load(shop / "two")
    expected = alone.logits(PIXELS), alone.logits_and_scores(PIXELS)[1]

    def questions():
        model = pearl.load(shop / "two")
        return [(lambda: model.logits(PIXELS), expected[0]), (lambda: model.logits_and_scores(PIXELS)[1], expected[1])]

    all_answer(questions, rounds=4)


def test_learning_beside_first_requests(shop, tmp_path):
    """What is learnt and what is answered have the bits that either has alone."""
    expected, path = pearl.load(shop / "one").logits(PIXELS), tmp_path / "beside"
    shutil.copytree(shop / "one", path)
    asked = 0
    with ThreadPoolExecutor(1) as pool:
        learning = pool.submit(pearl.learn, path, shop / "second", quiet=True)
        while not learning.done():
            model = pearl.load(shop / "one")  # which makes and fills a network while the other one is trained
            assert all(torch.equal(answer, expected) for answer in on_threads(lambda: model.logits(PIXELS), 2))  # noqa: B023
            asked += 1
        learning.result()
    assert asked > 1
    assert weights_of(path) == weights_of(shop / "two")


def test_a_model_is_loaded_by_one_thread(shop, monkeypatch):
    made = []
    monkeypatch.setattr(Method, "eval", lambda self: made.append(threading.get_ident()) or nn.Module.eval(self))
    model = pearl.load(shop / "two")
    assert len({id(method) for method in on_threads(lambda: model.method)}) == 1
    assert len(made) == 1


def test_loading_draws_no_random_numbers_of_the_process(shop):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert pearl.load(shop / "one").method
    assert torch.equal(torch.get_rng_state(), before)


def test_reading_a_network_changes_no_class():
    call, getattr_ = nn.Module.__call__, nn.Module.__getattr__

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x):
            assert nn.Module.__call__ is call and nn.Module.__getattr__ is getattr_
            return self.norm(self.conv(x))

    assert norms_after_convs(Watched()) == {"norm": "conv"}


# ------------------------------------------------------------------------------------- calls with other tensors


class Tied(nn.Module):
    """A network that has one weight twice, and sees during a call what another network's weight is."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.second.weight = self.first.weight
        self.other = []

    def forward(self, x):
        assert all(network.first.weight is not self.first.weight for network in self.other)
        return self.norm(self.second(self.first(x)))


@pytest.mark.parametrize("training", [True, False])
def test_a_call_with_other_tensors_leaves_the_network_alone(training):
    network, theirs, x = Tied().train(training), Tied().train(training), torch.randn(4, 3)
    theirs.load_state_dict(network.state_dict())
    network.other.append(network)
    weights = {"first.weight": torch.randn(3, 3, requires_grad=True), "norm.running_mean": torch.ones(3)}
    others = {name: tensor.detach().clone().requires_grad_(tensor.requires_grad) for name, tensor in weights.items()}
    ours, expected = functional_call(network, weights, (x,)), torch.func.functional_call(theirs, others, (x,))
    assert torch.equal(ours, expected), "the tied weight as well"
    ours.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(weights["first.weight"].grad, others["first.weight"].grad)
    assert torch.equal(weights["norm.running_mean"], others["norm.running_mean"]), "statistics change in place"
    for name, value in network.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name


def test_a_copy_has_hooks_and_methods_of_its_own():
    network = small_resnet().eval()
    network.maxpool.forward = network.maxpool.forward  # a method of this object
    copy = shallow_copy(network)
    assert copy.maxpool.forward.__self__ is copy.maxpool
    seen = []
    copy.layer1.register_forward_hook(lambda *_: seen.append(1))
    network(images())
    assert not seen
    assert torch.equal(copy(images()), network(images())) and seen == [1]
    with pytest.raises(KeyError):
        functional_call(network, {"layer1.0.conv1.wait": torch.zeros(1)}, (images(),))


def test_what_is_made_once_is_made_by_one_thread():
    made = []

    def make():
        time.sleep(0.05)  # as merging a network takes
        made.append(threading.get_ident())
        return len(made)

    get = once(make)
    assert on_threads(get) == [1] * 8 and len(made) == 1


def test_a_failure_is_not_kept():
    answers = iter([RuntimeError("no memory"), 7])

    def make():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    get = once(make)
    with pytest.raises(RuntimeError, match="no memory"):
        get()
    assert get() == 7
