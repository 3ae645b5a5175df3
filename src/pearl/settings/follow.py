"""Options whose default follows the rest of a configuration: the stream, the data, the backbone, an optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

AUTO = "auto"


@dataclass(frozen=True)
class Follows:
    """Marks an option that may be left to the rest: `Annotated[int | Literal["auto"], Follows(rule)] = "auto"`.

    A checked configuration has rule(configuration) in the place of `auto`, so that it says what a run was made with,
    and a run that follows to the value which another was given has its name. A rule gives `auto` where it cannot say:
    then the part decides when it is made.
    """

    rule: Callable[[Any], Any]


def followed(model: type[BaseModel], values: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The options of a part with what follows a checked configuration in the place of `auto`."""
    rules = {
        name: marker.rule
        for name, field in model.model_fields.items()
        for marker in field.metadata
        if isinstance(marker, Follows)
    }
    return {name: rules[name](config) if name in rules and value == AUTO else value for name, value in values.items()}


def tasks_of(config: Any) -> int | None:
    """How many tasks the stream has; None of a model, which has no stream and never knows."""
    stream = getattr(config, "stream", None)
    if stream is None:
        return None
    return stream.tasks if isinstance(stream.tasks, int) else len(stream.tasks)


def stream_length(config: Any) -> int | str:
    """The same for an option: `auto` of a model."""
    return tasks_of(config) or AUTO


def data_of(config: Any) -> str | None:
    """The data source's name; None of a model."""
    return getattr(config, "data", {}).get("name")


def whole_benchmark(config: Any) -> bool:
    """Return True for a published benchmark with all of its training images, so that published rates fit."""
    known = {"cifar100", "tinyimagenet", "imagenet_r"}
    stream = getattr(config, "stream", None)
    return stream is not None and stream.per_class is None and data_of(config) in known


def usual_resize(size: int) -> int:
    """Shorter side, in pixels, of an image whose centre of `size` is cut out: as 256 is to 224, ImageNet's protocol."""
    return round(size * 256 / 224)


def on_cifar(cifar: Any, other: Any) -> Follows:
    """The authors have other values for CIFAR-100 than for ImageNet-R, which also stand for all other data."""
    return Follows(lambda config: cifar if data_of(config) == "cifar100" else other)


def convolutional(config: Any) -> bool:
    """Return True if the backbone is one of pearl's own, which are convolutional; of others, only the network knows."""
    return config.backbone["name"] in {"resnet18", "bsc", "convnet"}


def pretrained(config: Any) -> bool:
    """Return True if the backbone comes with weights."""
    return bool(config.backbone.get("pretrained") or config.backbone.get("weights"))
