"""The sections of a configuration, each field with its bounds: the stream, the images, training, the engine."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, model_validator

from pearl.settings.born import Born
from pearl.settings.follow import AUTO, usual_resize

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**32, strict=True)]
Share = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]
Pixels = Annotated[int, Field(ge=1, le=4096)]  # of a side; every image takes the square of it
Triple = tuple[float, float, float]
Domain = Literal["plain", "edges", "inverted", "noisy"]  # see `data.domains`


class Section(BaseModel):
    """A part of a configuration: no unknown keys, no infinities. Each field's text is its documentation."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class StreamConfig(Section):
    """How a data source becomes a sequence of tasks."""

    tasks: Count | Annotated[list[Count], Field(min_length=1)]
    """How many tasks of equally many classes, or a list of their numbers of classes."""
    order: Literal["natural"] | Seed | Annotated[list[int], Field(min_length=1)] = "natural"
    """Order in which the classes come: `natural`, a seed of numpy's permutation, or a list of labels."""
    per_class: Count | None = None
    """Training images kept per class; all if null."""
    test_per_class: Count | None = None
    """Images per class that are evaluated on; all if null."""
    classes: Count | None = None
    """Only the first so many classes of the order; all if null."""
    validation: Share = 0.0
    """Share of each class's training images that is held out."""
    evaluate_on: Literal["test", "validation"] = "test"
    """`validation`: the held-out images, or the source's own validation images."""
    domains: Annotated[list[Domain], Born([])] = []
    """Looks in which all tasks come, one after the other; each learns a class from images of its own."""

    @model_validator(mode="after")
    def _each_class_once(self) -> "StreamConfig":
        if isinstance(self.order, list) and len(set(self.order)) != len(self.order):
            raise ValueError("order names a class twice; list each once")
        return self

    @model_validator(mode="after")
    def _each_domain_once(self) -> "StreamConfig":
        if len(set(self.domains)) != len(self.domains):
            raise ValueError("domains has one twice; list each once")
        return self


class AugmentConfig(Section):
    """The parameters of augmentation; in `train.phases.NAME.images` those that one phase has different."""

    pad: Annotated[int, Field(ge=0, le=4096)] = 4
    """Pixels of zeros around the image before a random `crop`."""
    scale: tuple[Positive, Positive] = (0.08, 1.0)
    """Least and largest share of the area that a random `resized_crop` shows."""
    flip: bool = True
    """Whether half of the training images are mirrored, with `crop` and `resized_crop`."""
    brightness: Annotated[Share, Born(0.0)] = 0.0
    """Half the range around 1 of the random factor that multiplies all pixels of a training image."""

    @model_validator(mode="after")
    def _scale_rises(self) -> "AugmentConfig":
        if not self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale {list(self.scale)} must rise and end at 1 or below")
        return self


class ImagesConfig(AugmentConfig):
    """What the network sees. Sizes are in pixels; mean and std belong to pixel values in [0, 1]."""

    size: Pixels
    """Side of the square that the network sees, in pixels."""
    resize: Pixels | Literal["auto"] | None = None
    """Shorter side to which an image is scaled before the centre is cut out, in pixels; `size` if null. `auto` follows
    `size` by the usual ratio, 256 to 224."""
    augment: Literal["none", "crop", "resized_crop"] = "none"
    """What training makes of an image: nothing, a random crop after padding, or a random part of it, resized."""
    mean: Triple = (0.0, 0.0, 0.0)
    """Subtracted from red, green and blue, which lie in [0, 1]."""
    std: tuple[Positive, Positive, Positive] = (1.0, 1.0, 1.0)
    """What they are divided by then."""
    bits: Annotated[int, Field(ge=8, le=16, strict=True), Born(16)] = 16
    """Of grey images with 16 bits per pixel, how many are used, as 12 of many cameras; the upper 8 of them are kept."""
    reduced: Annotated[bool, Born(False)] = False
    """Whether large JPEG files are decoded at a half, quarter or eighth, if that is twice the size that is kept."""

    @property
    def stored(self) -> int:
        """Pixels of the shorter side of images as they are kept."""
        return self.resize if isinstance(self.resize, int) else self.size

    @model_validator(mode="after")
    def _consistent(self) -> "ImagesConfig":
        if self.resize == AUTO:
            self.resize = usual_resize(self.size)
        if isinstance(self.resize, int) and self.resize < self.size:
            raise ValueError(f"resize {self.resize} is below size {self.size}: make it at least as large")
        return self


