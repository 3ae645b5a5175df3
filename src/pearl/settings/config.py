"""A run's configuration: pydantic models <- recipe YAML <- dotted overrides, every problem reported at once."""

import functools
import hashlib
import json
import re
import typing
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, model_validator

from pearl.errors import ConfigError
from pearl.settings.born import as_written, later, without_born
from pearl.settings.parts import BACKBONES, METHODS, SOURCES
from pearl.settings.registry import nearest, problems_of, readable

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**32, strict=True)]
Share = Annotated[float, Field(ge=0, lt=1)]
Triple = tuple[float, float, float]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class StreamConfig(_Section):
    """How a data source becomes a sequence of tasks."""

    tasks: Count | Annotated[list[Count], Field(min_length=1)]  # how many equal ones, or their sizes
    order: Literal["natural"] | Seed | Annotated[list[int], Field(min_length=1)] = "natural"  # of the classes;
    # a number seeds numpy's permutation
    per_class: Count | None = None  # training images kept per class; all if not given
    test_per_class: Count | None = None  # the same for the images evaluated on
    classes: Count | None = None  # only the first so many of the order; all if not given
    validation: Share = 0.0  # share of the training images held out, per class
    evaluate_on: Literal["test", "validation"] = "test"

    @model_validator(mode="after")
    def _each_class_once(self) -> "StreamConfig":
        if isinstance(self.order, list) and len(set(self.order)) != len(self.order):
            raise ValueError("order names a class twice; list each once")
        return self


class ImagesConfig(_Section):
    """What the network sees. Sizes are in pixels; mean and std belong to pixel values in [0, 1]."""

    size: Annotated[int, Field(ge=1)]
    resize: Annotated[int, Field(ge=1)] | None = None  # shorter side before the centre crop; `size` if not given
    augment: Literal["none", "crop", "resized_crop"] = "none"
    pad: Annotated[int, Field(ge=0)] = 4  # zeros around the image before a random `crop`
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


class PhaseConfig(_Section):
    """Settings of training; in `train.phases.NAME` those that one phase has different."""

    epochs: Annotated[int, Field(ge=1)] = 50
    batch_size: Annotated[int, Field(ge=1)] = 32
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    lr: Positive = 1e-3
    betas: tuple[Share, Share] = (0.9, 0.999)  # adam, adamw
    momentum: Share = 0.9  # sgd
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    schedule: Literal["constant", "cosine", "multistep"] = "constant"
    milestones: list[Annotated[float, Field(gt=0, lt=1)]] = []  # multistep: shares of the phase's epochs
    gamma: Positive = 0.1  # multistep: factor on lr at each milestone
    clip: Positive | None = None  # largest gradient norm


class TrainConfig(PhaseConfig):
    """Settings of all phases, and what single phases have different."""

    phases: dict[str, PhaseConfig] = {}  # of each phase, only what was set is kept

    @field_serializer("phases")
    def _only_what_was_set(self, phases: dict[str, PhaseConfig]) -> dict[str, Any]:
        return {name: settings.model_dump(mode="json", exclude_unset=True) for name, settings in phases.items()}

    def phase(self, name: str) -> PhaseConfig:
        """The settings of one phase."""
        changes = self.phases[name].model_dump(exclude_unset=True) if name in self.phases else {}
        return PhaseConfig(**{**self.model_dump(exclude={"phases"}), **changes})


class EngineConfig(_Section):
    """How the arithmetic is done. Changing it changes results in the last digits."""

    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 where the device is faster with it
    channels_last: bool = True
    eval_batch_size: Annotated[int, Field(ge=1)] = 256
    max_steps: Annotated[int, Field(ge=1)] | None = None  # per phase; --smoke sets 1
    cuda_graphs: bool = False  # replay training steps on a GPU; the arithmetic, and so a run's name, stays the same


class Expected(_Section):
    """A figure of the paper that the recipe is to be held against."""

    mean: float
    std: float | None = None
    where: str


