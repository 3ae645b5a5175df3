"""Names of the parts that a recipe selects: methods, backbones, data sources, rank rules.

A part is a class or function whose *keyword-only* parameters are its options: the signature defines the defaults, the
checked types, the output of `pearl show`, and the resolved configuration of a run. A part is imported when its name is
used, so that listing names does not import torch.

Parts come with pearl (`parts.py`), from installed packages (entry points `pearl.methods`, `pearl.backbones`,
`pearl.data`, `pearl.rank_rules`), and methods also from files, which run only if the user names them: see
`Registry.admit`.
"""

import dataclasses
import difflib
import errno
import functools
import hashlib
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from pearl.errors import ConfigError, Interrupted, PearlError, printable
from pearl.names import without_marks
from pearl.settings.declared import are_phases
from pearl.settings.derived_defaults import followed
from pearl.settings.user_code import Code, in_words, run_file

_FAMILIES = {
    "timm": ("any network of timm", "deit_tiny_patch16_224"),
    "torchvision": ("a data set of torchvision", "CIFAR10"),
    "hf": ("a data set of Hugging Face, on the hub or of local files", "USER/NAME"),
}
Spec = dict[str, Any]  # {"name": ..., option: value, ...}


def _family(name: str) -> str | None:
    """Return a line about a family, NAME/*; None if the name is not a family."""
    family, _, star = name.partition("/")
    if star != "*":
        return None
    what, example = _FAMILIES.get(family, ("any member of the family", "NAME"))
    return f"{what} by its name, such as {family}/{example}"


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return a hint for an unknown word: the nearest choice, or all of them if none is near."""
    return near(word, choices := sorted(choices)) or f"choose from {', '.join(map(printable, choices))}"


def near(word: str, choices: Iterable[str], enough: float = 0.5) -> str:
    """Return a hint with the nearest choice; empty if none is near `enough` (1: equal)."""
    bare = {without_marks(choice): choice for choice in sorted(choices)}
    matches = difflib.get_close_matches(without_marks(word), bare, n=1, cutoff=enough)
    return f"did you mean {bare[matches[0]]!r}?" if matches else ""


def problems_of(
    error: ValidationError, where: str, known: Callable[[tuple[Any, ...]], Iterable[str] | None]
) -> list[str]:
    """Return a line for each setting that pydantic rejects.

    `known` returns the valid keys of the section at a path, or None if any key is valid.
    """
    messages_at: dict[str, list[str]] = {}
    for item in error.errors():
        path = _path(item, known)
        key = ".".join([*filter(None, [where]), *map(str, path)])
        if item["type"] == "extra_forbidden":
            name, _, value = str(path[-1]).partition(":")  # YAML needs a space after the colon of a pair
            pair = f"write {f'{name}: {value}'!r}, with a space"
            message = f"unknown key; {pair if value else nearest(name, known(path[:-1]) or ())}"
        elif item["type"] == "missing":
            whole = path == item["loc"]  # otherwise an item of a tuple
            message = "missing; set it" if whole else f"too few values (given: {item['input']!r})"
        else:
            text = item["msg"].removeprefix("Value error, ")
            given = "" if isinstance(item["input"], Mapping) else f" (given: {item['input']!r})"
            message = f"{text[0].lower()}{text[1:]}{given}"
        messages_at.setdefault(key, []).append(message)
    return [f"{key}: {', or '.join(messages)}" for key, messages in messages_at.items()]


def _path(item: Mapping[str, Any], known: Callable[[tuple[Any, ...]], Iterable[str] | None]) -> tuple[Any, ...]:
    """Return the location of an error without pydantic's own parts, such as the unmatched member of a union."""
    loc: tuple[Any, ...] = item["loc"]
    for end in range(len(loc)):
        keys = known(loc[:end])
        if keys is not None and loc[end] not in keys:
            return loc[: end + 1] if item["type"] == "extra_forbidden" else loc[:end]
    return loc


