"""HiDe-Prompt: Hierarchical Decomposition of Prompt-Based Continual Learning (Wang et al., NeurIPS 2023).

Task identity, classification within the task, and adaptation across tasks are trained separately. A classifier on the
query predicts a class and thereby a task; a second classifier uses the features with that task's prefixes. Both are
aligned on features sampled from clusters of earlier classes.
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Network, Phase, own_loss
from pearl.methods.common.clusters import FeatureClusters
from pearl.methods.prompts.dualprompt import Blocks, Length, NotNegative, on_cifar
from pearl.methods.prompts.identity import tasks_of_classes
from pearl.methods.prompts.pool import PromptMethod
from pearl.methods.prompts.prefixes import TaskPrefixes, by_block, check_blocks
from pearl.nn import vit
from pearl.nn.precision import full, outside_autocast
from pearl.nn.task_modules import TaskHeads
from pearl.settings.declared import PhaseSpec, UpcomingTask

TEMPERATURE = 0.8  # of the contrastive regularisation

Count = Annotated[int, Field(ge=1)]


def _draws(option: str) -> Callable[[UpcomingTask], int]:
    return lambda task: task.earlier_classes * task.options[option]


class HidePrompt(PromptMethod):
    """A frozen ViT with two passes: plain features for the task, features with that task's prefixes for the class.

    Defaults are the authors' for ImageNet-R, in batches of 24: identity 20 epochs, Adam at 4.69e-5; prefixes 150
    epochs, Adam at 2.81e-3 with a cosine to 1e-5, their head at a tenth (to 1e-6; theirs ends at 1e-5 too; CIFAR-100:
    50 epochs, a tenth of the rate after 30); gradients clipped at norm 1, no weight decay: their code defines the
    option twice, and the first default, 0, takes effect. Each alignment has 30 epochs, SGD with a cosine, at 4.69e-4
    and, in batches of 120, at 5e-3. Keys and values come from an image's own prefix; the authors' code, and thus their
    numbers, mixes the halves. Both classifiers are trained task by task, while they train the identity of all tasks
    first, which is equivalent, since the classifiers are independent. Clusters of a single image take part in the
    alignment, unlike there. The regularisation compares the images of a batch with each other, so one process trains.

    Options:
        e_prompt_layer_idx: blocks with a prefix, from 0.
        length: keys of a prefix, and as many values; `auto` is 5 on CIFAR-100 and 20 elsewhere.
        prompt_momentum: share of the mean of earlier tasks' prefixes in a task's.
        reg: weight of the contrastive regularisation; `auto` is 0.1 on CIFAR-100 and 0.5 elsewhere.
        n_centroids: clusters per class.
        identity_draws: features per earlier class in an epoch of the first alignment; theirs is a batch.
        draws: the same for the second alignment; theirs is a batch of five times the size.
    """

    batch_coupled = True
    may_not_matter = ("hide_identity", "hide_identity_align")  # if all images are taken for one task's
    phases = (
        "hide_identity",
        PhaseSpec("hide_identity_align", "later", _draws("identity_draws"), features_only=True),
        PhaseSpec("hide_prompt", groups=("prompt", "head")),
        PhaseSpec("hide_align", "later", _draws("draws"), features_only=True),
    )

    def __init__(
        self,
        backbone: nn.Module,
        *,
        e_prompt_layer_idx: Blocks = (0, 1, 2, 3, 4),
        length: Annotated[Length | Literal["auto"], on_cifar(5, 20)] = "auto",
        prompt_momentum: Annotated[float, Field(ge=0, le=1)] = 0.01,
        reg: Annotated[NotNegative | Literal["auto"], on_cifar(0.1, 0.5)] = "auto",
        n_centroids: Count = 10,
        identity_draws: Count = 24,
        draws: Count = 120,
    ) -> None:
        super().__init__(backbone)
        check_blocks(backbone, e_prompt_layer_idx, "e_prompt_layer_idx")
        self.momentum, self.reg = prompt_momentum, 0.5 if reg == "auto" else reg
        self.identity_draws, self.draws = identity_draws, draws
        self.mapping = nn.Sequential(nn.Linear(self.dim, 2 * self.dim), nn.GELU(), nn.Linear(2 * self.dim, self.dim))
        self.norm = nn.LayerNorm(self.dim)
        self.identity_heads = TaskHeads(self.dim)
        self.e_prompts = TaskPrefixes(e_prompt_layer_idx, 20 if length == "auto" else length, self.dim)
        self.plain, self.prompted = FeatureClusters(n_centroids), FeatureClusters(n_centroids)

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train the identity classifier and align it, then prefixes with their head, and align that."""
        t, known = task.id, task.first_class
        head = self.identity_heads.grow(len(task.classes)).to(self.device)
        mapping = [*self.mapping.parameters(), *self.norm.parameters()]
        params = self.only([*mapping, *head.parameters()])
        yield Phase("hide_identity", params, own_loss(lambda x: self.mapped(self.query(x)), head, task))
        self.plain.grow(self.of_images(task, self.query), task.labels)
        if t:
            params = self.only([*mapping, *self.identity_heads.parameters()])
            draws = self.plain.draws(known * self.identity_draws)
            yield Phase("hide_identity_align", params, lambda batch: _cross_entropy(self.identity, batch), data=draws)

        head, prefix = self.heads.grow(len(task.classes)).to(self.device), self.e_prompts.start(self.device)
        groups = {"prompt": [prefix], "head": [*head.parameters()]}
        self.only([prefix, *head.parameters()])

        def loss(batch: Batch) -> Tensor:
            features = self.read(batch.x, self.mixed(t)[None])
            task_loss = F.cross_entropy(head(features), batch.y - known)
            return task_loss + self.reg * contrast(torch.cat([self.centroids(t), full(features)]))

        yield Phase("hide_prompt", groups, loss)
        self.requires_grad_(False)
        prefix.copy_(self.mixed(t))
        self.prompted.grow(self.of_images(task, lambda x: self.read(x, prefix[None])), task.labels)
        if t:
            params = self.only(self.heads.parameters())
            draws = self.prompted.draws(known * self.draws)
            yield Phase("hide_align", params, lambda batch: _cross_entropy(self.heads, batch), data=draws)
        self.requires_grad_(False)

    def mixed(self, t: int) -> Tensor:
        """Return the prefixes of a task plus a share of the mean of earlier ones."""
        if not t:
            return self.e_prompts[t]
        earlier = torch.stack([self.e_prompts[s].detach() for s in range(t)]).mean(0)
        return torch.lerp(self.e_prompts[t], earlier, self.momentum)

    def centroids(self, t: int) -> Tensor:
        """Return the centres (M, dim) of clusters of prompted features of the tasks before t."""
        return self.prompted.all("mean") if t else torch.empty(0, self.dim, device=self.device)

    def mapped(self, query: Tensor) -> Tensor:
        """Return the input of the identity classifier for queries (B, dim)."""
        return self.norm(query + self.mapping(query))

    def identity(self, query: Tensor) -> Tensor:
        """Return logits (B, classes seen) of queries, which determine the task."""
        return self.identity_heads(self.mapped(query))

    def features(self, x: Tensor) -> Tensor:
        """Return features (B, dim), each image with the prefixes of the task of its query's predicted class."""
        chosen = self.identity(self.query(x)).argmax(1)
        return self.read(x, self.e_prompts.of(tasks_of_classes(self.identity_heads.sizes(), chosen)[chosen]))

    def read(self, x: Tensor, prefixes: Tensor) -> Tensor:
        """Return features (B, dim) with prefixes (B or 1, blocks, 2, length, dim)."""
        return vit.features(self.backbone, x, prefixes=by_block(prefixes, self.e_prompts.blocks))


def contrast(rows: Tensor) -> Tensor:
    """Return the cross-entropy of rows (n, dim) matched with themselves, by dot products over temperature."""
    with outside_autocast(rows):
        rows = full(rows)
        return F.cross_entropy(rows @ rows.T / TEMPERATURE, torch.arange(len(rows), device=rows.device))


def _cross_entropy(network: Network, batch: Batch) -> Tensor:
    return F.cross_entropy(network(batch.x), batch.y)
