"""`jump_of`: how much longer one token can make the way to the end of an output, at most.

A token opens about what a few bytes can open: a value of some part of the schema, which then must
be closed. Counted in bytes; too much is only slower.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from nanoserve_adapters.grammar.one_of import resolved
from nanoserve_adapters.grammar.specs import (
    Choice,
    Either,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    ToolCalls,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Document = JsonSchema | JsonObject | Regex | Choice | Lark | ToolCalls | Either

_MOST = 4096
_MAX_DEPTH = 8
_FORMAT_WIDTH = 40
_NUMBER_WIDTH = 20
_CALL_WIDTH = 60
"""Bytes of ``<tool_call>`` and what stands around name and arguments."""
_REPEAT = re.compile(r"\{(\d+)")
_PATTERN_LETTERS = re.compile(r"[^\\^$()\[\]{}?*+|,]")


def jump_of(spec: Document) -> int:
    """About the largest jump, in bytes."""
    match spec:
        case JsonSchema():
            size = _largest(spec.schema)
        case JsonObject():
            size = 0
        case Regex():
            size = _width(spec.pattern)
        case Choice():
            size = max((len(option.encode()) for option in spec.options), default=0)
        case Lark():
            size = len(spec.text)
        case ToolCalls():
            sizes = [_largest(tool.get("parameters") or {}) for tool in spec.tools]
            names = [len(str(tool.get("name", ""))) for tool in spec.tools]
            size = max(sizes, default=0) + max(names, default=0)
            size += _CALL_WIDTH if spec.required and spec.parallel else 0
        case Either():
            size = max(jump_of(spec.calls), jump_of(spec.document))
    return min(_MOST, size)


def letters_of(spec: Document) -> bytes:
    """Characters that the patterns of ``spec`` name, at most ten: closing tries them."""
    match spec:
        case JsonSchema():
            patterns = [str(part["pattern"]) for part in _parts(spec.schema) if "pattern" in part]
        case Regex():
            patterns = [spec.pattern]
        case _:
            patterns = []
    letters = dict.fromkeys(_PATTERN_LETTERS.findall("".join(patterns)))
    return "".join(letters).encode("ascii", "ignore")[:10]


def _largest(schema: Mapping[str, Any]) -> int:  # Any: JSON
    return max((_least(part, schema, _MAX_DEPTH) for part in _parts(schema)), default=0)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - JSON
    """Every mapping in a schema: all schemas are among them."""
    if isinstance(schema, dict):
        yield schema
    if isinstance(schema, (dict, list)):
        for part in schema.values() if isinstance(schema, dict) else schema:
            yield from _parts(part)


def _least(schema: Any, root: Mapping[str, Any], depth: int) -> int:  # noqa: ANN401 - JSON
    """About the bytes of a schema's shortest value."""
    if not isinstance(schema, dict) or depth == 0:
        return 2
    if "const" in schema:
        return len(json.dumps(schema["const"]))
    if isinstance(schema.get("enum"), list):
        return max((len(json.dumps(value)) for value in schema["enum"]), default=0)
    below = depth - 1
    size = 0
    if isinstance(schema.get("$ref"), str):
        size += _least(resolved(schema, root), root, below)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            size += min((_least(part, root, below) for part in schema[key]), default=0)
    if isinstance(schema.get("allOf"), list):
        size += sum(_least(part, root, below) for part in schema["allOf"])
    size += max(_NUMBER_WIDTH, _text_width(schema))
    names = schema.get("required", ()) if isinstance(schema.get("required"), list) else ()
    values = schema.get("properties", {}) if isinstance(schema.get("properties"), dict) else {}
    size += sum(len(name) + 6 + _least(values.get(name), root, below) for name in names)
    size += max((len(name) for name in values), default=0)
    num_items = schema.get("minItems", 0) if isinstance(schema.get("minItems"), int) else 0
    size += num_items * (2 + _least(schema.get("items"), root, below))
    return min(size, _MOST)


def _text_width(schema: dict[str, Any]) -> int:  # Any: JSON
    length = schema.get("minLength", 0)
    pattern = schema.get("pattern", "")
    return max(
        length if isinstance(length, int) else 0,
        _width(pattern) if isinstance(pattern, str) else 0,
        _FORMAT_WIDTH if "format" in schema else 0,
    )


def _width(pattern: str) -> int:
    """At least the length of the text that the rest of a match takes, whatever came before."""
    most = max((int(number) for number in _REPEAT.findall(pattern)), default=1)
    return min(_MOST, len(pattern) * max(1, most))
