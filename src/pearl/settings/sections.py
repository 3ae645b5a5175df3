"""The sections of a configuration, each field with its bounds: the stream, the images, training, the engine."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, model_validator

from pearl.settings.born import Born

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**32, strict=True)]
Share = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]
Pixels = Annotated[int, Field(ge=1, le=4096)]  # of a side; every image takes the square of it
Triple = tuple[float, float, float]
Domain = Literal["plain", "edges", "inverted", "noisy"]  # see `data.domains`


class Section(BaseModel):
    """A part of a configuration: no unknown keys, no infinities."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class StreamConfig(Section):
    """How a data source becomes a sequence of tasks."""

    tasks: Count | Annotated[list[Count], Field(min_length=1)]  # how many equal ones, or their sizes
    order: Literal["natural"] | Seed | Annotated[list[int], Field(min_length=1)] = "natural"  # of the classes;
    # a number seeds numpy's permutation
    per_class: Count | None = None  # training images kept per class; all if not given
    test_per_class: Count | None = None  # the same for the images evaluated on
    classes: Count | None = None  # only the first so many of the order; all if not given
    validation: Share = 0.0  # share of the training images held out, per class
    evaluate_on: Literal["test", "validation"] = "test"
    domains: Annotated[list[Domain], Born([])] = []  # looks in which all tasks come, one after the other; of every
    # class each domain learns from other images

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


class ImagesConfig(Section):
    """What the network sees. Sizes are in pixels; mean and std belong to pixel values in [0, 1]."""

    size: Pixels
    resize: Pixels | None = None  # shorter side before the centre crop; `size` if not given
    augment: Literal["none", "crop", "resized_crop"] = "none"
    pad: Annotated[int, Field(ge=0, le=4096)] = 4  # zeros around the image before a random `crop`
    scale: tuple[Positive, Positive] = (0.08, 1.0)  # area share of a random `resized_crop`
    flip: bool = True  # left-right, with `crop` and `resized_crop`
    mean: Triple = (0.0, 0.0, 0.0)
    std: tuple[Positive, Positive, Positive] = (1.0, 1.0, 1.0)

    @property
    def stored(self) -> int:
        """Pixels of the shorter side of images as they are kept."""
        return self.resize or self.size

    @model_validator(mode="after")
    def _consistent(self) -> "ImagesConfig":
        if self.resize is not None and self.resize < self.size:
            raise ValueError(f"resize {self.resize} is below size {self.size}: make it at least as large")
        if not self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale {list(self.scale)} must rise and end at 1 or below")
        return self


class OptimizerConfig(Section):
    """How parameters take a step; in `groups.NAME` of a phase what one group of its parameters has different."""

    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    lr: Positive = 1e-3
    betas: tuple[Share, Share] = (0.9, 0.999)  # adam, adamw
    momentum: Share = 0.9  # sgd
    nesterov: Annotated[bool, Born(False)] = False  # sgd
    weight_decay: NotNegative = 0.0


class PhaseConfig(OptimizerConfig):
    """Settings of training; in `train.phases.NAME` those that one phase has different."""

    epochs: Annotated[int, Field(ge=1)] = 50
    steps: Annotated[Count | None, Born(None)] = None  # the phase's length, in the place of epochs
    batch_size: Annotated[int, Field(ge=1)] = 32
    schedule: Literal["constant", "cosine", "quarter_cosine", "multistep"] = "constant"
    end_lr: Annotated[NotNegative, Born(0.0)] = 0.0  # cosine: the rate at the end
    warmup: Annotated[Share, Born(0.0)] = 0.0  # share of the steps in which the rate first rises to its schedule
    warmup_lr: Annotated[NotNegative, Born(0.0)] = 0.0  # from this rate
    milestones: list[Annotated[float, Field(gt=0, lt=1)]] = []  # multistep: shares of the phase's epochs
    gamma: Positive = 0.1  # multistep: factor on lr at each milestone
    clip: Positive | None = None  # largest gradient norm
    groups: Annotated[dict[str, OptimizerConfig], Born({})] = {}  # of each, only what was set is kept

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

    phases: dict[str, PhaseConfig] = {}  # of each phase, only what was set is kept

    @field_serializer("phases")
    def _only_what_was_set(self, phases: dict[str, PhaseConfig]) -> dict[str, Any]:
        return _set_alone(phases)

    def phase(self, name: str) -> PhaseConfig:
        """The settings of one phase."""
        changes = self.phases[name].model_dump(exclude_unset=True) if name in self.phases else {}
        return PhaseConfig(**{**self.model_dump(exclude={"phases"}), **changes})


class EngineConfig(Section):
    """How the arithmetic is done. Changing it changes results in the last digits."""

    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 where the device is faster with it
    channels_last: bool = True
    eval_batch_size: Annotated[int, Field(ge=1)] = 256
    max_steps: Annotated[int, Field(ge=1)] | None = None  # per phase; --smoke sets 1
    cuda_graphs: bool = False  # replay training steps on a GPU; the arithmetic, and so a run's name, stays the same
