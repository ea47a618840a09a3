"""`GrammarSpec`: what an output must match, in words of the doors; compiled by `compile_grammar`.

Plain frozen data: no tokenizer, no llguidance. JSON comes out as ``json.dumps`` writes it by
default: one space after each comma and colon, none elsewhere, properties in the order of their
schema.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    Schema = Mapping[str, Any]  # Any: JSON


@dataclass(frozen=True)
class JsonSchema:
    """A document of this schema. Objects that do not say otherwise get no further properties."""

    schema: Schema


@dataclass(frozen=True)
class JsonObject:
    """Any JSON object ("json mode")."""


@dataclass(frozen=True)
class Regex:
    """Text that matches the whole of a regular expression (Rust's syntax, no look-around)."""

    pattern: str


@dataclass(frozen=True)
class Choice:
    """One of these texts."""

    options: tuple[str, ...]


@dataclass(frozen=True)
class Lark:
    """A grammar in llguidance's dialect of Lark, with a rule ``start``."""

    text: str


@dataclass(frozen=True)
class ToolCalls:
    """Calls as Qwen3 writes them: ``<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>``,
    with a newline between two.

    ``tools``: each has ``name`` and ``parameters`` (a JSON schema, may be missing or empty).
    ``required``: nothing but calls, at least one; else text is free until ``<tool_call>`` is
    sampled, and again after ``</tool_call>``. ``parallel``: more than one call may be made. To
    force one tool, give only that.
    """

    tools: tuple[Mapping[str, Any], ...]  # Any: JSON
    required: bool = True
    parallel: bool = True


@dataclass(frozen=True)
class Either:
    """At least one tool call, or the document: tools and a response format in one request.

    ``calls.required`` does not matter here.
    """

    calls: ToolCalls
    document: JsonSchema | JsonObject


@dataclass(frozen=True)
class AfterThinking:
    """Free text up to ``</think>``, then a blank line, then ``inner``.

    For prompts whose tail has opened a think block. Where tokens run short, ``</think>`` is forced
    early enough for the shortest output of ``inner``.
    """

    inner: JsonSchema | JsonObject | Regex | Choice | Lark | ToolCalls | Either


GrammarSpec: TypeAlias = (
    JsonSchema | JsonObject | Regex | Choice | Lark | ToolCalls | Either | AfterThinking
)


def spec_key(spec: GrammarSpec) -> str:
    """Equal for equal specs; the order of properties matters, because the output follows it."""
    return json.dumps(_plain(spec))


def _plain(value: Any) -> Any:  # noqa: ANN401 - anything that JSON can hold
    if is_dataclass(value):
        pairs = [_plain(getattr(value, field.name)) for field in fields(value)]
        return [type(value).__name__, *pairs]
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
