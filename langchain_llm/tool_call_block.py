"""A tool call's block as LangChain's dict: a call, or an invalid one that says why."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

from langchain_core.messages.tool import (
    ToolCallChunk,
    invalid_tool_call,
    tool_call,
    tool_call_chunk,
)

from langchain_llm.answer_parser import CALL_OPEN

if TYPE_CHECKING:
    from langchain_core.messages import InvalidToolCall, ToolCall

    from langchain_llm.answer_parser import CallBlock

_DECODER = json.JSONDecoder(strict=False)  # models write raw line breaks into strings


def parsed_call(block: CallBlock, *, was_cut: bool) -> ToolCall | InvalidToolCall:
    """The call in `block`, with an id of its own.

    ``was_cut``: the answer ended by its length. A block that is not closed is then never a call,
    however whole it looks. The ``args`` of an invalid one are the block as the model wrote it:
    LangChain completes the JSON of calls in streams, and would make a call of less.
    """
    identifier = f"call_{uuid.uuid4().hex}"
    name: str | None = None
    try:
        if was_cut and not block.is_closed:
            raise ValueError("the answer reached its limit (max_tokens) inside this call")
        name, arguments = _fields(block.text)
    except ValueError as error:
        return invalid_tool_call(
            name=name or _name_in(block.text),
            args=block.written,
            id=identifier,
            error=f"no tool call: {error}",
        )
    return tool_call(name=name, args=arguments, id=identifier)


def call_chunk(call: ToolCall | InvalidToolCall, index: int) -> ToolCallChunk:
    """The whole call as one chunk of a stream; `index` is its own in the stream."""
    arguments = call["args"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return tool_call_chunk(name=call["name"], args=arguments, id=call["id"], index=index)


def is_written_block(arguments: object) -> bool:
    """Whether the ``args`` of an invalid call are a block of `parsed_call`."""
    return isinstance(arguments, str) and arguments.startswith(CALL_OPEN)


def _fields(text: str) -> tuple[str, dict[str, Any]]:  # Any: JSON
    call = _decoded(text, "the block")
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str):
        raise ValueError(f'its "name" is {name!r}, expected a string')
    if isinstance(arguments, str):
        arguments = _decoded(arguments, '"arguments"')
    if arguments is not None and not isinstance(arguments, dict):
        raise ValueError(f'its "arguments" are {arguments!r}, expected an object')
    return name, arguments or {}


def _decoded(text: str, what: str) -> dict[str, Any]:  # Any: JSON
    try:
        value = _DECODER.decode(text.strip())
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {value!r}, expected an object")
    return value


def _name_in(text: str) -> str | None:
    """The name in a block that is no JSON as a whole, if it stands first and is whole."""
    _, is_first, rest = text.partition('{"name":')
    try:
        name, _ = _DECODER.raw_decode(rest.lstrip()) if is_first else (None, 0)
    except json.JSONDecodeError:
        return None
    return name if isinstance(name, str) else None
