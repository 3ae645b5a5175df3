"""Parts of the OpenAPI description that FastAPI does not derive from annotations."""

from typing import Any

from pydantic import BaseModel

IMAGES = {"image/*": {"schema": {"type": "string", "format": "binary"}}}
PHOTOS = {"type": "array", "items": {"type": "string", "format": "binary"}}


class Problem(BaseModel):
    """An error, in one line."""

    error: str


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the description of answers with an error; 401 and 403 are possible everywhere."""
    return {status: {"model": Problem} for status in (*statuses, 401, 403)}


def form(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """Return the description of a form."""
    return {"multipart/form-data": {"schema": {"type": "object", "properties": properties, "required": required}}}


def json_body(shape: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a body of JSON."""
    schema = shape.model_json_schema()
    parts = schema.pop("$defs", {})

    def inlined(value: Any) -> Any:
        """Return a schema without references, which would be resolved in the whole description."""
        if isinstance(value, dict) and "$ref" in value:
            return inlined(parts[value["$ref"].rpartition("/")[2]])
        if isinstance(value, dict):
            return {key: inlined(each) for key, each in value.items()}
        return [inlined(each) for each in value] if isinstance(value, list) else value

    return {"application/json": {"schema": inlined(schema)}}
