"""The sections of a configuration, each field with its bounds: the stream, the images, training, the engine."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, model_validator

from pearl.settings.derived_defaults import AUTO, usual_resize

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**32, strict=True)]
Share = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]
Pixels = Annotated[int, Field(ge=1, le=4096)]  # of a side; every image takes its square
Triple = tuple[float, float, float]
Domain = Literal["plain", "edges", "inverted", "noisy"]  # see `data.domains`
Policy = Literal["none", "autoaugment", "randaugment", "trivialaugment"]  # see `data.policies`


class Section(BaseModel):
    """A part of a configuration: no unknown keys, no infinities. Each field's string is its documentation."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class StreamConfig(Section):
    """The division of a data source into a sequence of tasks."""

    tasks: Count | Annotated[list[Count], Field(min_length=1)]
    """Number of tasks with equally many classes, or a list of numbers of classes."""
    order: Literal["natural"] | Seed | Annotated[list[int], Field(min_length=1)] = "natural"
    """Order of the classes: `natural`, a seed of numpy's permutation, or a list of labels."""
    per_class: Count | None = None
    """Training images per class; all if null."""
    test_per_class: Count | None = None
    """Evaluation images per class; all if null."""
    classes: Count | None = None
    """Number of classes, from the first of the order; all if null."""
    validation: Share = 0.0
    """Share of each class's training images to hold out."""
    evaluate_on: Literal["test", "validation"] = "test"
    """`validation`: the held-out images, or the source's own validation images."""
    domains: list[Domain] = []
    """Styles in which all tasks come, one after the other; domains share no training images."""

    @model_validator(mode="after")
    def _each_class_once(self) -> "StreamConfig":
        if isinstance(self.order, list) and len(set(self.order)) != len(self.order):
            raise ValueError("order lists a class twice; list each once")
        return self

    @model_validator(mode="after")
    def _each_domain_once(self) -> "StreamConfig":
        if len(set(self.domains)) != len(self.domains):
            raise ValueError("domains lists one twice; list each once")
        return self


class AugmentConfig(Section):
    """Parameters of augmentation; in `train.phases.NAME.images` the differences of one phase."""

    pad: Annotated[int, Field(ge=0, le=4096)] = 4
    """Pixels of zeros around the image before a random `crop`."""
    scale: tuple[Positive, Positive] = (0.08, 1.0)
    """Smallest and largest share of the area in a random `resized_crop`."""
    flip: bool = True
    """Mirror half of the training images, with `crop` and `resized_crop`."""
    policy: Policy = "none"
    """Policy of random operations such as shears and changes of colour, after crop and flip."""
    brightness: Share = 0.0
    """Half the range, around 1, of a random brightness factor per training image."""

    @model_validator(mode="after")
    def _scale_rises(self) -> "AugmentConfig":
        if not self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale {list(self.scale)} must rise and end at 1 or below")
        return self


class ImagesConfig(AugmentConfig):
    """Preprocessing of images. Sizes are in pixels; mean and std are for pixel values in [0, 1]."""

    size: Pixels
    """Side of the network's square input, in pixels."""
    resize: Pixels | Literal["auto"] | None = None
    """Shorter side after resizing, before the centre crop, in pixels; `size` if null. `auto` is 256/224 of `size`."""
    augment: Literal["none", "crop", "resized_crop"] = "none"
    """Augmentation in training: none, a random crop after padding, or a random resized crop."""
    mean: Triple = (0.0, 0.0, 0.0)
    """Mean of red, green and blue, for values in [0, 1]."""
    std: tuple[Positive, Positive, Positive] = (1.0, 1.0, 1.0)
    """Standard deviations of red, green and blue."""
    bits: Annotated[int, Field(ge=8, le=16, strict=True)] = 16
    """Used bits of 16-bit grey images, such as 12 of many cameras; the upper 8 of them are kept."""
    reduced: bool = False
    """Decode large JPEG files at a half, quarter or eighth of their size, if that is twice the kept size."""

    @property
    def stored(self) -> int:
        """Return the shorter side of stored images, in pixels."""
        return self.resize if isinstance(self.resize, int) else self.size

    @model_validator(mode="after")
    def _consistent(self) -> "ImagesConfig":
        if self.resize == AUTO:
            self.resize = usual_resize(self.size)
        if isinstance(self.resize, int) and self.resize < self.size:
            raise ValueError(f"resize {self.resize} is below size {self.size}: make it at least as large")
        return self


