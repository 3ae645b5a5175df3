"""Options whose default depends on the rest of the configuration: stream, data, backbone, optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

AUTO = "auto"


@dataclass(frozen=True)
class DerivedDefault:
    """Marks an option whose default depends on the configuration.

    Use it as `Annotated[int | Literal["auto"], DerivedDefault(rule)] = "auto"`.

    A checked configuration has rule(configuration) instead of `auto`, so that it contains the actual value, and a run
    with the same explicit value has the same name. If the rule returns `auto`, the part chooses when it is created.
    """

    rule: Callable[[Any], Any]


def followed(model: type[BaseModel], values: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the options of a part with the rules' values instead of `auto`, for a checked configuration."""
    rules = {
        name: marker.rule
        for name, field in model.model_fields.items()
        for marker in field.metadata
        if isinstance(marker, DerivedDefault)
    }
    return {name: rules[name](config) if name in rules and value == AUTO else value for name, value in values.items()}


def tasks_of(config: Any) -> int | None:
    """Return the number of tasks of the stream; None for a model, which has no stream."""
    stream = getattr(config, "stream", None)
    if stream is None:
        return None
    return stream.tasks if isinstance(stream.tasks, int) else len(stream.tasks)


def stream_length(config: Any) -> int | str:
    """Return the number of tasks as an option's value: `auto` for a model."""
    return tasks_of(config) or AUTO


def data_of(config: Any) -> str | None:
    """Return the data source's name; None for a model."""
    return getattr(config, "data", {}).get("name")


def whole_benchmark(config: Any) -> bool:
    """Return True for a published benchmark with all of its training images, so that published rates fit."""
    known = {"cifar100", "tinyimagenet", "imagenet_r"}
    stream = getattr(config, "stream", None)
    return stream is not None and stream.per_class is None and data_of(config) in known


def usual_resize(size: int) -> int:
    """Return the shorter side in pixels before a centre crop of `size`: 256 for 224, as for ImageNet."""
    return round(size * 256 / 224)


def on_cifar(cifar: Any, other: Any) -> DerivedDefault:
    """Return a rule with authors' values for CIFAR-100 and for ImageNet-R; all other data uses the latter."""
    return DerivedDefault(lambda config: cifar if data_of(config) == "cifar100" else other)


def convolutional(config: Any) -> bool:
    """Return True for pearl's own backbones, which are convolutional; for others it depends on the network."""
    return config.backbone["name"] in {"resnet18", "bsc", "convnet"}


def pretrained(config: Any) -> bool:
    """Return True if the backbone is pretrained."""
    return bool(config.backbone.get("pretrained") or config.backbone.get("weights"))
