"""Progressive neural networks (Rusu et al., arXiv 2016): a column per task with connections from all earlier columns.

In the paper, an adapter of the earlier columns' activations is added to each layer's input, h' = sigma(W h + U sigma(V
alpha h_old)). To support any backbone, columns are copies of it and are connected at the outputs of named stages: a
stage's output becomes output + sigma(V alpha h_old), so that the layers of the next stage are both W and U. V h_old
over all earlier columns is the sum of a 1x1 adapter for each of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.errors import ConfigError
from pearl.methods.base import Expert, Phase, own_loss
from pearl.methods.bounds.isolation import Isolation
from pearl.methods.common.subnetworks import HEADS, ClassifierOptions, HeadsClassifier, Spaces
from pearl.nn import lowrank
from pearl.nn.functional import shallow_copy
from pearl.nn.intermediate_features import pooling
from pearl.nn.precision import full
from pearl.nn.task_modules import TaskTensors
from pearl.settings.parts import CLASSIFIERS
from pearl.settings.patterns import compiled

Activations = dict[str, Tensor]  # a column's outputs by stage


class Progressive(Isolation):
    """Columns are copies of the initial network, frozen one by one, with lateral adapters between their stages.

    With one task this is plain training; columns without adapters are complete isolation.

    Options:
        stages: regular expression that matches the full names of the modules where columns are connected. The default
            finds the stages of ResNets and the blocks of transformers. Their outputs are (B, C, H, W) or (B, tokens,
            C).
        classifier: `heads` or `statistics`, see `common.class_statistics`; the intermediate features of class
            statistics are those of stages.
    """

    task_identity = True
    separable = False
    phases = ("pnn",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        stages: str = r"(layer|stages\.|blocks\.)\d+",
        classifier: Annotated[ClassifierOptions, CLASSIFIERS] = HEADS,
    ) -> None:
        super().__init__(backbone, classifier=classifier)
        names = [name for name, _ in backbone.named_modules() if name]
        pattern = compiled(stages, "method.stages")
        self.stages = [name for name in names if pattern.fullmatch(name)]
        if not self.stages:
            raise ConfigError(
                f"method.stages={stages!r} matches no module; the modules are {', '.join(names[:12])}, ..."
            )
        self.adapters = TaskTensors()  # "t.j.V.stage" (C, C) and "t.j.alpha.stage" (), of column t for column j

    def train(self, mode: bool = True) -> "Progressive":
        """Set the mode; earlier columns, including their running statistics, are constant."""
        super().train(mode)
        for network in [*self.networks.values()][:-1]:
            network.eval()
        return self

    def learn_own(self, task: Task) -> Iterator[Phase]:
        """Train a new column, its adapters and its head; earlier ones are unchanged."""
        self.requires_grad_(False)
        adapters = self._grow_adapters(task) if task.id else []
        network, head = self._grow(task.id), self.heads.grow(len(task.classes)).to(self.device)
        params = [*network.parameters(), *adapters, *head.parameters()]
        yield Phase("pnn", params, own_loss(partial(self.task_features, t=task.id), head, task), capturable=True)

    def _grow_adapters(self, task: Task) -> list[nn.Parameter]:
        """Create adapters: V is initialised like any layer, alpha as a small random number."""
        t, heard = task.id, self._hear(task)
        for j in self.trained:
            for stage in self.stages:
                v, _ = lowrank.kaiming_factors((heard[stage], heard[stage]), heard[stage], like=self.heads[0].weight)
                self.adapters.add(f"{t}.{j}.V.{stage}", v)
                self.adapters.add(f"{t}.{j}.alpha.{stage}", 0.1 * torch.rand(()).to(self.device))
        return [p for name, p in self.adapters.named_parameters() if name.startswith(f"{t}/")]

    @torch.no_grad()
    def _hear(self, task: Task) -> dict[str, int]:
        """Record the number of channels at each stage."""
        activations: Activations = {}
        self.eval()._column(0, task.view.test(task.images[:1].to(self.device)), {}, activations)
        return {stage: out.shape[_channels(out)] for stage, out in activations.items()}

    @property
    def trained(self) -> list[int]:
        """Return the tasks that have a column."""
        return [int(t) for t in self.networks]

    def run_columns(self, x: Tensor, last: int) -> tuple[dict[int, Tensor], dict[int, Activations]]:
        """Return features (B, dim), and outputs of stages, of the columns up to that of task `last`."""
        features: dict[int, Tensor] = {}
        heard: dict[int, Activations] = {}
        for t in self.trained:
            if t <= last:
                activations: Activations = {}
                features[t] = self._column(t, x, heard, activations)
                heard[t] = activations
        return features, heard

    def task_features(self, x: Tensor, t: int) -> Tensor:
        """Return features (B, dim) of column t, which reads all earlier ones."""
        return self.run_columns(x, t)[0][t]

    def spaces(self, tasks: Iterable[int]) -> Spaces:
        """See `SubNetworks.spaces`: every column runs once."""
        tasks, pool = list(tasks), pooling(self.backbone)
        layers = [layer for layer in self.layers if layer in self.stages]

        def raw(x: Tensor) -> list[Tensor]:
            features, outputs = self.run_columns(x, max(tasks))
            return [torch.cat([*(pool(outputs[t][layer]) for layer in layers), full(features[t])], 1) for t in tasks]

        return raw

    def _column(self, t: int, x: Tensor, heard: Mapping[int, Activations], activations: Activations) -> Tensor:
        """Run column t; `heard` are the outputs of all earlier ones, and its own are stored in `activations`."""
        network = shallow_copy(self.network(t))  # the hooks belong to this call: other threads may run the column too
        for stage in self.stages:
            meet = partial(self._meet, t, stage, heard, activations)
            network.get_submodule(stage).register_forward_hook(meet)
        return network(x)

    def _meet(self, t: int, stage: str, heard: Mapping[int, Activations], notes: Activations, *call: Any) -> Tensor:
        out: Tensor = call[-1]  # a hook is called with module, inputs and output
        if heard:
            lateral = [self._adapt(t, j, stage, earlier[stage]) for j, earlier in heard.items()]
            out = out + F.relu(sum(lateral[1:], lateral[0]))
        notes[stage] = out
        return out

    def _adapt(self, t: int, j: int, stage: str, old: Tensor) -> Tensor:
        v, alpha = self.adapters[f"{t}.{j}.V.{stage}"], self.adapters[f"{t}.{j}.alpha.{stage}"]
        axis = _channels(old)
        rows = (alpha * old).movedim(axis, -1)
        # two-dimensional: with more dimensions, torch multiplies in another order if v is trained
        return (rows.flatten(0, -2) @ v.T).view(rows.shape).movedim(-1, axis)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """See `SubNetworks.forward`. Without `task`, every column runs once."""
        if task is not None or not isinstance(self.classifier, HeadsClassifier):
            return super().forward(x, task)
        features, _ = self.run_columns(x, len(self.heads))
        return torch.cat([self.heads[t](z) for t, z in features.items()], dim=1)

    def experts(self) -> Iterable[Expert]:
        """Yield columns with all their earlier ones; a column alone would be another network."""
        if not isinstance(self.classifier, HeadsClassifier):
            return super().experts()
        return [Expert(f"task {t}", partial(self.forward, task=t), frozen=True) for t in range(len(self.heads))]


def _channels(activation: Tensor) -> int:
    return 1 if activation.ndim == 4 else -1
