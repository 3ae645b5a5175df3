"""SEMA: Self-Expansion of Pre-trained Models with Mixture of Adapters for Continual Learning (Wang et al., CVPR 2025).

Adapters are parallel to the MLPs of a frozen ViT. The last blocks have several, which a router mixes per image. Each
has a descriptor of its training images; a block gets a new adapter if all its descriptors find the images of a new task
unusual.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.errors import ConfigError
from pearl.methods.adapters.bottleneck import Adapters, Bottleneck, mixed
from pearl.methods.base import Phase, own_loss
from pearl.methods.common.frozen_vit import IMAGES, FrozenVit
from pearl.methods.prompts.prefixes import check_blocks
from pearl.nn import vit
from pearl.nn.precision import full, outside_autocast
from pearl.nn.task_modules import Grown
from pearl.settings.declared import PhaseSpec, UpcomingTask

FEW = 3  # fewer errors give no standard deviation

Count = Annotated[int, Field(ge=1)]
Block = Annotated[int, Field(ge=0)]


class Descriptor(nn.Module):
    """An autoencoder of token means, with statistics of its reconstruction errors in training."""

    record: Tensor

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(dim, width), nn.Linear(width, dim)
        self.register_buffer("record", torch.zeros(3))  # number of errors, their mean, their standard deviation

    def forward(self, means: Tensor) -> Tensor:
        """Map token means (B, dim) to errors (B,): the mean square over dimensions."""
        with outside_autocast(means):
            return (self.decode(self.encode(full(means))) - full(means)).square().mean(1)

    @torch.no_grad()
    def remember(self, means: Tensor) -> None:
        """Record the errors on token means (N, dim)."""
        errors = self(means).double()
        deviation = errors.std(correction=int(len(errors) > 1))
        self.record.copy_(torch.stack([errors.new_tensor(len(errors)), errors.mean(), deviation]))

    @torch.no_grad()
    def unusual(self, means: Tensor) -> Tensor:
        """Return the number of standard deviations (B,) between errors and the recorded ones; 0 if few are recorded."""
        count, mean, deviation = self.record
        z = (self(means) - mean).abs() / deviation.clamp(min=1e-12)
        return torch.where(count < FEW, 0, z)


class Mixture(nn.Module):
    """The adapters of one block, their descriptors, and a logistic router on the mean of an image's tokens."""

    def __init__(self, dim: int, width: int, described: int) -> None:
        super().__init__()
        self.adapters = Grown(lambda: Bottleneck(dim, width))
        self.descriptors = Grown(lambda: Descriptor(dim, described))
        self.router = Grown(lambda: nn.Linear(dim, 1))

    def grow(self, device: torch.device) -> tuple[list[nn.Parameter], Descriptor]:
        """Add an adapter with its descriptor; return its parameters and those of its row of the router."""
        new = [part.grow().to(device) for part in (self.adapters, self.router, self.descriptors)]
        return [*new[0].parameters(), *new[1].parameters()], new[2]  # type: ignore[return-value]

    def unusual(self, means: Tensor) -> Tensor:
        """Return the mean number of standard deviations of token means (B, dim) from the nearest descriptor."""
        return torch.stack([descriptor.unusual(means).mean() for descriptor in self.descriptors]).min()  # type: ignore[operator]

    def weights(self, tokens: Tensor) -> Tensor:
        """Return the weights of the adapters (B, adapters) for tokens (B, n, dim); they sum to 1."""
        means = tokens.mean(1)
        with outside_autocast(means):
            return torch.cat([row(full(means)) for row in self.router], dim=1).softmax(1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, n, dim) to the term that is added (B, n, dim)."""
        return mixed([*self.adapters], tokens, self.weights(tokens)[:, None])


def _described(task: UpcomingTask) -> int:
    share = task.options["hold_out"]
    return task.kept(share) if share else task.images


class Sema(FrozenVit):
    """A frozen ViT with an adapter in every block, and in the last ones as many as the tasks need.

    Defaults are the authors': SGD with momentum 0.9, a cosine and weight decay 5e-4, batches of 32. Adapters and head
    20 epochs at 5e-3 (CIFAR-100: 5), descriptors 20 at 0.01. After the first task, only new adapters and the task's
    head are trained; without new adapters, only the head.

    A block grows at most once per task, beginning with the first block that finds the images unusual. As in the
    authors' code, errors deviate upwards or downwards, and descriptors are linear. Unlike there, errors are recorded
    once a descriptor is trained, and are in the state: the authors' are those of its last 500 images in training, and
    lost when a model is saved. In both cases these are images of the descriptor's training, so that by overfitting
    other images of the same classes deviate as much as those of new ones; `hold_out` records errors on held-out images
    instead. The decision uses the mean over all images of a task, independent of order and batches; `detect_batch_size`
    gives the authors' rule. Both use augmented images, by a fixed seed. Heads of earlier tasks do not decay. The
    features of earlier tasks' images change, since the router is shared: a new adapter gets a share of each image.

    Options:
        ffn_num: width of an adapter.
        rd_dim: width of a descriptor.
        adapt_start_layer: first block that may grow, from 0.
        adapt_end_layer: last block that may grow.
        exp_threshold: standard deviations above which a block grows; -1 for always, a large number for never.
        detect_batch_size: decide by the first batch of this many images above the threshold; null decides by the whole
            task.
        hold_out: share of a task's images held out from a new descriptor's training to record errors on; with 0 errors
            are recorded on its training images, as in the authors' code.
    """

    task_local_loss = True
    untrained = (".router.0.",)  # the first adapter of a block has no others to be weighted against
    may_rest = ("sema_func",)
    phases = (  # of later tasks, for each block that grows
        PhaseSpec("sema_func", images=lambda task: [] if task.id else task.images, at_least=True),
        PhaseSpec("sema_rd", images=lambda task: [] if task.id else _described(task), at_least=True),
        PhaseSpec("sema_head", "later", lambda task: [], at_least=True),
    )

    def __init__(
        self,
        backbone: nn.Module,
        *,
        ffn_num: Count = 16,
        rd_dim: Count = 128,
        adapt_start_layer: Block = 9,
        adapt_end_layer: Block = 11,
        exp_threshold: float = 2.0,
        detect_batch_size: Count | None = None,
        hold_out: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    ) -> None:
        super().__init__(backbone)
        check_blocks(backbone, [adapt_end_layer], "adapt_end_layer")
        growing = range(adapt_start_layer, adapt_end_layer + 1)
        if not growing:
            raise ConfigError(
                f"method.adapt_start_layer={adapt_start_layer} is after adapt_end_layer={adapt_end_layer}; no block "
                f"could grow: set it to at most that"
            )
        others = [block for block in range(len(backbone.blocks)) if block not in growing]  # type: ignore[arg-type]
        self.adapters = Adapters(others, lambda: Bottleneck(self.dim, ffn_num))
        self.mixtures = Adapters(growing, lambda: Mixture(self.dim, ffn_num, rd_dim))
        self.exp_threshold, self.detect_batch_size, self.hold_out = exp_threshold, detect_batch_size, hold_out

    def learn(self, task: Task) -> Iterator[Phase]:
        """Grow blocks that find the images unusual, one by one; if none does, train only the head."""
        head = self.heads.grow(len(task.classes)).to(self.device)
        blocks = [*self.mixtures.by_block()]
        if not task.id:
            yield from self.grow(task, blocks, self.adapters.parameters())
            return
        left = [*blocks]
        while left and (block := self.unfamiliar(task, left)) is not None:
            left.remove(block)
            yield from self.grow(task, [block])
        if left == blocks:
            yield Phase("sema_head", self.only(head.parameters()), own_loss(self.features, head, task), capturable=True)
            self.requires_grad_(False)

    def grow(self, task: Task, blocks: Sequence[int], others: Iterable[nn.Parameter] = ()) -> Iterator[Phase]:
        """Add an adapter to these blocks and train it with the head; then its descriptor, and record its errors."""
        head, params = self.heads[task.id], [*others]
        descriptors: dict[int, Descriptor] = {}
        for block in blocks:
            new_params, descriptors[block] = self.mixture(block).grow(self.device)
            params += new_params
        params = self.only([*params, *head.parameters()])
        yield Phase("sema_func", params, own_loss(self.features, head, task), capturable=True)

        def rebuilt(batch: Batch) -> Tensor:
            means = self.token_means(batch.x)
            return torch.stack([descriptor(means[block]).mean() for block, descriptor in descriptors.items()]).sum()

        params = self.only(parameter for new_params in descriptors.values() for parameter in new_params.parameters())
        trained, recorded = task.hold_out(self.hold_out) if self.hold_out else (None, task)
        yield Phase("sema_rd", params, rebuilt, data=trained, capturable=True)
        self.requires_grad_(False)
        batches = self.seen(recorded if len(recorded) else task)  # with a single image per class there are none
        for block, descriptor in descriptors.items():
            descriptor.remember(torch.cat([means[block] for means in batches]))

    def unfamiliar(self, task: Task, blocks: Sequence[int]) -> int | None:
        """Return the first of these blocks whose descriptors all find the task's images, or a batch, unusual."""
        batches = self.seen(task)
        if self.detect_batch_size is None:
            batches = [{block: torch.cat([means[block] for means in batches]) for block in blocks}]
        for means in batches:
            for block in blocks:
                if self.mixture(block).unusual(means[block]) > self.exp_threshold:
                    return block
        return None

    def seen(self, task: Task) -> list[dict[int, Tensor]]:
        """Return token means of a task's augmented images, batch by batch; reproducible."""
        self.eval()
        return [self.token_means(batch.x) for batch in task.batches(self.detect_batch_size or IMAGES, seed=0)]

    @torch.no_grad()
    def token_means(self, x: Tensor) -> dict[int, Tensor]:
        """Return, for each block that may grow, the mean (B, dim) of the tokens that its adapters read."""
        means: dict[int, Tensor] = {}

        def watch(block: int, adapter: vit.Adapter) -> vit.Adapter:
            def read(tokens: Tensor) -> Tensor:
                means[block] = full(tokens.mean(1))
                return adapter(tokens)

            return read

        watched = {block: watch(block, adapter) for block, adapter in self.mixtures.by_block().items()}
        vit.tokens(self.backbone, x, adapters=self.adapters.by_block() | watched)
        return means

    def mixture(self, block: int) -> Mixture:
        """Return the adapters of a block that may grow."""
        return self.mixtures[f"{block}"]  # type: ignore[return-value]

    def features(self, x: Tensor) -> Tensor:
        """Return features (B, dim) with the adapters of all blocks, mixed per image, in a single pass."""
        return vit.features(self.backbone, x, adapters=self.adapters.by_block() | self.mixtures.by_block())

    def size(self) -> int:
        """Count the parameters for predictions; descriptors are used only when new tasks arrive."""
        return sum(p.numel() for name, p in self.named_parameters() if ".descriptors." not in name)

    def facts(self, task: int) -> dict[str, Any]:
        """Return the number of adapters in each block that may grow."""
        return {"adapters": {f"{block}": len(self.mixture(block).adapters) for block in self.mixtures.by_block()}}
