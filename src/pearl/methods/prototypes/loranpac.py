"""LoRanPAC: Low-rank Random Features and Pre-trained Models (Peng et al., ICLR 2025; first named TSVD).

A linear head of least squares on very many random features. They are nearly collinear, and small singular values would
be inverted to noise: of the matrix of all images so far the largest ones alone are kept, brought up to date with each
batch, so that memory is bounded by them, not by images or by the square of the features.
"""

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.adapters.bottleneck import Count
from pearl.methods.common.random_features import TruncatedSvd
from pearl.methods.prototypes.first_session import FORMS, of_forms
from pearl.methods.prototypes.lifted import Lifted
from pearl.settings.declared import PhaseSpec


class LoRanPac(Lifted):
    """Least squares of least norm on what a truncated singular value decomposition keeps of random features.

    Nothing is trained; with `tuning` the first task adapts the network first, as in the authors' `adapter_*`
    configurations (SGD 0.01 with a cosine, 20 epochs, batches of 48, decay 5e-4), by a classifier of the random
    features' cosines that is then thrown away. Without truncation it is RanPAC with this ridge. Kept are
    E * min(rank, share of n and of E) numbers; at the authors' E = 100,000 that is up to 4 GB, and as much with each
    task's folder, hence 10,000 here. Singular values below a millionth of the largest are dropped.

    Options:
        E: random features.
        rank: singular values that are kept, at most.
        truncate_percent: of as many as there are images so far, or features, this share is cut off.
        ridge: added to their squares; 0 is the solution of least norm.
        tuning: how the first task adapts a plain ViT (see aper), or `none`.
        extractor: `given` - the backbone comes with weights, which stay; `first_task` - task 1 trains it, with a linear
            head; `auto` - the first if it was pretrained.
        rows: images whose features are added at once.
        ffn_num: width of the adapters.
        prompt_token_num: prompts, of each block if deep.
    """

    phases = (PhaseSpec("extractor", "reference"), *of_forms("loranpac", FORMS[:-1]))
    lifted_head = True

    def __init__(
        self,
        backbone: nn.Module,
        *,
        E: Count = 10_000,
        rank: Count = 10_000,
        truncate_percent: Annotated[float, Field(ge=0, lt=100)] = 25.0,
        ridge: Annotated[float, Field(ge=0)] = 0.0,
        tuning: Literal["none", "ssf", "adapter", "vpt_deep", "vpt_shallow"] = "none",
        extractor: Literal["auto", "given", "first_task"] = "auto",
        rows: Count = 10_000,
        ffn_num: Count = 64,
        prompt_token_num: Count = 5,
    ) -> None:
        form = None if tuning == "none" else tuning
        put_in = {"width": ffn_num, "length": prompt_token_num}
        super().__init__(backbone, form, "loranpac", lifted=E, extractor=extractor, **put_in)
        self.share, self.ridge, self.rows = 1 - truncate_percent / 100, ridge, rows
        self.most = min(rank, max(round(self.share * E), 1))
        self.svd = TruncatedSvd(E)

    def keep(self, lifted: Tensor) -> None:
        """Add images, of which the share is kept that is not cut off."""
        seen = int(sum(self.statistics.tensors[f"{t}.count"].sum() for t in range(len(self.statistics))))
        self.svd.update(lifted, min(self.most, max(round(self.share * seen), 1)))

    def solve(self, task: Task, features: Tensor) -> Tensor:
        """U (S^2 + ridge)^-1 U' Z'Y."""
        return self.svd.least_squares(self.cross(), self.ridge)
