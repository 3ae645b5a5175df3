"""SLCA++: Unleash the Power of Sequential Fine-tuning for Continual Learning with Pre-training (Zhang et al., 2024).

One low-rank update is trained on all tasks in sequence, at a lower learning rate than the heads, which reduces
forgetting. Heads are then aligned on features sampled from a normal distribution per class.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.adapters.seqlora import SeqLora
from pearl.methods.base import Phase
from pearl.methods.common.alignment import Aligned, alignment, draws_of_classes, symmetric_cross_entropy
from pearl.nn import vit
from pearl.nn.task_modules import TaskHeads
from pearl.settings.declared import PhaseSpec
from pearl.settings.derived_defaults import on_cifar

TARGETS = [r"attn\.qkv\.weight", r"mlp\.fc1\.weight", r"mlp\.fc2\.weight"]

Weight = Annotated[float, Field(ge=0)]
Auto = Literal["auto"]


class SlowLora(Aligned, SeqLora):
    """One low-rank update for all tasks, whose A is initialised with the leading right singular vectors of its weight.

    There are two sets of heads: `trained_heads` are trained task by task; `heads`, used for predictions, are aligned
    copies of them.
    """

    backbones = "vit"
    task_local_loss = False  # the alignment trains heads against each other
    floor = 1e-4  # added to variances

    def __init__(self, backbone: nn.Module, **options: Any) -> None:
        vit.require_plain(backbone)
        super().__init__(backbone, targets=TARGETS, reference="given", **options)
        self.trained_heads = TaskHeads(self.heads.dim)

    def add(self, prefix: str) -> None:
        """Add factors of each target, with this name prefix; B A is zero at first."""
        for target in self.low_rank:
            weight = self.backbone.get_parameter(target.parameter)
            rank = min(self.rank, *target.shape)
            vectors = torch.linalg.svd(weight.detach().double(), full_matrices=False).Vh[:rank]
            self.update.add(f"{prefix}A.{target.label}", vectors.to(weight))
            self.update.add(f"{prefix}B.{target.label}", weight.new_zeros(target.shape[0], rank))

    def new_head(self, task: Task) -> nn.Linear:
        """Add the head of a new task to both sets; return the trained one."""
        self.heads.grow(len(task.classes)).to(self.device)
        return self.trained_heads.grow(len(task.classes)).to(self.device)

    def take_heads(self) -> None:
        """Copy the trained heads to the ones for predictions."""
        self.heads.load_state_dict(self.trained_heads.state_dict())


class SlcaPlusPlus(SlowLora):
    """One network: a low-rank update, biases, norm layers and the class token are trained through all tasks.

    Updates are 0.8 B A of fused attention projections and both MLP layers. The loss is symmetric cross-entropy among a
    task's own classes. In the alignment, features of the task k tasks ago are multiplied by 1 / (1 + m k), m uniform in
    `decay` +- 0.01, and logits are normalised; for predictions, its head gets (1 + decay k) times the features. The
    next task continues with the heads before the alignment.

    Defaults are the authors' (GengDavid/SLCA 169d4e6): SGD with a cosine, batches of 128, heads at 0.01, updates at
    0.005 in the first task and 0.001 later, the rest at 0.001; ImageNet-R 50 epochs without decay, CIFAR-100 20 epochs
    with decay 5e-4; alignment 5 epochs at 0.01. Their rates all end at 1e-4; here only that of heads does, and the
    others end at the same share of their initial value. Statistics of old classes do not change.

    Options:
        rank: rank of the update.
        scale: the update is scale * B A.
        ce: weight of the cross-entropy; `auto` is 1 on CIFAR-100 and 0.5 elsewhere.
        rce: weight of the reverse cross-entropy; `auto` is 0.1 on CIFAR-100 and 0.5 elsewhere.
        decay: relative decrease of a task's features with each later task (mu).
        temperature: temperature of the normalised logits in the alignment; null disables normalisation.
        draws: features per class in an epoch of the alignment.
    """

    phases = (
        PhaseSpec("slcapp_first", "first", groups=("lora", "body", "head")),
        PhaseSpec("slcapp", "later", groups=("lora", "body", "head")),
        PhaseSpec("slcapp_align", "later", draws_of_classes, features_only=True),
    )

    def __init__(
        self,
        backbone: nn.Module,
        *,
        rank: Annotated[int, Field(ge=1)] = 4,
        scale: Annotated[float, Field(gt=0)] = 0.8,
        ce: Annotated[Weight | Auto, on_cifar(1.0, 0.5)] = "auto",
        rce: Annotated[Weight | Auto, on_cifar(0.1, 0.5)] = "auto",
        decay: Weight = 0.02,
        temperature: Annotated[float, Field(gt=0)] | None = 0.1,
        draws: Annotated[int, Field(ge=1)] = 256,
    ) -> None:
        super().__init__(backbone, rank=rank, scale=scale)
        self.ce, self.rce = 0.5 if ce == "auto" else ce, 0.5 if rce == "auto" else rce
        self.decay, self.temperature, self.draws = decay, temperature, draws
        norms = {name for name, module in backbone.named_modules() if isinstance(module, nn.LayerNorm)}
        self.further = [
            name
            for name, _ in backbone.named_parameters()
            if name == "cls_token" or name.endswith("bias") or name.rpartition(".")[0] in norms
        ]

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train with a low rate, from the heads before the alignment; then compute statistics and align."""
        self.requires_grad_(False)
        head = self.new_head(task)
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        params = {
            "lora": self.start(task),
            "body": [self.backbone.get_parameter(name) for name in self.further],
            "head": [*head.parameters()],
        }
        for parameter in [*params["lora"], *params["body"], *params["head"]]:
            parameter.requires_grad_(True)

        def loss(batch: Batch) -> Tensor:
            logits = head(self.features(batch.x))
            return symmetric_cross_entropy(logits, batch.y - task.first_class, self.ce, self.rce)

        yield Phase("slcapp" if task.id else "slcapp_first", params, loss, capturable=True)
        self.requires_grad_(False)
        self.remember(task, self.features_of(task))
        self.take_heads()
        if task.id:
            draws = self.gaussians(self.draws, self.floor, scale=self.shortened)
            yield alignment("slcapp_align", self.heads, draws, norm=self.temperature)
            self.requires_grad_(False)

    def shortened(self, uniform: Tensor) -> Tensor:
        """Return the factors (classes, draws) of features in the alignment, from numbers in [0, 1) of that shape."""
        sizes = self.heads.sizes()
        ages = torch.arange(len(sizes), device=uniform.device).flip(0)
        ages = ages.repeat_interleave(torch.tensor(sizes, device=uniform.device))[:, None]
        return 1 / (1 + (self.decay + 0.02 * (uniform - 0.5)) * ages)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """See `Method.forward`: heads of earlier tasks get features times a larger factor."""
        features, last = self.features(x), len(self.heads) - 1
        logits = torch.cat([head((1 + self.decay * (last - t)) * features) for t, head in enumerate(self.heads)], dim=1)
        return logits if task is None else logits[:, self.columns(task)]
