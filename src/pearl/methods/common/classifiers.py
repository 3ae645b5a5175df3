"""Classifiers over the classes of all tasks, for methods with a sub-network per task."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from pearl.nn.intermediate_features import Layers


class Classifier:
    """Base class: a classifier over the classes of all tasks, for a method with a sub-network per task."""


@dataclass(frozen=True, kw_only=True)
class Heads(Classifier):
    """The concatenated raw logits of the heads, as in the PEARL paper."""


@dataclass(frozen=True, kw_only=True)
class Statistics(Classifier):
    """Class statistics in the feature spaces of the first sub-networks; see `common.class_statistics`.

    Options:
        spaces: number of sub-networks, from the first; `all` uses every task's. Each costs a forward pass per image.
        layers: `auto` also uses intermediate features (see `nn.inner.inner_layers`), `final` only the final ones.
        projection: maximum dimensions of a feature space; wider features get a random projection, with null none.
        covariance: `updated` - of all images so far, so that scores of old classes change with new tasks; `frozen` - of
            the first two tasks, in a later space of the task that created it: scores of a class then never change.
        train: `spaces` trains a sub-network only for tasks that add a feature space, since others are never used; `all`
            trains one for every task, as the method without this classifier does.
        head: the head a sub-network is trained with, unused afterwards: `linear`, as without this classifier; `cosine`,
            whose logits are 4 times the cosine between features and a class's weight.
        precision: of the features, for statistics and predictions alike: `float32` gives the same predictions on every
            machine; `bfloat16` is faster on some CPUs and slower on others (docs/performance.md).
    """

    spaces: Annotated[int, Field(ge=1)] | Literal["all"] = 3
    layers: Layers = "auto"
    projection: Annotated[int, Field(ge=1, le=65536)] | None = 1024
    covariance: Literal["updated", "frozen"] = "updated"
    train: Literal["spaces", "all"] = "spaces"
    head: Literal["linear", "cosine"] = "linear"
    precision: Literal["float32", "bfloat16"] = "float32"
