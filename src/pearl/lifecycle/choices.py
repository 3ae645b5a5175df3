"""Settings for a task of a model: those of the model, or those of a new one."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from pearl.errors import ConfigError, RunError, check_types
from pearl.lifecycle.saved import check_method, read_config
from pearl.settings.config import ModelConfig, RunConfig, admit, check_config, merge, raw_config
from pearl.settings.parts import METHODS
from pearl.storage.run_directory import RunDirectory

Backbone = str | dict[str, Any] | None  # a name, or a name with options


@dataclass(frozen=True, kw_only=True)
class LearnOptions:
    """Options of learning a task; `pearl.learn` explains each.

    Raises:
        ConfigError: an option of another type.
    """

    task: str | None = None  # its name; that of the folder or file if not given
    recipe: str | None = None  # of a new model
    backbone: str | dict[str, Any] | None = None  # of a new model
    start: str | Path | None = None  # of a new model: the run or model to start from
    aliases: Mapping[str, str] | None = None  # classes by the folders that show them
    fast: bool = False  # by class statistics alone
    first_answer: bool = True  # store a model by class statistics alone before training, if it can be
    nested: bool = False  # classes are the innermost folders
    holdout: float = 0.0  # share of each class that is kept out of training
    allow_new_style: bool = False
    discard: bool = False  # an interrupted task
    overrides: Mapping[str, Any] = field(default_factory=dict)  # settings, nested

    def __post_init__(self) -> None:
        check_types("learn", {each.name: each.type for each in fields(self)}, vars(self))
        if not 0 <= self.holdout < 1:
            raise ConfigError(f"holdout={self.holdout}: a share of each class's images, from 0 to below 1, as 0.1")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return options by name; all other names are settings."""
        names = {each.name for each in fields(cls)} - {"overrides"}
        settings = {key: value for key, value in given.items() if key not in names}
        return cls(**{key: value for key, value in given.items() if key in names}, overrides=settings)


def config_for(path: Path, source: Path | None, options: LearnOptions) -> ModelConfig:
    """Return the settings of a task: the model's own with other training settings, or those of a new model.

    Raises:
        ConfigError: invalid settings, or fixed ones.
        RunError: the directory is not a model, or damaged.
    """
    recipe, backbone, overrides = options.recipe, options.backbone, admit(dict(options.overrides))
    before = source or path
    directory = RunDirectory(before)
    directory.check_no_gap()
    if source or directory.config_file.exists() or directory.finished:
        config = read_config(before)
        if source and not directory.finished:
            raise RunError(f"{source}: no task is finished; choose a directory with a finished task")
        if not source and isinstance(config, RunConfig):
            raise RunError(
                f"{path}: a run of `pearl run`, whose recipe defines its tasks; start a model from it with: "
                f"pearl learn NEW --from {path} --data FOLDER"
            )
        if directory.finished:
            if (named := overrides.get("method", {})).keys() <= {"name"}:  # the name of the setting, not its value
                check_method(before, config, named.get("name"))
                overrides = {key: value for key, value in overrides.items() if key != "method"}
            if fixed := _changed(config, recipe, backbone, overrides):
                raise ConfigError(
                    f"{', '.join(fixed)}: fixed since {before} was created; only train.* may change between tasks"
                )
            overrides = {key: value for key, value in overrides.items() if key == "train"}
            return check_config(
                merge(config.model_dump(mode="json", include=set(ModelConfig.model_fields)), overrides), ModelConfig
            )
    return _new_config(recipe, backbone, overrides)


def _changed(config: ModelConfig, recipe: str | None, backbone: Backbone, overrides: dict[str, Any]) -> list[str]:
    """Return the settings that would make another model; repeating the model's own is allowed."""
    fixed = set(ModelConfig.model_fields) - {"train"}
    before = config.model_dump(mode="json", include=fixed)
    raw = {key: value for key, value in raw_config(recipe).items() if key in fixed} if recipe else {}
    raw = merge(merge(before, raw), {"backbone": backbone} if backbone else {})
    raw = merge(raw, {key: value for key, value in overrides.items() if key != "train"})
    after = check_config({"train": config.train, **raw}, ModelConfig).model_dump(mode="json", include=fixed)
    other = {key for key in fixed if after[key] != before[key]}
    words = sorted(other & overrides.keys())
    words += ["--backbone"] * bool(backbone and "backbone" in other - overrides.keys())
    return words + ["--recipe"] * bool(recipe and other and not words)


def _new_config(recipe: str | None, backbone: Backbone, overrides: dict[str, Any]) -> ModelConfig:
    """Return the settings of a new model."""
    fields = ModelConfig.model_fields
    spec = merge({"backbone": backbone}, {"backbone": overrides.get("backbone", {})})["backbone"]
    raw = raw_config(recipe) if recipe else {"backbone": "timm/"}
    timm = str(merge({"backbone": raw.get("backbone")}, {"backbone": spec})["backbone"].get("name")).startswith("timm/")
    raw = raw if recipe else raw_config("photos-vit" if timm else "photos-resnet18")
    if timm and (spec or not recipe):
        spec = {"pretrained": not spec.get("weights"), **spec}
    raw = merge(raw, {"backbone": spec})
    raw = merge({key: value for key, value in raw.items() if key in fields}, overrides)
    return check_config(_with_statistics(raw), ModelConfig)


def _with_statistics(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a new model, with class statistics unless another classifier is set."""
    method = merge({}, {"method": raw["method"]})["method"]
    with suppress(ConfigError):  # `check_config` reports an unknown name
        name = str(method["name"])
        if not METHODS.closed(name) and "classifier" in METHODS.options(name).model_fields:
            return {**raw, "method": {"classifier": "statistics", **method}}
    return raw


def has_statistics(config: ModelConfig) -> bool:
    """Return True if the classifier is class statistics."""
    return bool(config.method.get("classifier", {}).get("name") == "statistics")