class ModelConfig(_Section):
    """What a model is made of and how it learns: all that decides a result but the data."""

    seed: Seed = 0
    images: ImagesConfig
    backbone: dict[str, Any]
    method: dict[str, Any]
    train: TrainConfig = TrainConfig()
    engine: EngineConfig = EngineConfig()
    smoke: bool = False

    def to_yaml(self) -> str:
        """The resolved configuration; reading it back gives an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, width=120)


class RunConfig(ModelConfig):
    """Everything that decides a run's result."""

    recipe: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$")]  # part of the run directory's name
    about: str = ""
    data: dict[str, Any]
    stream: StreamConfig
    expected: dict[str, Expected] = {}

    @property
    def decides(self) -> dict[str, Any]:
        """Everything that decides the result; settings of other methods' phases do not, nor what is `Born` so."""
        values = without_born(RunConfig, self.model_dump(mode="json", exclude={"about", "expected"}))
        values |= {key: registry.decisive(values[key]) for key, registry in _PARTS.items()}
        del values["engine"]["cuda_graphs"]
        own, train = phase_names(self.method["name"]), values["train"]
        usual = {key: value for key, value in later(PhaseConfig).items() if key not in train}
        train["phases"] = {
            name: {key: value for key, value in phase.items() if key not in usual or value != usual[key]}
            for name, phase in train["phases"].items()
            if name in own
        }
        return values

    @property
    def id(self) -> str:
        """Name of the run directory: readable, and unique to everything that decides the result."""
        digest = hashlib.sha256(json.dumps(self.decides, sort_keys=True).encode()).hexdigest()[:8]
        smoke = "-smoke" if self.smoke else ""
        method = re.sub(r"[^A-Za-z0-9_.-]+", "-", readable(self.method["name"]))
        return f"{self.recipe}-{method}-seed{self.seed}{smoke}-{digest}"


Config = TypeVar("Config", bound=ModelConfig)

_PARTS = {"data": SOURCES, "backbone": BACKBONES, "method": METHODS}
_PART_KEYS = {*_PARTS, "rank"}  # the rank rule is a part of a part


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    folder = resources.files("pearl.settings.recipes")
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def read_recipe(recipe: str | Path, _below: tuple[str, ...] = ()) -> dict[str, Any]:
    """A recipe by its name or by the path of a YAML file, with what it `extends` below it.

    Raises:
        ConfigError: no such recipe, or not a YAML mapping.
    """
    path = Path(recipe)
    if path.suffix in {".yaml", ".yml"}:
        if not path.is_file():
            raise ConfigError(f"recipe file {path} not found; give the path of a YAML file or the name of a recipe")
        text, name, place = _read_text(path), path.stem, str(path.resolve())
    else:
        name = place = str(recipe)
        if name not in recipe_names():
            raise ConfigError(f"unknown recipe {name!r}; {nearest(name, recipe_names())} (`pearl list recipes`)")
        text = (resources.files("pearl.settings.recipes") / f"{name}.yaml").read_text(encoding="utf-8")
    if place in _below:
        raise ConfigError(f"recipe {name}: extends itself ({' -> '.join([*_below, place])}); break the circle")
    try:
        raw = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"recipe {name}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"recipe {name}: must be a mapping of settings, is {type(raw).__name__}")
    base = _base(str(raw.pop("extends")), path.parent, (*_below, place)) if "extends" in raw else {}
    base.pop("expected", None)  # an expected figure belongs to one recipe only
    return {**merge(base, raw), "recipe": name}


