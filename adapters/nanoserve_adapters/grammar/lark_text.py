"""`lark_text`: a spec as a grammar in llguidance's dialect of Lark.

Calls as Qwen3 writes them. Marks such as ``<tool_call>`` are tokens where the tokenizer has them,
else plain text: as a quoted text a token of that name would be allowed and then rejected.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from nanoserve_adapters.grammar.schema import JSON_OPTIONS, prepare_schema
from nanoserve_adapters.grammar.specs import (
    Choice,
    Either,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    ToolCalls,
)
from nanoserve_core.errors import UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Document = JsonSchema | JsonObject | Regex | Choice | Lark | ToolCalls | Either

CALL_START, CALL_END = "<tool_call>", "</tool_call>"


def lark_text(spec: Document, has_token: Callable[[str], bool]) -> str:
    """Raises `UnsupportedSchema`. ``has_token``: whether a mark is one token of the tokenizer."""
    match spec:
        case JsonSchema():
            return f"start: {_json(prepare_schema(spec.schema))}"
        case JsonObject():
            return f"start: {_json({'type': 'object'})}"
        case Regex():
            return f"start: /{_escape_slashes(spec.pattern)}/"
        case Choice():
            return f"start: {_choice(spec)}"
        case Lark():
            return spec.text
        case ToolCalls():
            return f"start: {_call_rules(spec, has_token)}"
        case Either():
            document = lark_text(spec.document, has_token).removeprefix("start: ")
            return f"start: calls | document\ndocument: {document}\ncalls: " + _call_rules(
                spec.calls, has_token
            )


def call_tail_text(spec: ToolCalls, has_token: Callable[[str], bool]) -> str:
    """What follows ``<tool_call>`` in one call, up to its end."""
    return f"start: {_call_tail(has_token)}\n{_body_rules(spec)}"


def _call_rules(spec: ToolCalls, has_token: Callable[[str], bool]) -> str:
    more = ' ("\\n" call)*' if spec.parallel else ""
    start = _mark(CALL_START, has_token)
    return f"call{more}\ncall: {start} {_call_tail(has_token)}\n{_body_rules(spec)}"


def _call_tail(has_token: Callable[[str], bool]) -> str:
    return f'"\\n" body "\\n" {_mark(CALL_END, has_token)}'


def _body_rules(spec: ToolCalls) -> str:
    if not spec.tools:
        raise UnsupportedOption(
            "a grammar for tool calls was asked for with tools=(): expected at least one tool. "
            "Pass the tools, or ask for no grammar."
        )
    rules = [f"tool_{index}: {_json(_call_schema(tool))}" for index, tool in enumerate(spec.tools)]
    names = " | ".join(f"tool_{index}" for index in range(len(spec.tools)))
    return "\n".join([f"body: {names}", *rules])


def _call_schema(tool: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    arguments = prepare_schema({"type": "object", **parameters}, root="#/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": tool["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _choice(spec: Choice) -> str:
    if not spec.options or "" in spec.options:
        raise UnsupportedOption(
            f"choice={spec.options!r}: expected at least one option, none of them empty."
        )
    return " | ".join(json.dumps(option, ensure_ascii=False) for option in spec.options)


def _json(schema: Mapping[str, Any]) -> str:  # Any: JSON
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS})


def _mark(mark: str, has_token: Callable[[str], bool]) -> str:
    return mark if has_token(mark) else json.dumps(mark)


def _escape_slashes(pattern: str) -> str:
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern)
    return escaped.replace("\n", r"\n")