class OptimizerConfig(Section):
    """How parameters take a step; in `groups.NAME` of a phase what one group of its parameters has different."""

    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """PyTorch's optimizer of that name."""
    lr: Positive = 1e-3
    """Learning rate, before the schedule."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Of `adam` and `adamw`."""
    momentum: Share = 0.9
    """Of `sgd`."""
    nesterov: Annotated[bool, Born(False)] = False
    """Of `sgd`: Nesterov's momentum."""
    weight_decay: NotNegative = 0.0
    """Of all parameters; `adamw` keeps it apart from the gradient."""


class PhaseConfig(OptimizerConfig):
    """Settings of training; in `train.phases.NAME` those that one phase has different."""

    epochs: Annotated[int, Field(ge=1)] = 50
    """How often the task's images are seen."""
    steps: Annotated[Count | None, Born(None)] = None
    """The phase's length in steps, in the place of epochs."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Images per step; of several processes together."""
    schedule: Literal["constant", "cosine", "quarter_cosine", "multistep"] = "constant"
    """How the rate goes on: `cosine` falls to `end_lr`, `quarter_cosine` nearly to 0 and epoch by epoch."""
    end_lr: Annotated[NotNegative, Born(0.0)] = 0.0
    """Of `cosine`: the rate at the end."""
    warmup: Annotated[Share, Born(0.0)] = 0.0
    """Share of the steps in which the rate first rises to its schedule."""
    warmup_lr: Annotated[NotNegative, Born(0.0)] = 0.0
    """The rate from which it rises."""
    milestones: list[Annotated[float, Field(gt=0, lt=1)]] = []
    """Of `multistep`: shares of the phase at which the rate is multiplied by `gamma`."""
    gamma: Positive = 0.1
    """Of `multistep`: see `milestones`."""
    clip: Positive | None = None
    """Largest norm of the gradient; longer ones are shortened to it."""
    groups: Annotated[dict[str, OptimizerConfig], Born({})] = {}
    """What single groups of a phase's parameters have different, by the names that a method gives them."""
    images: Annotated[AugmentConfig, Born({})] = AugmentConfig()
    """What the augmentation of `images` has different, for images of the task (not of a memory)."""

    @field_serializer("images")
    def _only_what_was_set_of_images(self, images: AugmentConfig) -> dict[str, Any]:
        return images.model_dump(mode="json", exclude_unset=True)

    @field_serializer("groups")
    def _only_what_was_set_of_groups(self, groups: dict[str, OptimizerConfig]) -> dict[str, Any]:
        return _set_alone(groups)

    def group(self, name: str) -> OptimizerConfig:
        """The settings of one group of the phase's parameters; of those without a name, the phase's own."""
        changes = self.groups[name].model_dump(exclude_unset=True) if name in self.groups else {}
        return OptimizerConfig(**{**self.model_dump(include=set(OptimizerConfig.model_fields)), **changes})

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> "PhaseConfig":
        for name in ("", *self.groups):
            if (own := self.group(name)).nesterov and not own.momentum:
                raise ValueError("nesterov needs a momentum above 0; set momentum, or nesterov=false")
        return self


def _set_alone(sections: Mapping[str, BaseModel]) -> dict[str, Any]:
    return {name: section.model_dump(mode="json", exclude_unset=True) for name, section in sections.items()}


class TrainConfig(PhaseConfig):
    """Settings of all phases, and what single phases have different."""

    phases: dict[str, PhaseConfig] = {}
    """What single phases have different, by their names (`pearl list methods --long`)."""

    @field_serializer("phases")
    def _only_what_was_set(self, phases: dict[str, PhaseConfig]) -> dict[str, Any]:
        return _set_alone(phases)

    def phase(self, name: str) -> PhaseConfig:
        """The settings of one phase."""
        changes = self.phases[name].model_dump(exclude_unset=True) if name in self.phases else {}
        usual = self.model_dump(exclude={"phases"})
        images = {**usual["images"], **changes.get("images", {})}
        return PhaseConfig(**{**usual, **changes, "images": images})


class EngineConfig(Section):
    """How the arithmetic is done. Changing it changes results in the last digits."""

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto`: bfloat16 where the device is faster with it."""
    channels_last: bool = True
    """Whether images and convolutions lie in memory with channels last."""
    eval_batch_size: Annotated[int, Field(ge=1)] = 256
    """Images per pass in evaluation."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Most steps of a phase; `--smoke` sets 1."""
    cuda_graphs: bool = False
    """Record training steps on a GPU and replay them, 3 to 4 times as fast for small batches. Losses are the same."""
    reuse: Annotated[bool, Born(True)] = True
    """Whether a run takes phases that another one has trained, bit for bit the same, and keeps its own for others."""
    earlier_states: Annotated[bool, Born(True)] = False
    """Keep what only states of before the newest task need (`--tasks`): with class statistics megabytes a task."""