class OptimizerConfig(Section):
    """Optimizer settings; in `groups.NAME` of a phase the differences of one group of its parameters."""

    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """PyTorch's optimizer of this name."""
    lr: Positive = 1e-3
    """Learning rate, before the schedule."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay rates of `adam` and `adamw`."""
    momentum: Share = 0.9
    """Of `sgd`."""
    nesterov: bool = False
    """Nesterov's momentum, for `sgd`."""
    weight_decay: NotNegative = 0.0
    """Weight decay of all parameters; decoupled from the gradient in `adamw`."""


class PhaseConfig(OptimizerConfig):
    """Settings of training; in `train.phases.NAME` the differences of one phase."""

    epochs: Annotated[int, Field(ge=1)] = 50
    """Passes over the task's images."""
    steps: Count | None = None
    """Length of the phase in steps, instead of epochs."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Images per step, over all processes."""
    schedule: Literal["constant", "cosine", "quarter_cosine", "multistep"] = "constant"
    """Learning-rate schedule: `cosine` falls to `end_lr`, `quarter_cosine` nearly to 0, epoch by epoch."""
    end_lr: NotNegative = 0.0
    """Final rate of `cosine`."""
    warmup: Share = 0.0
    """Share of the steps with a linear warm-up of the rate."""
    warmup_lr: NotNegative = 0.0
    """Initial rate of the warm-up."""
    milestones: list[Annotated[float, Field(gt=0, lt=1)]] = []
    """Shares of the phase at which `multistep` multiplies the rate by `gamma`."""
    gamma: Positive = 0.1
    """Factor of `multistep`, see `milestones`."""
    clip: Positive | None = None
    """Maximum norm of the gradient (clipping)."""
    groups: dict[str, OptimizerConfig] = {}
    """Differences of single groups of a phase's parameters, by the method's names for them."""
    images: AugmentConfig = AugmentConfig()
    """Differences from the augmentation of `images`, for images of the task (not of a memory)."""

    @field_serializer("images")
    def _only_what_was_set_of_images(self, images: AugmentConfig) -> dict[str, Any]:
        return images.model_dump(mode="json", exclude_unset=True)

    @field_serializer("groups")
    def _only_what_was_set_of_groups(self, groups: dict[str, OptimizerConfig]) -> dict[str, Any]:
        return _set_alone(groups)

    def group(self, name: str) -> OptimizerConfig:
        """Return the settings of one group of the phase's parameters; those of the phase for an unnamed group."""
        changes = self.groups[name].model_dump(exclude_unset=True) if name in self.groups else {}
        return OptimizerConfig(**{**self.model_dump(include=set(OptimizerConfig.model_fields)), **changes})

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> "PhaseConfig":
        for name in ("", *self.groups):
            if (group := self.group(name)).nesterov and not group.momentum:
                raise ValueError("nesterov needs a momentum above 0; set momentum, or nesterov=false")
        return self


def _set_alone(sections: Mapping[str, BaseModel]) -> dict[str, Any]:
    return {name: section.model_dump(mode="json", exclude_unset=True) for name, section in sections.items()}


class TrainConfig(PhaseConfig):
    """Settings of all phases, and the differences of single phases."""

    phases: dict[str, PhaseConfig] = {}
    """Differences of single phases, by name (`pearl list methods --long`)."""

    @field_serializer("phases")
    def _only_what_was_set(self, phases: dict[str, PhaseConfig]) -> dict[str, Any]:
        return _set_alone(phases)

    def phase(self, name: str) -> PhaseConfig:
        """Return the settings of one phase."""
        changes = self.phases[name].model_dump(exclude_unset=True) if name in self.phases else {}
        usual = self.model_dump(exclude={"phases"})
        images = {**usual["images"], **changes.get("images", {})}
        return PhaseConfig(**{**usual, **changes, "images": images})


class EngineConfig(Section):
    """Computation settings. Changes affect the last digits of results."""

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto`: bfloat16 if the device is faster with it."""
    channels_last: bool = True
    """Store images and convolutions in channels-last memory format."""
    eval_batch_size: Annotated[int, Field(ge=1)] = 256
    """Batch size of evaluation."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Maximum steps of a phase; `--smoke` sets 1."""
    cuda_graphs: bool = False
    """Run training steps on a GPU as CUDA graphs, 3 to 4 times as fast for small batches. Losses are equal."""
    reuse: bool = True
    """Use the phase cache: load phases that another run has trained, bit by bit the same, and store new ones."""
    earlier_states: bool = False
    """Keep files that only earlier states need (`--tasks`): with class statistics megabytes per task."""
