"""What the pretended device refuses, and that no step waits for it; that methods learn there is in the conformance."""

import pytest
import torch

from pearl.data import augment as augmentation
from pearl.data.augment import View
from pearl.lifecycle.elsewhere import CROSSED, ELSEWHERE, elsewhere, learn_on
from pearl.lifecycle.small import config
from zoo import ZOO


@pytest.mark.parametrize("method", ["finetune", "isolation", "pearl", "lwf", "seqlora", "inflora"])
@pytest.mark.parametrize("augment", ["crop", "resized_crop"])
def test_no_step_of_a_steady_phase_waits_for_the_device(method, augment):
    """As much crosses between host and device in two steps of a phase as in six."""
    assert crossings(method, augment, 2) == crossings(method, augment, 6)


def crossings(name: str, augment: str, steps: int) -> list[str]:
    settings = config(train={"epochs": 1, "batch_size": 4}, engine={"max_steps": steps, "precision": "fp32"})
    view = View(settings.images.model_copy(update={"augment": augment}))
    with elsewhere():
        method = ZOO[name]()
        augmentation._scale_and_shift.cache_clear()  # it may have crossed before
        CROSSED.clear()
        learn_on(ELSEWHERE, method, settings, view)
    assert CROSSED
    return [*CROSSED]


REFUSED = {
    "a sum of both": lambda there, here: there + here,
    "both in one": lambda there, here: torch.cat([there, here]),
    "NumPy": lambda there, here: there.numpy(),
    "the host's generator": lambda there, here: torch.rand(3, device=there.device, generator=torch.Generator()),
    "the host's generator in place": lambda there, here: there.normal_(generator=torch.Generator()),
    "indices of the host's": lambda there, here: here[there.long()],
    "the host's values put there": lambda there, here: there.index_put_((here.long(),), here),
    "the host's rows chosen": lambda there, here: there.index_select(0, here.long()),
    "the host's matrix": lambda there, here: torch.nn.functional.linear(there, here[None]),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_a_gpu_refuses(how):
    with elsewhere(), pytest.raises((RuntimeError, TypeError)):
        REFUSED[how](torch.arange(3.0, device=ELSEWHERE), torch.arange(3.0))


ALLOWED = {
    "a number of the host's": lambda there, here: there + here[2],
    "indices of its own on the host": lambda there, here: there[here.long()],
    "what was moved": lambda there, here: there + here.to(there),
    "what was moved back": lambda there, here: (there.cpu() + here).to(there.device),
    "what is read": lambda there, here: torch.tensor(there.tolist(), device=there.device) + there[1].item(),
    "what is copied into it": lambda there, here: there.copy_(here),
}


@pytest.mark.parametrize("how", ALLOWED)
def test_what_a_gpu_does(how):
    with elsewhere():
        found = ALLOWED[how](torch.arange(3.0, device=ELSEWHERE), torch.arange(3.0))
        assert found.device == ELSEWHERE
        found = found.cpu()
    assert torch.equal(found, ALLOWED[how](torch.arange(3.0), torch.arange(3.0)))
