"""LangChain messages to the dicts a chat template reads.

It knows no tokenizer and no template; it never changes a message. What a text model cannot read is
refused by name, never dropped.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    InvalidToolCall,
    SystemMessage,
    ToolMessage,
)

from langchain_llm.tool_call_block import is_written_block
from nanoserve_core.errors import UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import Sequence

TemplateMessage: TypeAlias = dict[str, Any]
"""One message as chat templates take it: ``role``, ``content`` and what else the template knows."""

# Carried by other fields of the message (tool_calls), or of no use in a later turn.
_SKIPPED_BLOCKS = frozenset(
    {"tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call"}
    | {"thinking", "redacted_thinking", "reasoning"}
)


def to_template_messages(messages: Sequence[BaseMessage]) -> list[TemplateMessage]:
    """The history as template dicts, one for each message, in order.

    Raises `UnsupportedOption` (a ValueError) that names the block or the class it cannot express.
    """
    return [_to_dict(message, position) for position, message in enumerate(messages)]


def _to_dict(message: BaseMessage, position: int) -> TemplateMessage:
    converted: TemplateMessage = {
        "role": _role(message),
        "content": text_of(message.content, position),
    }
    if message.name:
        converted["name"] = message.name
    if isinstance(message, AIMessage):
        _add_assistant_parts(converted, message)
    elif isinstance(message, ToolMessage):
        converted["tool_call_id"] = message.tool_call_id
    return converted


def _role(message: BaseMessage) -> str:
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, AIMessage):
        return "assistant"
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, ToolMessage | FunctionMessage):
        return "tool"
    if isinstance(message, ChatMessage):
        return message.role
    raise UnsupportedOption(
        f"a {type(message).__name__} cannot be sent to the model: expected system, human, AI, tool "
        "or ChatMessage. Remove it from the history, or turn it into one of these."
    )


def text_of(content: str | list[str | dict[Any, Any]], position: int) -> str:
    """Text of a message's content; ``position`` only names the message in an error."""
    if isinstance(content, str):
        return content
    return "".join(_block_text(block, position) for block in content)


def _block_text(block: str | dict[Any, Any], position: int) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type", "text" if "text" in block else None)
    if kind in ("text", "text-plain"):
        return str(block.get("text", ""))
    if kind in _SKIPPED_BLOCKS:
        return ""
    raise UnsupportedOption(
        f"message {position} holds a content block of type {kind!r}, which this text model cannot "
        "read: expected text blocks. Send its text instead, or use a model that takes such input."
    )


def _add_assistant_parts(converted: TemplateMessage, message: AIMessage) -> None:
    reasoning = _reasoning(message)
    if reasoning:
        converted["reasoning_content"] = reasoning
    if message.invalid_tool_calls:
        calls = [_call_as_text(call) for call in message.invalid_tool_calls]
        converted["content"] = "\n".join(filter(None, [converted["content"], *calls]))
    if message.tool_calls:
        converted["tool_calls"] = [
            {"type": "function", "function": {"name": call["name"], "arguments": call["args"]}}
            for call in message.tool_calls
        ]


def _reasoning(message: AIMessage) -> str:
    kept = message.additional_kwargs.get("reasoning_content")
    if isinstance(kept, str) and kept:
        return kept
    if isinstance(message.content, str):
        return ""
    blocks = (block for block in message.content if isinstance(block, dict))
    return "".join(
        str(block.get("reasoning", "")) for block in blocks if block.get("type") == "reasoning"
    )


def _call_as_text(call: InvalidToolCall) -> str:
    if is_written_block(call.get("args")):
        return str(call["args"])
    name = json.dumps(call.get("name"), ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.get("args")}}}\n</tool_call>'
