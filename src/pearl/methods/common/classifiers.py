"""How a method with a sub-network per task chooses among the classes of all tasks."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from pearl.nn.inner import Layers
from pearl.settings.born import Born


class Classifier:
    """How a method with a sub-network per task chooses among the classes of all tasks."""


@dataclass(frozen=True, kw_only=True)
class Heads(Classifier):
    """The heads' raw logits side by side, as in the PEARL paper."""


@dataclass(frozen=True, kw_only=True)
class Chain(Classifier):
    """Class statistics in the spaces of the first sub-networks; see `common.chain`.

    Options:
        spaces: of how many sub-networks, the first ones; `all` for every task's. An image passes through each of them.
        layers: `auto` looks at inner layers too (see `nn.inner.inner_layers`), `final` at the features alone.
        projection: dimensions of a space: wider features are projected at random; null leaves them as they are.
        covariance: `updated` - of all images seen, so that scores of old classes move as tasks come; `frozen` - of the
            first two tasks, in a later space of the task that made it: what scores a class keeps its bits for ever.
        train: `spaces` trains a sub-network only for tasks that become a space: no other is ever asked; `all` trains
            every task's, as the method without this classifier.
        head: what a sub-network is trained with, and nobody asks for afterwards: `linear`, as without this classifier;
            `cosine`, logits of 4 times the cosine between features and a class's weight.
    """

    spaces: Annotated[int, Field(ge=1)] | Literal["all"] = 3
    layers: Layers = "auto"
    projection: Annotated[int, Field(ge=1, le=65536)] | None = 1024
    covariance: Literal["updated", "frozen"] = "updated"
    train: Literal["spaces", "all"] = "spaces"
    head: Annotated[Literal["linear", "cosine"], Born("linear")] = "linear"
