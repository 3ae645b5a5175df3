"""ConvPrompt: Convolutional Prompting meets Language Models for Continual Learning (Roy et al., CVPR 2024).

Each block has a prompt that all tasks share. A task adds convolutions of it. Their outputs, weighted by the block's
tokens, are prefixes of its keys and values. The more similar a task is to earlier ones, the fewer it adds. Prediction
takes one pass without task inference.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.errors import ConfigError
from pearl.methods.base import Phase
from pearl.methods.prompts.coda_prompt import orthonormal
from pearl.methods.prompts.dualprompt import NotNegative
from pearl.methods.prompts.pool import PromptMethod
from pearl.methods.prompts.text_features import TextFeatures
from pearl.nn import vit
from pearl.nn.precision import full
from pearl.nn.task_modules import LinearHead, TaskHeads, TaskTensors

Count = Annotated[int, Field(ge=1)]


class NormedClassifier(LinearHead):
    """A LayerNorm and a linear classifier."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__(dim, classes)
        self.norm = nn.LayerNorm(dim)
        nn.init.trunc_normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Map features (B, dim) to logits (B, classes)."""
        return super().forward(self.norm(full(features)))


class NormedHeads(TaskHeads):
    """A `NormedClassifier` per task."""

    def block(self, classes: int) -> nn.Linear:
        """Return a classifier for one task."""
        return NormedClassifier(self.dim, classes)


class ConvPrompt(PromptMethod):
    """A ViT with prefixes computed, block by block, from a shared prompt, convolutions and the class token.

    Defaults are the authors': Adam at 2.5e-3 with a cosine, 10 epochs, batches of 128. As in their code, the ViT's norm
    layers are trained, at the full rate in the first task, so that features of earlier tasks drift; keys are not
    trained, since their optimizer holds keys that were replaced. The number of kernels that a task adds follows from
    attributes of its classes written by a language model: with `similarity`, it is ceil((1 - s) *
    num_prompts_per_task). As in their code, s is the mean over the set of earlier attributes of the best cosine with a
    new one; an attribute of several classes counts once.

    Options:
        num_prompts_per_task: maximum kernels that a task adds.
        similarity: an .npz file with `names` (N,) and `features` (N, width) of classes or of their attributes, one or
            more rows per class name; without it each task adds the maximum.
        kernel_size: height and width of a kernel.
        length: keys of a prefix, and as many values.
        blocks: number of blocks, from the first, with prefixes.
        train_keys: train the keys of new kernels.
        train_norms: train the ViT's norm layers.
        norm_share: fraction of each step that these take after the first task.
        stay: weight of the sum of absolute changes of the shared prompt and of the mapping from tokens to keys.
        similarity_over: rows over which s is a mean: `earlier` ones (theirs), each once; or those of the `new` task,
            including repeated ones, each with the nearest earlier one.
    """

    task_local_loss = True
    phases = ("convprompt",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        num_prompts_per_task: Count = 5,
        similarity: str | None = None,
        kernel_size: Annotated[int, Field(ge=1)] = 17,
        length: Count = 20,
        blocks: Count = 7,
        train_keys: bool = False,
        train_norms: bool = True,
        norm_share: Annotated[float, Field(ge=0, le=1)] = 0.005,
        stay: NotNegative = 0.01,
        similarity_over: Literal["earlier", "new"] = "earlier",
    ) -> None:
        super().__init__(backbone)
        depth, self.parts = len(backbone.blocks), backbone.blocks[0].attn.num_heads  # type: ignore[arg-type, index, union-attr]
        if blocks > depth:
            raise ConfigError(f"method.blocks={blocks}: this backbone has {depth} blocks; use at most that many")
        self.most, self.similarity, self.kernel = num_prompts_per_task, similarity, kernel_size
        self.blocks, self.train_keys, self.train_norms = blocks, train_keys, train_norms
        self.norm_share, self.stay, self.similarity_over = norm_share, stay, similarity_over
        self.untrained = () if train_keys else ("/key",)
        self.heads = NormedHeads(self.dim)
        more = kernel_size - 1
        shape = blocks, 2 * self.parts, length + more, self.dim // self.parts + more
        self.shared = nn.Parameter(torch.empty(shape).uniform_(-1, 1))  # keys of all heads, then values
        self.matcher = nn.Sequential(
            nn.Linear(self.dim, self.dim // 2), nn.ReLU(), nn.Linear(self.dim // 2, self.dim // 4)
        )
        # "t.key" (n, dim / 4), "t.weight" (n, blocks, 2 heads, size, size), "t.bias" (n, blocks, 2 heads)
        self.kernels = TaskTensors()
        self.texts = TaskTensors(buffers=True)  # "t" (rows, width) of the classes' attributes, with a file

    def learn(self, task: Task) -> Iterator[Phase]:
        """Add kernels; train them, the head, the shared parts, and norm layers."""
        t, head = task.id, self.heads.grow(len(task.classes)).to(self.device)
        for name, start in self.started(self.count(task)).items():
            self.kernels.add(f"{t}.{name}", start.to(self.device))
        names = ("weight", "bias", "key") if self.train_keys else ("weight", "bias")
        new = [kernel for name in names for kernel in self.kernels.in_order(f"{t}.{name}") if kernel.numel()]
        shared = [self.shared, *self.matcher.parameters()]
        norms = [
            p for module in self.backbone.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()
        ]
        params = self.only([*(norms if self.train_norms else []), *shared, *new, *head.parameters()])
        before = [parameter.detach().clone() for parameter in shared]

        def loss(batch: Batch) -> Tensor:
            task_loss = F.cross_entropy(head(self.features(batch.x)), batch.y - task.first_class)
            if not t:
                return task_loss
            changes = [(now - old).abs().sum() for now, old in zip(shared, before, strict=True)]
            return task_loss + self.stay * torch.stack(changes).sum()

        phase = Phase("convprompt", params, loss)
        if t and self.train_norms:
            phase.project = lambda old: self.hold(norms, old)
        yield phase
        self.requires_grad_(False)

    def hold(self, norms: list[nn.Parameter], before: list[Tensor]) -> None:
        """Scale down the last step of norm layers; `before` are the values before it, norm layers first, as in the
        phase.
        """
        for norm, was in zip(norms, before, strict=False):
            norm.lerp_(was, 1 - self.norm_share)

    def count(self, task: Task) -> int:
        """Return the number of kernels that a task adds."""
        if self.similarity is None:
            return self.most
        texts = TextFeatures(self.similarity, option="method.similarity")
        of_task = F.normalize(torch.cat(texts.of(task.classes)), dim=1)
        alike = 0.0
        if task.id:
            earlier = torch.cat([self.texts[f"{t}"].cpu() for t in range(task.id)])
            if earlier.shape[1] != of_task.shape[1]:
                raise ConfigError(
                    f"{self.similarity}: features of width {of_task.shape[1]}; those of earlier tasks have "
                    f"{earlier.shape[1]}; use the same encoder"
                )
            old, new = (
                (distinct(earlier), distinct(of_task)) if self.similarity_over == "earlier" else (of_task, earlier)
            )
            alike = float((old @ new.T).amax(1).mean())
        self.texts.add(f"{task.id}", of_task.to(self.device))
        return kernels_for(alike, self.most)

    def started(self, count: int) -> dict[str, Tensor]:
        """Create new kernels, initialised as a convolution, with keys orthonormal to all existing ones."""
        shape, bound = (count, self.blocks, 2 * self.parts), 1 / self.kernel
        return {
            "weight": bound * torch.empty(*shape, self.kernel, self.kernel).uniform_(-1, 1),
            "bias": bound * torch.empty(shape).uniform_(-1, 1),
            "key": orthonormal(count, self.all("key").detach() if len(self.kernels) else torch.empty(0, self.dim // 4)),
        }

    def all(self, name: str) -> Tensor:
        """Return keys, weights or biases of the kernels of all tasks."""
        return torch.cat([self.kernels[f"{t}.{name}"] for t in range(len(self.kernels) // 3)])

    def features(self, x: Tensor) -> Tensor:
        """Return features (B, dim) with the prefixes that each block's tokens select."""
        bank, keys = self.bank(), F.normalize(self.all("key"), dim=1)
        made: list[Tensor] = []  # block by block (B, 2, length, dim)

        def prefix(tokens: Tensor) -> vit.Prefix:
            match = F.normalize(self.matcher(self.backbone.pool(tokens)), dim=1) @ keys.T  # type: ignore[operator]
            made.append(torch.einsum("bk,kplc->bplc", match, bank[len(made)]))
            keys_and_values = sum(made[-2:])  # with those of the block before
            return keys_and_values[:, 0], keys_and_values[:, 1]  # type: ignore[index]

        return vit.features(self.backbone, x, prefixes=dict.fromkeys(range(self.blocks), prefix))

    def bank(self) -> list[Tensor]:
        """Return each kernel's output for the shared prompt (kernels, 2, length, dim), block by block."""
        weight, bias = self.all("weight").movedim(0, 2), self.all("bias").movedim(0, 2)  # kernels behind heads
        made = []
        for block, prompt in enumerate(self.shared):
            kernels = weight[block].flatten(0, 1)[:, None]
            out = F.conv2d(prompt[None], kernels, bias[block].flatten(), groups=2 * self.parts)
            by_head = out[0].unflatten(0, (2, self.parts, -1))  # (2, heads, kernels, length, h)
            made.append(by_head.permute(2, 0, 3, 1, 4).flatten(3))
        return made


def distinct(rows: Tensor) -> Tensor:
    """Return the rows (n, width), of length 1, that are not among the existing ones, in order."""
    _, first = np.unique(rows.numpy().round(5), axis=0, return_index=True)
    return rows[np.sort(first)]


def kernels_for(alike: float, most: int) -> int:
    """Return ceil((1 - s) * most), from 0 to `most`, for a float similarity s."""
    return min(max(math.ceil((1 - alike) * most - 1e-9), 0), most)
