"""Options of class statistics, apart from the classifier that has them and the statistics that they shape."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from pearl.nn.intermediate_features import Layers


@dataclass(frozen=True, kw_only=True)
class StatisticsOptions:
    """Options of class statistics; `by_statistics.Statistics` explains them."""

    spaces: Annotated[int, Field(ge=1)] | Literal["all"] = 3
    layers: Layers = "auto"
    projection: Annotated[int, Field(ge=1, le=65536)] | None = 1024
    covariance: Literal["updated", "frozen"] = "updated"
    views: Annotated[int, Field(ge=0, le=64)] = 0
    train: Literal["spaces", "all"] = "spaces"
    head: Literal["linear", "cosine"] = "linear"
    keep_features: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"
