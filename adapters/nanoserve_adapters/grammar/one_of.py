"""`are_exclusive`: whether oneOf says no more than anyOf, because no value can match two schemas.

Unions of models come as oneOf. Schemas exclude each other when their types differ, when their
values are listed and differ, when a property that both require is listed and differs (a
discriminator), or when one requires a property that the other does not allow.
"""

from __future__ import annotations

import json
from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_DEPTH = 8
_NUMBERS = {"integer", "number"}


def are_exclusive(schemas: list[Any], root: Mapping[str, Any]) -> bool:  # Any: JSON
    """Whether surely no value matches two of the schemas. ``root``: where references point."""
    return all(_exclude(a, b, root, _MAX_DEPTH) for a, b in combinations(schemas, 2))


def _exclude(first: Any, second: Any, root: Mapping[str, Any], depth: int) -> bool:  # noqa: ANN401 - JSON
    first, second = resolved(first, root), resolved(second, root)
    if first is False or second is False:
        return True
    if not isinstance(first, dict) or not isinstance(second, dict) or depth == 0:
        return False
    values, others = _values(first), _values(second)
    if values is not None and others is not None:
        return not values & others
    kinds, other_kinds = _kinds(first), _kinds(second)
    if kinds is not None and other_kinds is not None and not kinds & other_kinds:
        return True
    if kinds != {"object"} or other_kinds != {"object"}:
        return False
    return (
        _lacks(first, second)
        or _lacks(second, first)
        or any(
            _exclude(first["properties"][name], second["properties"][name], root, depth - 1)
            for name in _required(first) & _required(second)
        )
    )


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """``schema``, or what its reference stands for when it says nothing else of weight."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        found: Any = root  # Any: JSON
        for name in schema["$ref"].removeprefix("#").strip("/").split("/"):
            key = name.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, dict) and key else found
        schema = found
    return None


def _values(schema: dict[str, Any]) -> set[str] | None:  # Any: JSON
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return {json.dumps(value, sort_keys=True) for value in listed} if listed else None


def _kinds(schema: dict[str, Any]) -> set[str] | None:  # Any: JSON
    kinds = schema.get("type")
    if kinds is None:
        return None
    found = {kinds} if isinstance(kinds, str) else set(kinds)
    return found | _NUMBERS if found & _NUMBERS else found


def _required(schema: dict[str, Any]) -> set[str]:  # Any: JSON
    return {name for name in schema.get("required", ()) if name in schema.get("properties", {})}


def _lacks(schema: dict[str, Any], other: dict[str, Any]) -> bool:  # Any: JSON
    """Whether ``schema`` is closed and lacks a property that ``other`` requires."""
    is_closed = schema.get("additionalProperties", False) is False
    known = schema.get("properties", {}).keys()
    is_plain = is_closed and "patternProperties" not in schema
    return is_plain and bool(set(other.get("required", ())) - known)
