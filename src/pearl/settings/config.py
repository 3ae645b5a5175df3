"""A run's configuration: pydantic models <- recipe YAML <- dotted overrides; all problems are reported at once."""

import functools
import hashlib
import json
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from pearl.errors import ConfigError
from pearl.settings.declared import declared
from pearl.settings.online import OnlineConfig
from pearl.settings.parts import BACKBONES, LEARNERS, METHODS, SOURCES
from pearl.settings.registry import Spec, nearest, problems_of, readable
from pearl.settings.sections import EngineConfig, ImagesConfig, Section, Seed, StreamConfig, TrainConfig
from pearl.yaml_io import DEPTH, parse_yaml


class Expected(Section):
    """A figure of the paper to compare the recipe's results with."""

    mean: float
    std: float | None = None
    where: str


class ModelConfig(Section):
    """Settings of a model and its training: all that affects a result except the data."""

    seed: Seed = 0
    """Seeds initial weights, batches, augmentation, and the choice of images where `stream` limits them."""
    images: ImagesConfig
    """Input of the network."""
    backbone: dict[str, Any]
    """The network: a name, or a mapping of name and options (`pearl list backbones`)."""
    method: dict[str, Any]
    """The method: a name, or a mapping of name and options (`pearl list methods`)."""
    train: TrainConfig = TrainConfig()
    """Training of phases."""
    engine: EngineConfig = EngineConfig()
    """Precision, memory format and other computation settings."""
    smoke: bool = False
    """One step per phase on a few images; what `--smoke` sets."""

    def to_yaml(self) -> str:
        """Return the resolved configuration as YAML; reading it returns an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, width=120)


class RunConfig(ModelConfig):
    """All settings that affect a run's result."""

    recipe: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$")]
    """Name of the recipe; part of the run directory's name."""
    about: str = ""
    """A one-line description."""
    data: dict[str, Any]
    """The data source: a name, or a mapping of name and options (`pearl list data`)."""
    stream: StreamConfig
    """The division of the data into a sequence of tasks."""
    expected: dict[str, Expected] = Field(default_factory=dict)
    """Figures of a paper to print next to the results."""

    @property
    def decides(self) -> dict[str, Any]:
        """Return the settings that affect the result, without phases that the method does not have."""
        values = self.model_dump(mode="json", exclude={"about", "expected"})
        values["engine"] = {key: value for key, value in values["engine"].items() if key not in _SAME_RESULT}
        used, train = used_phases(self.method), values["train"]
        train["phases"] = {name: phase for name, phase in train["phases"].items() if name in used}
        return values

    @property
    def id(self) -> str:
        """Return the name of the run directory: readable, and unique to the settings that affect the result."""
        digest = hashlib.sha256(json.dumps(self.decides, sort_keys=True).encode()).hexdigest()[:8]
        smoke = "-smoke" if self.smoke else ""
        learns = re.sub(r"[^A-Za-z0-9_.-]+", "-", readable(self.learns))
        return f"{self.recipe}-{learns}-seed{self.seed}{smoke}-{digest}"

    @property
    def learns(self) -> str:
        """Return the name of the method."""
        return str(self.method["name"])


class OnlineModelConfig(ModelConfig):
    """Settings of a model that learns from a stream."""

    online: OnlineConfig
    """The online learner. It gets the images in the order of their arrival."""


class OnlineRunConfig(RunConfig):
    """All settings that affect the result of a run with hidden task boundaries."""

    online: OnlineConfig
    """The order in which images arrive, and what learns from them."""

    @model_validator(mode="after")
    def _has_one_task(self) -> "OnlineRunConfig":
        if self.stream.tasks != 1 or self.stream.domains:
            raise ValueError("online hides the boundaries: set stream.tasks=1, and no stream.domains")
        return self

    @property
    def learns(self) -> str:
        """Return the name of what learns: the online learner."""
        return str(self.online.learner["name"])


