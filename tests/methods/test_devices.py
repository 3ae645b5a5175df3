"""What the pretended device refuses, and that no step waits for it; that methods learn there is in the conformance."""

import numpy as np
import pytest
import torch
from torch import nn

from pearl.data.augment import View
from pearl.testing.fake_device import CROSSED, FAKE_DEVICE, fake_device, learn_two
from pearl.testing.tiny import config
from pearl.training.engine import Engine
from zoo import ZOO

pytestmark = pytest.mark.slow

STEADY = [
    "finetune",
    "joint",
    "isolation",
    "pearl",
    "lwf",
    "pnn",
    "ssre",
    "ncm",
    "aper",
    "ease",
    "lae",
    "sema",
    "dia",
    "ada",
    "ssiat",
    "seqlora",
    "inflora",
]


@pytest.mark.parametrize(("method", "augment"), [("pearl", "resized_crop"), *((method, "crop") for method in STEADY)])
def test_no_step_of_a_capturable_phase_waits_for_the_device(method, augment):
    """The host waits as often in two steps of a phase as in six."""
    few, many = (waits(method, augment, steps) for steps in (2, 6))
    if method == "sema":  # its training decides whether the second task adds a block or trains the head
        few, many = few[:2], many[:2]
    assert few and few == many


def waits(name: str, augment: str, steps: int) -> list[tuple[str, list[str]]]:
    """For what, in each capturable phase."""
    actual = []

    class Listen(Engine):
        def train(self, method, task, phase, position, resume):
            before = len(CROSSED)
            super().train(method, task, phase, position, resume)
            if phase.capturable:
                actual.append((phase.name, CROSSED[before:]))

    settings = config(train={"epochs": 1, "batch_size": 4}, engine={"max_steps": steps, "precision": "fp32"})
    view = View(settings.images.model_copy(update={"augment": augment}))
    with fake_device():
        learn_two(ZOO[name](), Listen(settings, device="cpu"), view)
    return actual


