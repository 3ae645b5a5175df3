"""Online ER and DER++: the whole network is trained on each batch as it arrives, together with a memory.

Losses and memory are those of the task-based methods (`methods.rehearsal`); only the loop differs.
"""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from pearl.data.batches import Task
from pearl.methods.rehearsal.derpp import DerPlusPlus
from pearl.methods.rehearsal.er import Er, Images
from pearl.online.learner import Learner, Network, Setup
from pearl.settings.sections import Count


class Replay(Learner):
    """Base: Adam on the loss of a rehearsal method; each batch is offered to its reservoir afterwards.

    The optimizer's state is part of the state_dict, as extra state, so that a run resumes with the same bits.

    Options:
        buffer_size: stored images.
        minibatch_size: rehearsed images per step.
        iterations: steps per batch; images are augmented anew in each.
        lr: learning rate of Adam.
    """

    def __init__(self, setup: Setup, method: Er | DerPlusPlus, iterations: int, lr: float) -> None:
        super().__init__(setup)
        self.method, self.iterations, self.lr, self.steps = method, iterations, lr, 0
        setup.engine.to_device(method)
        self.optimizer = torch.optim.Adam(self.method.parameters(), lr=lr)
        self._stored: Tensor | None = None  # the optimizer's state, until all parameters are loaded

    def observe(self, images: Tensor, labels: Tensor) -> None:
        """See `Learner.observe`."""
        self._restore_optimizer()
        new, method = self.count(labels), self.method
        task = Task(0, "stream", (), 0, images.numpy(), labels.numpy(), self.setup.view, self.setup.device)
        if new:
            head = method.heads.grow(new).to(self.setup.device)
            self.optimizer.add_param_group({"params": [*head.parameters()]})
        method.memory.open(task, int(self.classes))
        method.train()
        for _ in range(self.iterations):
            batch = next(task.batches(len(labels) + 1, int(torch.randint(2**62, ()))))
            self.optimizer.zero_grad(set_to_none=True)
            method.loss(task, batch).backward()
            self.optimizer.step()
            self.steps += 1
        method.eval()
        logits = (method._logits,) if isinstance(method, DerPlusPlus) else ()
        method.memory.offer(task, batch, *logits)

    def networks(self) -> dict[str, Network]:
        """Return the whole network, which changes with each step."""
        view, device = self.setup.view, self.setup.device
        return {f"after {self.steps} steps": lambda images: self.method(view.test(images.to(device)))}

    def scores(self, features: Sequence[Tensor]) -> Tensor:
        """Return the logits."""
        return features[0]

    def images_bytes(self) -> int:
        """Return the bytes of the memory."""
        return sum(buffer.nbytes for buffer in self.method.memory.buffers())

    def get_extra_state(self) -> Tensor:
        """Return the number of steps, and the optimizer's step and moments of each parameter, as one vector."""
        parts = [torch.tensor([float(self.steps)])]
        for parameter in self.method.parameters():
            if state := self.optimizer.state.get(parameter):
                parts += [state["step"].reshape(1), state["exp_avg"].flatten(), state["exp_avg_sq"].flatten()]
        return torch.cat([part.detach().cpu() for part in parts])

    def set_extra_state(self, state: Tensor) -> None:
        """Store it until all parameters are loaded."""
        self.steps, self._stored = int(state[0]), state[1:].clone()

    def _restore_optimizer(self) -> None:
        if self._stored is None:
            return
        self.optimizer, rest = torch.optim.Adam(self.method.parameters(), lr=self.lr), self._stored
        for parameter in self.method.parameters() if len(rest) else ():
            step, first, second, rest = rest.split([1, *[parameter.numel()] * 2, len(rest) - 1 - 2 * parameter.numel()])
            moments = (torch.empty_like(parameter).copy_(part.view(parameter.shape)) for part in (first, second))
            self.optimizer.state[parameter] = dict(
                zip(("step", "exp_avg", "exp_avg_sq"), (step[0].clone(), *moments), strict=True)
            )
        self._stored = None


class OnlineEr(Replay):
    """ER with a reservoir (Chaudhry et al., 2019): cross-entropy on each batch and on images of the memory.

    Options:
        buffer_size: stored images.
        minibatch_size: rehearsed images per step.
        iterations: steps per batch; images are augmented anew in each.
        lr: learning rate of Adam.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        buffer_size: Images = 500,
        minibatch_size: Count = 32,
        iterations: Count = 3,
        lr: Annotated[float, Field(gt=0)] = 3e-4,
    ) -> None:
        method = Er(setup.backbone, buffer_size=buffer_size, minibatch_size=minibatch_size)
        super().__init__(setup, method, iterations, lr)


class OnlineDerPlusPlus(Replay):
    """DER++ with a reservoir (Buzzega et al., NeurIPS 2020): ER, and distances to the logits stored with each image.

    Options:
        alpha: weight of the logits.
        beta: weight of the labels.
        buffer_size: stored images.
        minibatch_size: rehearsed images per step, for either term.
        iterations: steps per batch; images are augmented anew in each.
        lr: learning rate of Adam.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        alpha: Annotated[float, Field(ge=0)] = 0.1,
        beta: Annotated[float, Field(ge=0)] = 0.5,
        buffer_size: Images = 500,
        minibatch_size: Count = 32,
        iterations: Count = 3,
        lr: Annotated[float, Field(gt=0)] = 3e-4,
    ) -> None:
        method = DerPlusPlus(
            setup.backbone, alpha=alpha, beta=beta, buffer_size=buffer_size, minibatch_size=minibatch_size
        )
        super().__init__(setup, method, iterations, lr)
