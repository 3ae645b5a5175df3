"""FlyPrompt: experts of prompts on a frozen ViT, a router on random features, and slow copies of the head."""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.errors import ConfigError
from pearl.methods.common.random_features import RandomFeatures
from pearl.methods.prototypes.closed_form import ridge as ridge_regression
from pearl.nn import vit
from pearl.online.frozen import frozen_network
from pearl.online.learner import Learner, Network, Setup
from pearl.settings.sections import Count

Blocks = tuple[Annotated[int, Field(ge=0)], ...]
Decays = tuple[Annotated[float, Field(gt=0, lt=1)], ...]


class FlyPrompt(Learner):
    """FlyPrompt (Yan et al., ICLR 2026, arXiv 2602.01976), which learns prompts on a stream without boundaries.

    The newest expert, a set of prompts, and a head that all experts share are trained by cross-entropy among the
    classes of each batch. After every step, averages of the head move towards it; each expert has its own. The next
    expert begins after a fixed number of images, at the mean of the earlier ones. A ridge regression on random features
    of the frozen network tells which expert was trained on images like a given one; its prompts and averages predict.

    As in the authors' code, apart from two points: earlier experts do not change, where theirs move on by the
    optimizer's averages; only experts that have begun can be chosen. Images are augmented as the recipe says.

    Options:
        experts: number of experts; the last one learns the rest of the stream.
        images_per_expert: images that each expert learns. The authors divide the length of the stream, 50,000, by the
            number of experts.
        length: prompts per block.
        blocks: blocks with prompts, from 0.
        M: random features of the router; M^2 numbers are stored.
        ridge: the router's weight of the squared norm.
        decays: of the averages of the head.
        iterations: steps per batch; images are augmented anew in each.
        lr: learning rate of Adam.
    """

    prompts: Tensor  # (experts, blocks, length, dim)
    weight: Tensor  # (classes, dim) of the head
    bias: Tensor  # (classes,)
    averages: Tensor  # (experts that have begun, decays, classes, dim + 1) of weight and bias
    moments: Tensor  # (2, numbers) Adam's averages of gradients and squares: of prompts, weight and bias
    steps: Tensor  # () steps so far
    seen: Tensor  # () images of the newest expert
    gram: Tensor  # (M, M)
    cross: Tensor  # (M, experts)

    def __init__(
        self,
        setup: Setup,
        *,
        experts: Count = 5,
        images_per_expert: Count = 10_000,
        length: Count = 20,
        blocks: Blocks = (0, 1, 2, 3, 4),
        M: Count = 10_000,
        ridge: Annotated[float, Field(gt=0)] = 1e4,
        decays: Decays = (0.9, 0.99),
        iterations: Count = 3,
        lr: Annotated[float, Field(gt=0)] = 5e-3,
    ) -> None:
        vit.require_plain(setup.backbone)
        depth = len(setup.backbone.blocks)  # type: ignore[arg-type]
        if strange := [block for block in blocks if block >= depth]:
            raise ConfigError(f"online.learner.blocks: {strange[0]} is too high; the backbone has {depth}, from 0")
        super().__init__(setup)
        self.experts, self.images_per_expert, self.iterations, self.lr = experts, images_per_expert, iterations, lr
        self.blocks, self.ridge, self.decays = blocks, ridge, decays
        self.network = frozen_network(setup, "final")
        self.net.requires_grad_(False)
        dim: int = setup.backbone.dim  # type: ignore[assignment]
        self.register_buffer("prompts", torch.rand(experts, len(blocks), length, dim))
        self.register_buffer("weight", torch.zeros(0, dim))
        self.register_buffer("bias", torch.zeros(0))
        self.register_buffer("averages", torch.zeros(1, len(decays), 0, dim + 1))
        self.register_buffer("moments", torch.zeros(2, len(blocks) * length * dim))
        self.register_buffer("steps", torch.tensor(0.0))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("gram", torch.zeros(M, M))
        self.register_buffer("cross", torch.zeros(M, experts))
        self.features = RandomFeatures(dim, M)
        self.features.draw()
        self._router: list[Tensor] = []  # weights (experts, M), until the next image
        self.to(setup.device)

    @property
    def net(self) -> Any:
        """Return the frozen ViT, which is not a part of the state."""
        return self.network.module.network

    @property
    def head(self) -> Tensor:
        """Return weight and bias of the head, (classes, dim + 1)."""
        return torch.cat([self.weight, self.bias[:, None]], dim=1)

    # ------------------------------------------------------------------------------------------------- learning

    def observe(self, images: Tensor, labels: Tensor) -> None:
        """Train the newest expert and the head, then the router; begin the next expert if it is time."""
        if new := self.count(labels):
            self._add_classes(new)
        task = Task(0, "stream", (), 0, images.numpy(), labels.numpy(), self.setup.view, self.setup.device)
        for _ in range(self.iterations):
            batch = next(task.batches(len(labels) + 1, int(torch.randint(2**62, ()))))
            self.step(batch.x, batch.y)
        self.route(self.network(images))
        self.seen += len(labels)
        while len(self.averages) < self.experts and self.seen >= self.images_per_expert:
            self.seen -= self.images_per_expert
            self.begin_expert()

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Take a step of Adam on network inputs x (B, 3, H, W) with labels (B,); return the loss."""
        trained = [nn.Parameter(each) for each in (self.prompts[len(self.averages) - 1], self.weight, self.bias)]
        absent = torch.ones_like(self.bias, dtype=torch.bool).index_fill(0, y, False)
        with torch.enable_grad():
            logits = F.linear(self.prompted(x, trained[0][None]), *trained[1:])
            loss = F.cross_entropy(logits.masked_fill(absent, -torch.inf), y)
            gradients = torch.autograd.grad(loss, trained)
        # parameters and moments share their memory with the buffers
        sizes = [each.numel() for each in trained]
        optimizer = torch.optim.Adam(trained, lr=self.lr)
        for each, gradient, first, second in zip(
            trained, gradients, *(moment.split(sizes) for moment in self.moments), strict=True
        ):
            each.grad = gradient
            optimizer.state[each] = {
                "step": self.steps.clone(),
                "exp_avg": first.view_as(each),
                "exp_avg_sq": second.view_as(each),
            }
        optimizer.step()
        self.steps += 1
        head = self.head
        for average, decay in zip(self.averages[-1], self.decays, strict=True):
            average.mul_(decay).add_(head, alpha=1 - decay)
        return loss.detach()

    def prompted(self, x: Tensor, prompts: Tensor) -> Tensor:
        """Return features (B, dim) of inputs (B, 3, H, W) with prompts (B or 1, blocks, length, dim).

        Prompts have the class token's position and leave the sequence after their block.
        """
        net = self.net
        tokens = prompts + net.pos_embed[:, :1, None]
        given = {i: vit.prefix_of(net.blocks[i], tokens[:, at]) for at, i in enumerate(self.blocks)}
        return vit.features(net, x, prefixes=given)

    @torch.no_grad()
    def route(self, features: Tensor) -> None:
        """Add features (B, dim) of the frozen network to the router, as those of the newest expert."""
        lifted = self.features(features)
        self.gram += lifted.T @ lifted
        self.cross[:, len(self.averages) - 1] += lifted.sum(0)
        self._router.clear()

    def begin_expert(self) -> None:
        """Begin an expert at the mean of the earlier ones, with averages at the head."""
        begun = len(self.averages)
        self.prompts[begun] = self.prompts[:begun].mean(0)
        self.moments[:, : self.prompts[0].numel()] = 0
        self.averages = torch.cat([self.averages, self.head.expand(1, len(self.decays), -1, -1)])

    def _add_classes(self, count: int) -> None:
        """Add rows to the head and to all averages, which start equal, and their moments."""
        rows = nn.init.trunc_normal_(self.weight.new_empty(count, self.weight.shape[1]), std=0.02)
        sizes = [self.prompts[0].numel(), self.weight.numel(), self.bias.numel()]
        parts = self.moments.split(sizes, dim=1)
        self.moments = torch.cat([parts[0], F.pad(parts[1], (0, rows.numel())), F.pad(parts[2], (0, count))], dim=1)
        self.weight, self.bias = torch.cat([self.weight, rows]), F.pad(self.bias, (0, count))
        more = F.pad(rows, (0, 1)).expand(*self.averages.shape[:2], -1, -1)
        self.averages = torch.cat([self.averages, more], dim=2)

    # ----------------------------------------------------------------------------------------------- predicting

    def networks(self) -> dict[str, Network]:
        """Return the whole prediction, which changes with each image that is learnt."""
        return {f"after {int(self.steps)} steps": self._probabilities}

    def passes(self) -> int:
        """Return the passes of a prediction: to choose an expert, and with its prompts."""
        return 2

    def scores(self, features: Sequence[Tensor]) -> Tensor:
        """Return the highest probabilities that the head and the expert's averages give."""
        return features[0]

    @torch.no_grad()
    def _probabilities(self, images: Tensor) -> Tensor:
        x = self.setup.view.test(images.to(self.setup.device))
        return self.probabilities(x, self.expert_of(self.network(images)))

    def expert_of(self, features: Tensor) -> Tensor:
        """Return the numbers (B,) of the experts for features (B, dim) of the frozen network."""
        if not self._router:
            begun = self.cross[:, : len(self.averages)]
            self._router = [ridge_regression(self.gram, begun.double(), self.ridge).to(self.gram)]
        return (self.features(features) @ self._router[0].T).argmax(1)

    def probabilities(self, x: Tensor, expert: Tensor) -> Tensor:
        """Return probabilities (B, classes), not normalised, of inputs (B, 3, H, W) with experts (B,)."""
        features = self.prompted(x, self.prompts[expert])
        of_expert = self.averages[expert]  # (B, decays, classes, dim + 1)
        by_average = torch.einsum("bkcd,bd->bkc", of_expert[..., :-1], features) + of_expert[..., -1]
        by_head = F.linear(features, self.weight, self.bias)
        return torch.cat([by_head[:, None], by_average], dim=1).softmax(2).amax(1)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._router.clear()
        super()._load_from_state_dict(*args)
