"""LoRanPAC: Low-rank Random Features and Pre-trained Models (Peng et al., ICLR 2025; first named TSVD).

A least-squares linear head on very many random features. They are nearly collinear, so that inverse small singular
values amplify noise: only the largest ones of the matrix of all images so far are kept, updated batch by batch. They
bound the memory, independent of the number of images and the square of the features.
"""

from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.adapters.bottleneck import Count
from pearl.methods.common.random_features import TruncatedSvd
from pearl.methods.prototypes.first_session import FORMS, of_forms
from pearl.methods.prototypes.lifted import Lifted
from pearl.nn import vit
from pearl.settings.declared import PhaseSpec
from pearl.settings.derived_defaults import AUTO, DerivedDefault, data_of, tasks_of


def _tuning(config: Any) -> str:
    return "adapter" if data_of(config) == "imagenet_r" and tasks_of(config) == 10 else AUTO


class LoRanPac(Lifted):
    """Least squares of least norm on the truncated singular value decomposition of random features.

    With `tuning` the first task adapts the network (SGD 0.01 with a cosine, 20 epochs, batches of 48, decay 5e-4), with
    a temporary cosine classifier on the random features. The authors tune for tasks of many classes (their `adapter_*`
    configurations: ImageNet-R in tasks of 20, CIFAR-100 in tasks of 10) and not for tasks of 5. The default is
    RanPAC's, so that the two differ only in their heads; on ImageNet-R in 10 tasks it is the authors' adapter. Without
    truncation it is RanPAC with this ridge. It stores E * min(rank, share of n and of E) numbers; with the authors' E =
    100,000 up to 4 GB, and the same in each task's folder, hence 10,000 here. Singular values below a millionth of the
    largest are dropped.

    Options:
        E: number of random features.
        rank: maximum singular values.
        truncate_percent: truncated share of the number of images so far, or of features.
        ridge: added to their squares; 0 is the solution of least norm.
        tuning: how the first task adapts a plain ViT (see aper), or `none`; `auto` is `adapter` on ImageNet-R in 10
            tasks, otherwise ssf on a plain ViT, as in RanPAC.
        extractor: `given` - the backbone is pretrained and stays frozen; `first_task` - task 1 trains it, with a linear
            head; `auto` - the first if it was pretrained.
        rows: images per update.
        ffn_num: width of the adapters.
        prompt_token_num: number of prompts, per block if deep.
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
        tuning: Annotated[
            Literal["auto", "none", "ssf", "adapter", "vpt_deep", "vpt_shallow"], DerivedDefault(_tuning)
        ] = "auto",
        extractor: Literal["auto", "given", "first_task"] = "auto",
        rows: Count = 10_000,
        ffn_num: Count = 64,
        prompt_token_num: Count = 5,
    ) -> None:
        if tuning == "auto":
            tuning = "ssf" if vit.is_plain(backbone) else "none"
        form = None if tuning == "none" else tuning
        put_in = {"width": ffn_num, "length": prompt_token_num}
        super().__init__(backbone, form, "loranpac", lifted=E, extractor=extractor, **put_in)
        self.share, self.ridge, self.rows = 1 - truncate_percent / 100, ridge, rows
        self.most = min(rank, max(round(self.share * E), 1))
        self.svd = TruncatedSvd(E)

    def keep(self, lifted: Tensor) -> None:
        """Add images and truncate."""
        seen = int(sum(self.statistics.tensors[f"{t}.count"].sum() for t in range(len(self.statistics))))
        self.svd.update(lifted, min(self.most, max(round(self.share * seen), 1)))

    def solve(self, task: Task, features: Tensor) -> Tensor:
        """Return U (S^2 + ridge)^-1 U' Z'Y."""
        return self.svd.least_squares(self.cross(), self.ridge)