Config = TypeVar("Config", bound=ModelConfig)
_PARTS = {"data": SOURCES, "backbone": BACKBONES, "method": METHODS}
_SAME_RESULT = {"cuda_graphs", "reuse", "earlier_states"}  # settings of the engine that do not affect results
_PART_KEYS = {*_PARTS, "rank", "learner"}  # the rank rule is a part with options of a part


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return [name for name in _packaged() if not name.startswith("_")]


def _packaged() -> list[str]:
    """Return the names of all packaged recipe files; one whose name begins with `_` can only be extended."""
    folder = resources.files("pearl.settings.recipes")
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def read_recipe(recipe: str | Path, _below: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a recipe by name or path of a YAML file, merged into the one it `extends`.

    Raises:
        ConfigError: no such recipe, or not a YAML mapping.
    """
    path = Path(recipe)
    if path.suffix in {".yaml", ".yml"}:
        if not path.is_file():
            raise ConfigError(f"recipe file {path} not found; give the path of a YAML file or the name of a recipe")
        text, name, location = _read_text(path), path.stem, str(path.resolve())
    else:
        name = location = str(recipe)
        if name not in (_packaged() if _below else recipe_names()):
            raise ConfigError(f"unknown recipe {name!r}; {nearest(name, recipe_names())} (`pearl list recipes`)")
        text = (resources.files("pearl.settings.recipes") / f"{name}.yaml").read_text(encoding="utf-8")
    if location in _below:
        raise ConfigError(f"recipe {name}: extends itself ({' -> '.join([*_below, location])}); remove one `extends`")
    try:
        raw = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"recipe {name}: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"recipe {name}: must be a mapping of settings, is {type(raw).__name__}")
    base = _base(str(raw.pop("extends")), path.parent, (*_below, location)) if "extends" in raw else {}
    base.pop("expected", None)  # an expected figure belongs to one recipe only
    return {**merge(base, raw), "recipe": name}


def _base(extends: str, folder: Path, below: tuple[str, ...]) -> dict[str, Any]:
    """Return the recipe that another extends: by name, or by a path relative to the other."""
    return read_recipe(folder / extends if extends.endswith((".yaml", ".yml")) else extends, below)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"recipe file {path}: cannot be read ({error})") from None


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge `changes` into `base`, section by section. A part with another name starts from its own defaults."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        # a single rank: of methods with the same rank for all layers
        if key in _PART_KEYS and not isinstance(value, int | float):
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


def parse_value(name: str, text: str) -> Any:
    """Parse a value from the command line as YAML.

    Raises:
        ConfigError: it is not YAML; the message includes `name`.
    """
    try:
        return parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: the value {text!r} is {error}; quote it") from None


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Parse `["train.lr=0.1", "method=finetune"]` into a nested mapping; values are YAML.

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
        if key.count(".") >= DEPTH:
            problems.append(f"{key[:40]}...: no setting is nested that deep; fix the name")
            continue
        try:
            value = parse_value(key, text)
        except ConfigError as error:
            problems += error.problems
            continue
        for part in reversed(key.split(".")):
            value = {part: value}
        tree = merge(tree, value)
    if problems:
        raise ConfigError(*problems)
    return tree


def raw_config(recipe: str | Path, overrides: Sequence[str] = (), *, smoke: bool = False) -> dict[str, Any]:
    """Return a recipe with overrides, unchecked. `smoke` reduces it to one step per phase and two images per class.

    Raises:
        ConfigError: no such recipe, or overrides that are not key=value.
    """
    raw = change(read_recipe(recipe), parse_overrides(overrides))
    if smoke:  # a section that is not a mapping is kept, for the check to report
        odd = {key for key, value in raw.items() if isinstance(SMOKE.get(key), dict) and not isinstance(value, dict)}
        raw = merge(raw, {key: value for key, value in SMOKE.items() if key not in odd})
        phases = raw["train"].get("phases") if "train" not in odd else None
        if isinstance(phases, dict):
            small = {
                name: SMOKE["train"]
                for name, settings_of_phase in phases.items()
                if isinstance(settings_of_phase, dict)
            }
            raw = merge(raw, {"train": {"phases": small}})
    return raw


def change(raw: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with a user's overrides, which may include a method's file.

    Expected figures remain only if it is still the paper's experiment.
    """
    overrides = admit(overrides)
    if overrides.keys() - {"seed", "engine", "about", "expected"}:
        raw = {key: value for key, value in raw.items() if key != "expected"}
    return merge(raw, overrides)


def admit(overrides: dict[str, Any]) -> dict[str, Any]:
    """Return a user's overrides with the method's name instead of its file (see `Registry.admit`).

    Raises:
        ConfigError: the file or class cannot be used.
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
    """Return a recipe with overrides, checked and complete.

    Raises:
        ConfigError: lists every problem with the nearest valid name.
    """
    return check_config(raw_config(recipe, overrides, smoke=smoke))


def check_config(raw: dict[str, Any], kind: type[Config] = RunConfig) -> Config:  # type: ignore[assignment]
    """Return a complete mapping as a `RunConfig` (or another type), with the parts' defaults filled in.

    Raises:
        ConfigError: lists every problem.
    """
    problems: list[str] = []
    raw, method = dict(raw), str(_as_spec(raw.get("method")).get("name"))
    if "online" in raw:
        kind = {RunConfig: OnlineRunConfig, ModelConfig: OnlineModelConfig}.get(kind, kind)  # type: ignore[assignment]
    if "online" in raw and isinstance(online := raw["online"], dict) and "learner" in online:
        try:
            raw["online"] = {**online, "learner": LEARNERS.resolve(online["learner"], "online.learner")}
        except ConfigError as error:
            problems += error.problems
            raw["online"] = {**online, "learner": {"name": "?"}}
    for key, registry in _PARTS.items():
        if key in raw:  # a missing one is reported below
            try:
                raw[key] = registry.resolve(raw[key], key)
            except ConfigError as error:
                problems += error.problems
                raw[key] = {"name": "?"}
    try:
        config = kind.model_validate(raw)
    except ValidationError as error:
        problems += problems_of(error, "", functools.partial(_known_keys, kind))
    if not METHODS.closed(method):
        problems += _unknown_phases(raw.get("train"), method)
    if problems:
        raise ConfigError(*problems)
    return config.model_copy(update={"method": METHODS.follow(config.method, config)})


def used_phases(method: Spec) -> set[str]:
    """Return the phases that a method, a resolved spec, has with its options."""
    with suppress(ConfigError):
        phases = declared(METHODS.load(method["name"]))
        return {name for name, spec in phases.items() if spec.used(method)}
    return set()


def _phases(methods: Iterable[str]) -> dict[str, set[str]]:
    """Return the phases of methods with the groups of their parameters; methods that cannot be loaded are skipped."""
    groups_of: dict[str, set[str]] = {}
    for name in methods:
        with suppress(ConfigError):
            for phase, spec in declared(METHODS.load(name)).items():
                groups_of.setdefault(phase, set()).update(spec.groups)
    return groups_of


def _unknown_phases(train: Any, method: str) -> Iterator[str]:
    """Return a line for each setting of a phase or group that no method has; a recipe may be for several methods."""
    phases = train.get("phases") if isinstance(train, dict) else None
    known = _phases([*METHODS.names(), method])
    for name, settings in phases.items() if isinstance(phases, dict) else ():
        groups = settings.get("groups") if isinstance(settings, dict) else None
        if name not in known:
            yield f"train.phases.{name}: no such phase; {nearest(str(name), known)}"
            continue
        for group in groups if isinstance(groups, dict) else ():
            if group not in known[name]:
                hint = nearest(str(group), known[name]) if known[name] else "its parameters have no groups"
                yield f"train.phases.{name}.groups.{group}: no such group; {hint}"


def _known_keys(kind: Any, path: tuple[Any, ...]) -> list[str] | None:
    """Return the valid keys of the section at `path`: none in a plain value, None (any) in free mappings."""
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
