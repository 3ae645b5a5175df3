"""Names for the parts a recipe chooses: methods, backbones, data sources, rank rules.

A part is a class or function whose *keyword-only* parameters are its options: the signature gives the defaults, the
types that are checked, `pearl show`, and the resolved configuration of a run. Nothing is imported before a name is
used, so listing names costs no torch.
"""

import dataclasses
import difflib
import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from pearl.errors import ConfigError, printable

Spec = dict[str, Any]  # {"name": ..., option: value, ...}


def nearest(word: str, choices: Iterable[str]) -> str:
    """A hint for a word that is not one of the choices: the nearest one, or all of them if none is near."""
    choices = sorted(choices)
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(map(printable, choices))}"


def problems_of(
    error: ValidationError, where: str, known: Callable[[tuple[Any, ...]], Iterable[str] | None]
) -> list[str]:
    """One line for each setting pydantic found wrong.

    `known` gives the valid keys of the section at a path, or None where any key may stand.
    """
    found: dict[str, list[str]] = {}
    for item in error.errors():
        path = _path(item, known)
        key = ".".join([*filter(None, [where]), *map(str, path)])
        if item["type"] == "extra_forbidden":
            message = f"unknown key; {nearest(str(path[-1]), known(path[:-1]) or ())}"
        elif item["type"] == "missing":
            whole = path == item["loc"]  # else an item of a tuple
            message = "missing; give it a value" if whole else f"too few values (given: {item['input']!r})"
        else:
            text = item["msg"].removeprefix("Value error, ")
            given = "" if isinstance(item["input"], Mapping) else f" (given: {item['input']!r})"
            message = f"{text[0].lower()}{text[1:]}{given}"
        found.setdefault(key, []).append(message)
    return [f"{key}: {', or '.join(messages)}" for key, messages in found.items()]


def _path(item: Mapping[str, Any], known: Callable[[tuple[Any, ...]], Iterable[str] | None]) -> tuple[Any, ...]:
    """Where an error is, without pydantic's own parts, such as the member of a union that did not match."""
    loc: tuple[Any, ...] = item["loc"]
    for end in range(len(loc)):
        keys = known(loc[:end])
        if keys is not None and loc[end] not in keys:
            return loc[: end + 1] if item["type"] == "extra_forbidden" else loc[:end]
    return loc


class Registry:
    """Parts of one kind by name. `name/*` stands for a family: the rest of the name is the part's first argument."""

    def __init__(self, kind: str, targets: Mapping[str, str]) -> None:
        self.kind = kind
        self.targets = dict(targets)

    def names(self) -> list[str]:
        """All names, families with their star."""
        return list(self.targets)

    def load(self, name: str) -> Callable[..., Any]:
        """Import the class or function behind a name.

        Raises:
            ConfigError: no such name; the message gives the nearest one.
        """
        family, _, member = name.partition("/")
        if member == "*":
            raise ConfigError(f"{name} stands for a family; name a member, such as timm/deit_tiny_patch16_224")
        target = self.targets.get(f"{family}/*" if member else name)
        if target is None:
            raise ConfigError(f"unknown {self.kind} {name!r}; {nearest(name, self.targets)}")
        module, attribute = target.split(":")
        part = getattr(importlib.import_module(module), attribute)
        return functools.partial(part, member) if member else part

    def options(self, name: str) -> type[BaseModel]:
        """The options of a part as a pydantic model, made from its keyword-only parameters."""
        return _options_model(self.load(name))

    def resolve(self, spec: Any, where: str) -> Spec:
        """Check a part's name and options and fill in the defaults.

        Raises:
            ConfigError: with every problem of this part.
        """
        if isinstance(spec, str | int | float):
            spec = {"name": str(spec)}
        if not isinstance(spec, Mapping) or "name" not in spec:
            raise ConfigError(f"{where}: needs a name; choose from {', '.join(self.names())}")
        name = str(spec["name"])
        try:
            model = self.options(name)
        except ConfigError as error:
            raise ConfigError(*(f"{where}.name: {problem}" for problem in error.problems)) from None
        given = {str(key): value for key, value in spec.items() if key != "name"}
        problems: list[str] = []
        for key, registry in _nested_registries(self.load(name)).items():
            if key in given:
                try:
                    given[key] = registry.resolve(_named(given[key], model.model_fields[key].default), f"{where}.{key}")
                except ConfigError as error:
                    problems += error.problems
                    del given[key]
        try:
            checked = model.model_validate(given)
        except ValidationError as error:
            keys = [*model.model_fields]
            problems += problems_of(error, where, lambda path: (keys or ["(it has no options)"]) if not path else [])
        if problems:
            raise ConfigError(*problems)
        return {"name": name, **checked.model_dump(mode="json")}

    def build(self, spec: Spec, *args: Any) -> Any:
        """Make the part that a resolved spec describes; `args` come before its options."""
        part = self.load(spec["name"])
        nested = _nested_registries(part)
        options = {
            key: nested[key].build(value) if key in nested else value for key, value in spec.items() if key != "name"
        }
        try:
            return part(*args, **options)
        except ValueError as error:
            raise ConfigError(f"{self.kind} {spec['name']}: {error}") from None

    def spec_of(self, part: Any) -> Spec:
        """The spec of a dataclass instance that this registry can build."""
        for name in self.names():
            if type(part) is self.load(name):
                return {"name": name, **dataclasses.asdict(part)}
        raise TypeError(f"{type(part).__name__} is not a registered {self.kind}")


