"""RanPAC: Random Projections and Pre-trained Models for Continual Learning (McDonnell et al., NeurIPS 2023).

A ridge-regression head on random features, from their second moments and class sums. Both are sums over tasks, so that
the head equals that for all images together.
"""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.adapters.bottleneck import Count
from pearl.methods.prototypes.closed_form import ridge
from pearl.methods.prototypes.first_session import FORMS, of_forms
from pearl.methods.prototypes.lifted import Lifted
from pearl.nn import vit
from pearl.settings.declared import PhaseSpec

RIDGES = tuple(10.0**power for power in range(-8, 9))


class RanPac(Lifted):
    """Ridge regression on random features of a network that the first task has adapted, if it is a plain ViT.

    Defaults are the authors' for ImageNet-R: 10,000 features, SSF trained on the first task (SGD 0.01 with a cosine, 20
    epochs, batches of 48, decay 5e-4) with a temporary cosine classifier. The ridge is chosen in each task, from 1e-8
    to 1e8: by the squared error on a random fifth of the task's images, of a head computed from the others. The ridge
    is at least the rounding error of the second moments, where their code divides by rounding errors. M^2 numbers are
    stored, in each task's folder too.

    Options:
        M: number of random features.
        ridge: a fixed ridge; null chooses it.
        tuning: how the first task adapts a plain ViT (see aper), or `none`; `auto` is ssf on a plain ViT.
        extractor: `given` - the backbone is pretrained and stays frozen; `first_task` - task 1 trains it, with a linear
            head; `auto` - the first if it was pretrained.
        ffn_num: width of the adapters.
        prompt_token_num: number of prompts, per block if deep.
    """

    phases = (PhaseSpec("extractor", "reference"), *of_forms("ranpac", FORMS[:-1]))

    def __init__(
        self,
        backbone: nn.Module,
        *,
        M: Count = 10_000,
        ridge: Annotated[float, Field(ge=0)] | None = None,
        tuning: Literal["auto", "none", "ssf", "adapter", "vpt_deep", "vpt_shallow"] = "auto",
        extractor: Literal["auto", "given", "first_task"] = "auto",
        ffn_num: Count = 64,
        prompt_token_num: Count = 5,
    ) -> None:
        if tuning == "auto":
            tuning = "ssf" if vit.is_plain(backbone) else "none"
        form = None if tuning == "none" else tuning
        put_in = {"width": ffn_num, "length": prompt_token_num}
        super().__init__(backbone, form, "ranpac", lifted=M, extractor=extractor, **put_in)
        self.ridge = ridge

    def keep(self, lifted: Tensor) -> None:
        """Add images to the second moments Z'Z."""
        gram = lifted.T @ lifted
        self.kept.add("gram", self.kept["gram"] + gram if "gram" in self.kept else gram)

    def solve(self, task: Task, features: Tensor) -> Tensor:
        """Return (Z'Z + ridge)^-1 Z'Y."""
        strength = self.chosen(task, features) if self.ridge is None else self.ridge
        gram = self.kept["gram"]
        rounding = torch.finfo(gram.dtype).eps * float(gram.diagonal().double().sum())
        return ridge(gram, self.cross(), max(strength, rounding)).T

    def chosen(self, task: Task, features: Tensor) -> float:
        """Return the ridge with the least error on a fifth of a task's images; see the class."""
        order = torch.randperm(len(features)).to(features.device)
        train, held = order.tensor_split([int(0.8 * len(order))])
        y = F.one_hot(task.labels - task.first_class, len(task.classes)).double()
        z, other = self.lift(features[train]).double(), self.lift(features[held]).double()
        return min(RIDGES, key=dict(zip(RIDGES, errors(z, y[train], other, y[held]), strict=True)).__getitem__)


def errors(z: Tensor, y: Tensor, held: Tensor, expected: Tensor) -> list[float]:
    """Return, per ridge, the mean squared error on held-out rows of the head computed from rows z (n, M), y (n, k)."""
    if len(z) < z.shape[1]:  # equivalent, with inner products of images instead of features
        values, vectors = torch.linalg.eigh(z @ z.T)
        read, target = held @ (z.T @ vectors), vectors.T @ y
    else:
        values, vectors = torch.linalg.eigh(z.T @ z)
        read, target = held @ vectors, vectors.T @ (z.T @ y)
    values = values.clamp(min=0)[:, None]
    return [float(F.mse_loss(read @ (target / (values + strength)), expected)) for strength in RIDGES]
