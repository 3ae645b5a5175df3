"""APER: Revisiting Class-Incremental Learning with Pre-Trained Models (Zhou et al., IJCV 2024; first named ADAM).

The first task adapts a pretrained network to the stream. The features of the original and the adapted network are
concatenated; both are frozen, and a class is the mean of these features.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.adapters.bottleneck import Count
from pearl.methods.base import Phase
from pearl.methods.common.class_moments import ClassMoments, cosines
from pearl.methods.prototypes.first_session import FORMS, FirstSession, Form, of_forms
from pearl.nn import vit
from pearl.nn.task_modules import CosineHeads
from pearl.settings.derived_defaults import AUTO, DerivedDefault, convolutional


def _form(config: Any) -> str:
    return "finetune" if convolutional(config) else AUTO


class Aper(FirstSession):
    """Nearest class mean by cosine, in the concatenated features of the original network and the adapted one.

    Defaults are the authors' for ImageNet-R: SGD with a cosine, decay 5e-4; SSF and shallow VPT 20 epochs at 0.01 in
    batches of 48, adapters 20 at 0.05 in batches of 24 (decay 5e-3), deep VPT 5 at 0.05 in batches of 16, fine-tuning 5
    at 0.01 in batches of 128. The cosine classifier with a learnt scale that trains them is discarded. The two halves
    are weighted by their norms. Without pretrained weights only the adapted half is used (ours; the paper has only
    pretrained networks).

    Options:
        tuning: how the first task adapts the network: `ssf`, scales and shifts; `adapter`, bottlenecks parallel to the
            MLPs; `vpt_deep`, `vpt_shallow`, prompts; `finetune`, all weights, of any network. `auto` is ssf on a plain
            ViT and finetune elsewhere.
        ffn_num: width of the adapters.
        prompt_token_num: number of prompts, per block if deep.
    """

    phases = of_forms("aper", FORMS)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        tuning: Annotated[Form | Literal["auto"], DerivedDefault(_form)] = "auto",
        ffn_num: Count = 64,
        prompt_token_num: Count = 5,
    ) -> None:
        form: Form = tuning if tuning != "auto" else "ssf" if vit.is_plain(backbone) else "finetune"
        super().__init__(backbone, form, "aper", width=ffn_num, length=prompt_token_num, extractor="given")
        self.merged = bool(backbone.pretrained)
        self.statistics = ClassMoments(self.heads.dim * (2 if self.merged else 1))

    def learn(self, task: Task) -> Iterator[Phase]:
        """Adapt to the first task; compute class means in every task."""
        head = CosineHeads(self.heads.dim, 1.0, learnable=True)
        head.grow(len(task.classes))
        yield from self.tune(task, head.to(self.device), self.adapted)
        self.observe(task)

    def extract(self, x: Tensor) -> Tensor:
        """Return features (B, dim) of the original network followed by those (B, dim) of the adapted one."""
        adapted = self.adapted(x)
        return torch.cat([self.backbone(x), adapted], dim=1) if self.merged else adapted

    def score(self, features: Tensor) -> Tensor:
        """Return the cosine to each class's mean."""
        return cosines(features, self.statistics.means())