def _keyword_only(part: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(part).parameters.values()
    return [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


def _hints(part: Callable[..., Any]) -> dict[str, Any]:
    function = part.func if isinstance(part, functools.partial) else part
    return typing.get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)


def _nested_registries(part: Callable[..., Any]) -> dict[str, Registry]:
    """Options that are parts themselves: annotated `Annotated[Kind, REGISTRY]`."""
    found = {}
    for name, hint in _hints(part).items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, Registry):
                found[name] = note
    return found


def _options_model(part: Callable[..., Any]) -> type[BaseModel]:
    hints, nested = _hints(part), _nested_registries(part)
    fields: dict[str, Any] = {}
    for parameter in _keyword_only(part):
        name, default = parameter.name, parameter.default
        if name in nested:
            fields[name] = (dict[str, Any], nested[name].spec_of(default))
        else:
            fields[name] = (hints[name], ... if default is inspect.Parameter.empty else default)
    return create_model("Options", __config__=ConfigDict(extra="forbid", allow_inf_nan=False), **fields)


def _named(spec: Any, default: Spec) -> Any:
    """A part's spec; options without a name belong to the default part."""
    return {"name": default["name"], **spec} if isinstance(spec, Mapping) and "name" not in spec else spec


METHODS = Registry(
    "method",
    {
        "pearl": "pearl.methods.pearl:Pearl",
        "isolation": "pearl.methods.isolation:Isolation",
        "finetune": "pearl.methods.finetune:Finetune",
        "joint": "pearl.methods.joint:Joint",
        "er": "pearl.methods.er:Er",
        "er_ace": "pearl.methods.er_ace:ErAce",
        "derpp": "pearl.methods.derpp:DerPlusPlus",
        "lwf": "pearl.methods.lwf:Lwf",
        "ewc": "pearl.methods.ewc:OnlineEwc",
        "seqlora": "pearl.methods.seqlora:SeqLora",
        "inflora": "pearl.methods.inflora:InfLoRA",
        "l2p": "pearl.methods.l2p:L2P",
        "coda_prompt": "pearl.methods.coda_prompt:CodaPrompt",
        "pnn": "pearl.methods.pnn:Progressive",
        "packnet": "pearl.methods.packnet:PackNet",
        "ncm": "pearl.methods.ncm:NearestMean",
        "fetril": "pearl.methods.fetril:FeTril",
        "fecam": "pearl.methods.fecam:FeCam",
    },
)

BACKBONES = Registry(
    "backbone",
    {
        "resnet18": "pearl.nn.resnet:resnet18",
        "bsc": "pearl.nn.bsconv:bsc",
        "timm/*": "pearl.nn.timm:timm_backbone",
    },
)

SOURCES = Registry(
    "data source",
    {
        "digits": "pearl.data.sources:digits",
        "cifar100": "pearl.data.sources:cifar100",
        "tinyimagenet": "pearl.data.sources:tinyimagenet",
        "imagenet_r": "pearl.data.sources:imagenet_r",
        "folder": "pearl.data.sources:folder",
        "npz": "pearl.data.sources:npz",
    },
)

RANK_RULES = Registry(
    "rank rule",
    {
        "paper": "pearl.nn.ranks:PaperRule",
        "fixed": "pearl.nn.ranks:FixedRule",
        "energy": "pearl.nn.ranks:EnergyRule",
        "random": "pearl.nn.ranks:RandomRule",
        "even": "pearl.nn.ranks:EvenRule",
    },
)
