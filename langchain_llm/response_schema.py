"""``response_format``: the JSON schema that a call wants its answer to follow."""

from __future__ import annotations

from typing import Any

from langchain_core.utils.function_calling import convert_to_json_schema

from nanoserve_core.errors import UnsupportedOption

ANY_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}  # Any: JSON
"""The schema of every JSON object."""


def response_schema(
    response_format: Any,  # noqa: ANN401 - OpenAI's dict, or a class
) -> dict[str, Any] | None:  # Any: JSON
    """The schema in ``response_format``, or None for plain text.

    ``{"type": "text"}``, ``{"type": "json_object"}``, ``{"type": "json_schema", "json_schema":
    {"schema": ...}}``, or a pydantic class or TypedDict. `UnsupportedOption` for anything else.
    """
    if response_format is None:
        return None
    if isinstance(response_format, type):
        return convert_to_json_schema(response_format)
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    wrapped = response_format.get("json_schema") if kind == "json_schema" else None
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
    if isinstance(schema, dict):
        return schema
    raise UnsupportedOption(
        f"response_format={response_format!r} is not served by nanoserve: expected type text, "
        "json_object, or json_schema with a schema in json_schema.schema. Pass one of these, or a "
        "pydantic class."
    )
