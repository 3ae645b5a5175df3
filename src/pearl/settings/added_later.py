"""Options added after a part's release, without effect on names of runs and stored configurations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True)
class AddedLater:
    """Marks an option added after the first release of its part: `Annotated[int, AddedLater(0)]`.

    With `value`, plain JSON, everything is as before the option existed. Such an option does not enter a run's name,
    and older configurations are read with `value`, whatever the current default is.
    """

    value: Any


def later(model: type[BaseModel]) -> dict[str, Any]:
    """Return the options of a pydantic model that were added later, with their `AddedLater` values."""
    return {
        name: marker.value
        for name, field in model.model_fields.items()
        for marker in field.metadata
        if isinstance(marker, AddedLater)
    }


def without_born(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values without later options that have their `AddedLater` values, including sections."""
    born, sections = later(model), _sections(model)
    return {
        name: without_born(sections[name], value) if name in sections else value
        for name, value in values.items()
        if name not in born or value != born[name]
    }


def as_written(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored values plus missing later options, including sections, except sections that were added later.

    Such a section contains only differences: options that it lacks are not set.
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
