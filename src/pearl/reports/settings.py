"""Every setting as text, from the descriptions of fields and the docstrings of parts."""

import inspect
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pearl.settings.config import RunConfig
from pearl.settings.online import OnlineConfig
from pearl.settings.parts import BACKBONES, CLASSIFIERS, LEARNERS, METHODS, RANK_RULES, SOURCES
from pearl.settings.registry import Registry
from pearl.settings.sections import EngineConfig, ImagesConfig, StreamConfig, TrainConfig

SECTIONS: dict[str, type[BaseModel]] = {
    "stream": StreamConfig,
    "images": ImagesConfig,
    "train": TrainConfig,
    "engine": EngineConfig,
    "online": OnlineConfig,
}
REGISTRIES: dict[str, Registry] = {
    "methods": METHODS,
    "backbones": BACKBONES,
    "data": SOURCES,
    "ranks": RANK_RULES,
    "classifiers": CLASSIFIERS,
    "learners": LEARNERS,
}
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "min_length": "length at least"}


def section_page(name: str) -> str:
    """Return a section's settings: name, default, allowed values, description."""
    kind = SECTIONS[name]
    lines = [f"{name}: {(inspect.getdoc(kind) or '').splitlines()[0]}"]
    for key, field in kind.model_fields.items():
        lines += ["", f"{name}.{key} = {default(field)}   ({allowed(field)})", f"    {_text(field)}"]
    return "\n".join(lines)


def markdown() -> str:
    """Return docs/settings.md: all sections, then every part with its options."""
    lines = [
        "# Settings",
        "",
        "Written by `python -m pearl.reports.settings`, from the code. A setting is given as `KEY=VALUE` on the",
        "command line, as nested dictionaries in Python, or in a recipe's YAML; `pearl show NAME` prints the same.",
    ]
    of_runs = {key: field for key, field in RunConfig.model_fields.items() if key not in SECTIONS}
    lines += ["", "## Whole runs", "", *_table("", of_runs)]
    for name, kind in SECTIONS.items():
        about = " ".join((inspect.getdoc(kind) or "").split())
        lines += ["", f"## {name}", "", about, "", *_table(f"{name}.", kind.model_fields)]
    for what, registry in REGISTRIES.items():
        lines += ["", f"## {what}"]
        for name in registry.names():
            if not name.endswith("/*"):
                lines += ["", f"### {name}", "", *_part(registry, name)]
    return "\n".join(lines) + "\n"


def part_page(registry: Registry, name: str) -> str:
    """Return a part's docstring, and its options with their defaults."""
    fields = registry.options(name).model_fields
    lines = [f"{registry.kind} {name}", "", _doc(registry, name)]
    if fields:
        lines += ["", "options:", *(f"  {key} = {default(field)}" for key, field in fields.items())]
    return "\n".join(lines)


def default(field: FieldInfo) -> str:
    """Return the default of a setting."""
    if field.is_required():
        return "(needed)"
    value = field.get_default(call_default_factory=True)
    return "{}" if isinstance(value, BaseModel) else json.dumps(value)


def allowed(field: FieldInfo) -> str:
    """Return the allowed values of a setting in words."""
    words = _kind(field.annotation)
    limits = list(_limits(field.metadata))
    return ", ".join([words, *limits])


def _kind(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        base, *metadata = get_args(kind)
        return ", ".join([_kind(base), *_limits(metadata)])
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    parts = [part for part in get_args(kind) if part is not Ellipsis]
    if get_origin(kind) is list:
        return f"list of {_kind(parts[0])}"
    if get_origin(kind) is tuple:
        return f"{len(parts)} x {_kind(parts[0])}"
    if get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "mapping"
    if parts:  # a union
        return " | ".join(map(_kind, parts))
    names = {int: "whole number", float: "number", str: "text", bool: "true | false", type(None): "null"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def _limits(metadata: Any) -> Iterator[str]:
    for limit in metadata:
        for one in getattr(limit, "metadata", [limit]):
            yield from (f"{word} {getattr(one, key)}" for key, word in _LIMITS.items() if hasattr(one, key))


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _table(prefix: str, fields: dict[str, FieldInfo]) -> list[str]:
    rows = [["setting", "default", "may be", ""], ["---"] * 4]
    rows += [[f"`{prefix}{key}`", f"`{default(f)}`", allowed(f), _text(f)] for key, f in fields.items()]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _doc(registry: Registry, name: str) -> str:
    part = registry.load(name)
    return inspect.getdoc(getattr(part, "func", part)) or ""


def _part(registry: Registry, name: str) -> list[str]:
    fields = registry.options(name).model_fields
    # a section of a docstring, such as its options, becomes a list
    text = re.sub(r"\n+(\w+):\n", r"\n\n**\1**\n\n", _doc(registry, name))
    text = re.sub(r"\n    (\w+): ", r"\n- `\1`: ", text)
    text = re.sub(r"\n {4,}", r"\n  ", text)
    defaults = ", ".join(f"`{key} = {default(field)}`" for key, field in fields.items())
    return [text, *(["", f"Defaults: {defaults}"] if defaults else [])]


if __name__ == "__main__":
    print(markdown(), end="")