REFUSED = {
    "a sum of both": lambda there, here: there + here,
    "both in one": lambda there, here: torch.cat([there, here]),
    "NumPy": lambda there, here: there.numpy(),
    "the host's generator": lambda there, here: torch.rand(3, device=there.device, generator=torch.Generator()),
    "the host's generator in place": lambda there, here: there.normal_(generator=torch.Generator()),
    "indices of the host's": lambda there, here: here[there.long()],
    "the host's values put there": lambda there, here: there.index_put_((here.long(),), here),
    "the host's rows chosen": lambda there, here: there.index_select(0, here.long()),
    "a list of the device's and the host's": lambda there, here: torch.stack([there.sum(), here.sum()]),
    "the host's sum of the device's": lambda there, here: here.sum().add_(there.sum()),
    "what has no numbers": lambda there, here: there + there.new([1.0, 2.0, 3.0]),
    "the host's matrix": lambda there, here: torch.nn.functional.linear(there, here[None]),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_a_gpu_refuses(how):
    with fake_device(), pytest.raises((RuntimeError, TypeError), match=r"device|host|numpy|generator"):
        REFUSED[how](torch.arange(3.0, device=FAKE_DEVICE), torch.arange(3.0))


def put(into, where, what):
    into[where] = what
    return into


ALLOWED = {
    "a number of the host's": lambda there, here: there + here[2],
    "indices of its own on the host": lambda there, here: there[here.long()],
    "what was moved": lambda there, here: there + here.to(there),
    "what was moved back": lambda there, here: (there.cpu() + here).to(there.device),
    "what is read": lambda there, here: torch.tensor(there.tolist(), device=there.device) + there[1].item(),
    "what is copied into it": lambda there, here: there.copy_(here),
    "a list as indices": lambda there, here: there[[2, 0]],
    "a list of what is put": lambda there, here: put(there, [2, 0], 5.0),
    "an array as indices": lambda there, here: there[np.array([2, 0])],
    "what is made of a list": lambda there, here: torch.as_tensor([1.0, 2.0, 3.0], device=there.device) + there,
    "what is made of both": lambda there, here: torch.tensor([there[1], 2.0], device=there.device),
    "what is printed": lambda there, here: there if f"{there[2]:.1f}" == "2.0" else None,
}


@pytest.mark.parametrize("how", ALLOWED)
def test_what_a_gpu_does(how):
    with fake_device():
        actual = ALLOWED[how](torch.arange(3.0, device=FAKE_DEVICE), torch.arange(3.0))
        assert actual.device == FAKE_DEVICE
        actual = actual.cpu()
    assert torch.equal(actual, ALLOWED[how](torch.arange(3.0), torch.arange(3.0)))


def gradient_of(module):
    """What a module of a method's gives, and passes back, for images of the same random numbers."""

    def actual(device):
        x = torch.randn(4, 3, 8).to(device).requires_grad_()
        made = module().to(device)(x)
        made = made[0] if isinstance(made, tuple) else made
        made.square().sum().backward()
        return torch.cat([made.detach().flatten(), x.grad.flatten()])

    return actual


USED = {
    "a recurrent network": gradient_of(lambda: nn.GRU(8, 5, batch_first=True)),
    "a transformer": gradient_of(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)),
    "weight normalisation": gradient_of(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))),
    "an embedding": lambda device: nn.Embedding(5, 3).to(device)(torch.tensor([1, 2], device=device)).detach(),
    "a distribution": lambda device: torch.distributions.MultivariateNormal(
        torch.zeros(3, device=device), torch.eye(3, device=device)
    ).sample((4,)),
    "a decomposition": lambda device: torch.linalg.svd(torch.randn(3, 4).to(device)).S,
    "a function's gradient": lambda device: torch.func.grad(lambda x: (x**3).sum())(torch.randn(3).to(device)),
    "a function of each row": lambda device: torch.func.vmap(lambda x: x * x.sum())(torch.randn(3, 2).to(device)),
    "the largest": lambda device: torch.randn(9).to(device).topk(3).values,
    "a mean that follows": lambda device: (
        torch.randn(3).to(device).mul_(0.9).add_(torch.randn(3).to(device), alpha=0.1)
    ),
}


@pytest.mark.parametrize("how", USED)
def test_what_methods_are_made_of(how):
    with fake_device():
        torch.manual_seed(0)
        there = USED[how](FAKE_DEVICE).cpu()
    torch.manual_seed(0)
    torch.testing.assert_close(there, USED[how](torch.device("cpu")))


WAITED_FOR = {
    "to the host": lambda there, here: there.cpu(),
    "to the device": lambda there, here: here.to(there),
    "copied in": lambda there, here: there.copy_(here),
    "copied out": lambda there, here: here.copy_(there),
    "a number": lambda there, here: there[0].item(),
    "numbers": lambda there, here: there.tolist(),
    "a condition": lambda there, here: bool((there > 1).any()),
    "indices of the host's": lambda there, here: there[here.long()],
    "a mask": lambda there, here: there[there > 1],
    "places": lambda there, here: there.nonzero(),
    "kinds": lambda there, here: there.unique(),
}


@pytest.mark.parametrize("how", WAITED_FOR)
def test_what_is_waited_for(how):
    with fake_device():
        there, here = torch.zeros(3, device=FAKE_DEVICE) + 1, torch.zeros(3)
        CROSSED.clear()
        assert (there[1:] * 2 + here[0] - there[there.long()[:2]]).shape == (2,)
        assert not CROSSED
        WAITED_FOR[how](there, here)
        assert CROSSED


def test_nothing_is_left_of_it():
    """Constants that were made elsewhere have numbers, those on a real meta device have none."""
    view, pixels = View(config().images), torch.zeros(2, 8, 8, 3, dtype=torch.uint8)
    assert view.test(pixels.to("meta")).is_meta
    with fake_device():
        assert view.test(pixels.to(FAKE_DEVICE)).cpu().isfinite().all()
    assert view.test(pixels.to("meta")).is_meta and torch.tensor([1.0]).device.type == "cpu"
