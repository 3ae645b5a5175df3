"""Options that came later, so that a run keeps its name and a stored configuration its meaning."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True)
class Born:
    """Marks an option added after the first release of its part: `Annotated[int, Born(0)]`.

    At `value`, plain JSON, all is as it was before there was the option. So with it the option does not enter a run's
    name, and a configuration that was written before is read with it, whatever the default has become since.
    """

    value: Any


def later(model: type[BaseModel]) -> dict[str, Any]:
    """The options of a model that came later, with the values they were born with."""
    return {
        name: marker.value
        for name, field in model.model_fields.items()
        for marker in field.metadata
        if isinstance(marker, Born)
    }


def without_born(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values without the later options that have the value they were born with; sections too."""
    born, sections = later(model), _sections(model)
    return {
        name: without_born(sections[name], value) if name in sections else value
        for name, value in values.items()
        if name not in born or value != born[name]
    }


def as_written(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Stored values with the later options that they lack; sections too, but for those that came later themselves.

    Such a section holds what is different alone: what it lacks is not set.
    """
    born, sections = later(model), _sections(model)
    there = {
        name: as_written(sections[name], value)
        if name in sections and name not in born and isinstance(value, Mapping)
        else value
        for name, value in values.items()
    }
    return {**born, **there}


def _sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    fields = ((name, field.annotation) for name, field in model.model_fields.items())
    return {name: kind for name, kind in fields if isinstance(kind, type) and issubclass(kind, BaseModel)}