def _base(extends: str, folder: Path, below: tuple[str, ...]) -> dict[str, Any]:
    """The recipe that another extends: by name, or by a path from where the other lies."""
    return read_recipe(folder / extends if extends.endswith((".yaml", ".yml")) else extends, below)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"recipe file {path}: cannot be read ({error})") from None


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` on top, section by section. A part with another name starts from its own defaults."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if key in _PART_KEYS and not isinstance(value, int | float):  # a rank, of methods that have one for all layers
            old = _as_spec(old)
            value = _as_spec(value, default_name=old.get("name"))
            if "name" in old and value.get("name") != old["name"]:
                old = {}
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _as_spec(value: Any, default_name: Any = None) -> dict[str, Any]:
    if isinstance(value, dict):
        return value if "name" in value or default_name is None else {"name": default_name, **value}
    return {} if value is None else {"name": value}


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """`["train.lr=0.1", "method=finetune"]` as a nested mapping; values are read as YAML.

    Raises:
        ConfigError: an item without `=`, or a value that is not YAML.
    """
    tree: dict[str, Any] = {}
    problems = []
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            problems.append(f"{item!r} is not of the form key=value, such as train.lr=0.001")
            continue
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError):
            problems.append(f"{key}: the value {text!r} is not valid YAML; quote it")
            continue
        for part in reversed(key.split(".")):
            value = {part: value}
        tree = merge(tree, value)
    if problems:
        raise ConfigError(*problems)
    return tree


def raw_config(recipe: str | Path, overrides: Sequence[str] = (), *, smoke: bool = False) -> dict[str, Any]:
    """A recipe with overrides, not yet checked. `smoke` shrinks it: one step per phase, two images per class.

    Raises:
        ConfigError: no such recipe, or overrides that are not key=value.
    """
    raw = change(read_recipe(recipe), parse_overrides(overrides))
    if smoke:  # a section that is no mapping stays as it is, for the check to name
        odd = {key for key, value in raw.items() if isinstance(SMOKE.get(key), dict) and not isinstance(value, dict)}
        raw = merge(raw, {key: value for key, value in SMOKE.items() if key not in odd})
        phases = raw["train"].get("phases") if "train" not in odd else None
        if isinstance(phases, dict):
            small = {name: SMOKE["train"] for name, own in phases.items() if isinstance(own, dict)}
            raw = merge(raw, {"train": {"phases": small}})
    return raw


def change(raw: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A recipe with a user's overrides, which may name a method's file.

    What the paper reports stays beside it only if it is still the paper's experiment.
    """
    overrides = admit(overrides)
    if overrides.keys() - {"seed", "engine", "about", "expected"}:
        raw = {key: value for key, value in raw.items() if key != "expected"}
    return merge(raw, overrides)


def admit(overrides: dict[str, Any]) -> dict[str, Any]:
    """A user's overrides, with the method's name in the place of its file (see `Registry.admit`).

    Raises:
        ConfigError: that file or class cannot be used.
    """
    if "method" not in overrides:
        return overrides
    spec = dict(_as_spec(overrides["method"]))
    try:
        if isinstance(spec.get("name"), str):
            spec["name"] = METHODS.admit(spec["name"])
        return {**overrides, "method": spec}
    except ConfigError as error:
        raise ConfigError(*(f"method: {problem}" for problem in error.problems)) from None


SMOKE: dict[str, Any] = {
    "smoke": True,
    "engine": {"max_steps": 1, "eval_batch_size": 64},
    "stream": {"per_class": 2, "test_per_class": 1},
    "train": {"batch_size": 8},
}


def load_config(recipe: str | Path, overrides: Sequence[str] = (), *, smoke: bool = False) -> RunConfig:
    """A recipe with overrides, checked and complete.

    Raises:
        ConfigError: with every problem found and the nearest valid name for each.
    """
    return check_config(raw_config(recipe, overrides, smoke=smoke))


def as_stored(raw: dict[str, Any], kind: type[ModelConfig]) -> dict[str, Any]:
    """A stored configuration, not yet checked, with the options that came after it (see `born.Born`)."""
    raw = as_written(kind, raw)
    parts = {key: raw[key] for key in _PARTS if isinstance(raw.get(key), dict) and "name" in raw[key]}
    return raw | {key: _PARTS[key].as_written(spec) for key, spec in parts.items()}


def check_config(raw: dict[str, Any], kind: type[Config] = RunConfig) -> Config:  # type: ignore[assignment]
    """A complete mapping as a `RunConfig` (or another kind), with the parts' defaults filled in.

    Raises:
        ConfigError: with every problem found.
    """
    problems: list[str] = []
    raw, method = dict(raw), str(_as_spec(raw.get("method")).get("name"))
    for key, registry in _PARTS.items():
        if key in raw:  # one that is missing is named below
            try:
                raw[key] = registry.resolve(raw[key], key)
            except ConfigError as error:
                problems += error.problems
                raw[key] = {"name": "?"}
    try:
        config = kind.model_validate(raw)
    except ValidationError as error:
        problems += problems_of(error, "", functools.partial(_known_keys, kind))
    train = raw.get("train")
    phases = train.get("phases") if isinstance(train, dict) and not METHODS.closed(method) else None
    known = phase_names(*METHODS.names(), method)
    strange = [name for name in phases if name not in known] if isinstance(phases, dict) else []
    problems += [f"train.phases.{name}: no such phase; {nearest(str(name), known)}" for name in strange]
    if problems:
        raise ConfigError(*problems)
    return config


def phase_names(*methods: str) -> set[str]:
    """Names of the phases of these methods; those of a method that cannot be had are left out.

    A recipe may hold settings for several methods.
    """
    found: set[str] = set()
    for name in methods:
        with suppress(ConfigError):
            found |= {*METHODS.load(name).phases}  # type: ignore[attr-defined]
    return found


def _known_keys(kind: Any, path: tuple[Any, ...]) -> list[str] | None:
    """The valid keys of the section at `path`: none below a plain value, None (any) where a mapping's keys are free."""
    for key in path:
        if typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
        elif isinstance(kind, type) and issubclass(kind, BaseModel) and key in kind.model_fields:
            kind = kind.model_fields[key].annotation
        else:
            return []
    if typing.get_origin(kind) is dict:
        return None
    return [*kind.model_fields] if isinstance(kind, type) and issubclass(kind, BaseModel) else []