class Registry:
    """Parts of one kind by name. `name/*` is a family: the rest of the name is the part's first argument.

    Installed packages add parts by entry points of the group `pearl.GROUP`; pearl's own names take precedence. With
    `base` ("module:Class"), classes derived from it can be loaded from files.
    """

    def __init__(self, kind: str, group: str, targets: Mapping[str, str], *, base: str | None = None) -> None:
        self.kind, self.group, self.base = kind, f"pearl.{group}", base
        self.builtin = dict(targets)
        self._files: dict[str, Code] = {}

    @functools.cached_property
    def installed(self) -> dict[str, metadata.EntryPoint]:
        """Return the parts of installed packages, by name."""
        return {
            point.name: point for point in metadata.entry_points(group=self.group) if point.name not in self.builtin
        }

    def names(self) -> list[str]:
        """Return all names, families with their star; pearl's own first."""
        return [*self.builtin, *self.installed]

    def lines(self) -> dict[str, str]:
        """Return the first line of each part's documentation, by name."""
        described = {}
        for name in self.names():
            try:
                described[name] = _family(name) or (inspect.getdoc(self.load(name)) or "-").splitlines()[0]
            except ConfigError as error:  # from an installed package
                described[name] = str(error)
        return described

    def admit(self, given: str) -> str:
        """Return the name of a part given by the user: `path/to/file.py:Class` becomes Class@HASH.

        Only this function runs the file. A configuration stores the new name, a hash of the file without its path, so
        that reading a configuration runs no code that the user has not named. Other names are returned unchanged.

        Raises:
            ConfigError: no such file or class, the file fails, or the class cannot be used; includes file and line.
        """
        matched = re.fullmatch(r"(.+\.py)(?::(\w*))?", given)
        if matched is None or self.base is None:
            return given
        try:
            file, attribute = Path(matched[1]).expanduser(), matched[2]
        except RuntimeError:
            raise ConfigError(f"{given}: that user has no home directory; write the full path") from None
        if not attribute:
            raise ConfigError(f"{given}: the class is missing; give the file and its class, as {file.name}:MyMethod")
        try:
            if file.exists() and not file.is_file():  # a FIFO would block, a device never end
                raise OSError(errno.EINVAL, "not a file")
            source = file.read_bytes()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{file}: cannot be read ({getattr(error, 'strerror', error)}); give the path of a Python file and its "
                f"class, as path/to/file.py:{attribute}"
            ) from None
        name = f"{attribute}@{hashlib.sha256(source).hexdigest()[:12]}"
        if name not in self._files:
            module = run_file(file, source, f"pearl_file_{name.partition('@')[2]}")
            if not hasattr(module, attribute):
                classes = (value for value in vars(module).values() if inspect.isclass(value))
                known = [value.__name__ for value in classes if value.__module__ == module.__name__]
                hint = nearest(attribute, known) if known else "it defines none"
                raise ConfigError(f"{file}: has no class {attribute!r}; {hint}")
            part = self._checked(getattr(module, attribute), f"{file}: {attribute}")
            self._files[name] = Code(part, str(file), source)
        return name

    def source(self, name: str) -> bytes | None:
        """Return the file that a part was loaded from, or None."""
        return self._files[name].source if name in self._files else None

    @contextmanager
    def blamed(self, name: str) -> Iterator[None]:
        """Run code of a part within the context; errors of a file's code become one line with their position.

        This includes `SystemExit` and similar, which would end the process silently, but not Ctrl-C.

        Raises:
            ConfigError: the code raised an exception.
        """
        try:
            yield
        except (PearlError, Interrupted):
            raise
        except BaseException as error:
            if name not in self._files or type(error) is KeyboardInterrupt:
                raise
            raise ConfigError(f"{self._files[name].location_of(error)}: {in_words(error)}; fix the file") from error

    def closed(self, name: str) -> bool:
        """Return True if a part is from a file that the user has not named in this process."""
        return self.base is not None and "@" in name and name not in self._files

    def load(self, name: str) -> Callable[..., Any]:
        """Import the class or function behind a name.

        Raises:
            ConfigError: unknown name; the message has the nearest one.
        """
        if name in self._files:
            return self._files[name].part
        if self.base and (".py:" in name or "@" in name):
            attribute = name.rpartition(":")[2].partition("@")[0]
            raise ConfigError(
                f"{name}: code in a file, which runs only if the command names it; add --{self.kind} "
                f"path/to/file.py:{attribute}"
            )
        family, _, member = name.partition("/")
        if member == "*":
            such = f", such as {family}/{_FAMILIES[family][1]}" if family in _FAMILIES else ""
            raise ConfigError(f"{name} is a family; give a member{such}")
        target = self.builtin.get(f"{family}/*" if member else name)
        if target is None and name in self.installed:
            return self._from_package(self.installed[name])
        if target is None:
            raise ConfigError(f"unknown {self.kind} {name!r}; {nearest(name, self.names())}")
        part = _imported(target)
        return functools.partial(part, member) if member else part

    def _from_package(self, point: metadata.EntryPoint) -> Callable[..., Any]:
        package = point.dist.name if point.dist else point.value
        where = f"{self.kind} {point.name} of the package {package}"
        try:
            part = point.load()
        except Exception as error:  # an import can raise any exception
            raise ConfigError(
                f"{where}: cannot be imported ({in_words(error)}); fix or uninstall the package"
            ) from None
        return self._checked(part, where)

    def _checked(self, part: Any, where: str) -> Any:
        """Check and return a part that is not pearl's own.

        Raises:
            ConfigError: it is not of this kind, or its signature has no readable options.
        """
        if self.base is None:
            wrong = None if callable(part) else "is not a class or function"
        else:
            base = _imported(self.base)
            wrong = None if inspect.isclass(part) and issubclass(part, base) else f"does not derive from {self.base}"
            if not wrong and hasattr(base, "phases") and not are_phases(part.phases):
                wrong = "declares no phases; list the names of those that `learn` yields"
        try:
            if not wrong:
                # defaults are stored with a run
                _options_model(part).model_construct().model_dump(mode="json", warnings=False)
        except Exception as error:  # annotations are code
            wrong = f"its options cannot be read ({in_words(error)}); annotate each with its type"
        if wrong:
            raise ConfigError(f"{where}: {wrong}")
        return part

    def options(self, name: str) -> type[BaseModel]:
        """Return the options of a part as a pydantic model, built from its keyword-only parameters."""
        return _options_model(self.load(name))

    def resolve(self, spec: Any, where: str) -> Spec:
        """Check a part's name and options and fill in the defaults.

        Raises:
            ConfigError: lists every problem of this part.
        """
        if isinstance(spec, str | int | float):
            spec = {"name": str(spec)}
        if not isinstance(spec, Mapping) or "name" not in spec:
            raise ConfigError(f"{where}: needs a name; choose from {', '.join(self.names())}")
        name = str(spec["name"])
        if self.closed(name):
            return {**spec, "name": name}  # its options were checked when the file was given
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
        return {"name": name, **checked.model_dump(mode="json", warnings=False)}

    def follow(self, spec: Spec, config: BaseModel) -> Spec:
        """Return a resolved spec with the rules' values instead of `auto` (see `DerivedDefault`)."""
        return spec if self.closed(spec["name"]) else followed(self.options(spec["name"]), spec, config)

    def build(self, spec: Spec, *args: Any) -> Any:
        """Create the part that a resolved spec describes; `args` are passed before its options."""
        part = self.load(spec["name"])
        nested = _nested_registries(part)
        options = {
            key: nested[key].build(value) if key in nested else value for key, value in spec.items() if key != "name"
        }
        try:
            with self.blamed(spec["name"]):
                return part(*args, **options)
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"{self.kind} {spec['name']}: {error}") from None

    def spec_of(self, part: Any) -> Spec:
        """Return the spec of a dataclass instance that this registry can build."""
        for name in self.names():
            if type(part) is self.load(name):
                return {"name": name, **dataclasses.asdict(part)}
        raise TypeError(f"{type(part).__name__} is not a registered {self.kind}")


def _imported(target: str) -> Any:
    module, attribute = target.split(":")
    return getattr(importlib.import_module(module), attribute)


def readable(name: str) -> str:
    """Return a part's name for display: the class without the hash of its file."""
    return name.partition("@")[0]


def _keyword_only(part: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(part).parameters.values()
    return [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


def _hints(part: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(part.__init__ if inspect.isclass(part) else part, include_extras=True)


def _nested_registries(part: Callable[..., Any]) -> dict[str, Registry]:
    """Return the options that are parts themselves: annotated `Annotated[Kind, REGISTRY]`."""
    return _nested_of(part.func if isinstance(part, functools.partial) else part)


@functools.cache
def _nested_of(part: Callable[..., Any]) -> dict[str, Registry]:
    nested = {}
    for name, hint in _hints(part).items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, Registry):
                nested[name] = note
    return nested


def _options_model(part: Callable[..., Any]) -> type[BaseModel]:
    return _model_of(part.func if isinstance(part, functools.partial) else part)


@functools.cache
def _model_of(part: Callable[..., Any]) -> type[BaseModel]:
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
    """Return a part's spec with a name; options without a name belong to the default part."""
    return {"name": default["name"], **spec} if isinstance(spec, Mapping) and "name" not in spec else spec
