"""LangChain histories become the dicts that chat templates read; what cannot be read is refused."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_llm.messages import to_template_messages
from nanoserve_core import UnsupportedOption

CALL = {"name": "add", "args": {"a": 1, "b": [2]}, "id": "call-1", "type": "tool_call"}
SIMPLE: list[tuple[BaseMessage, dict[str, Any]]] = [
    (SystemMessage("be kind"), {"role": "system", "content": "be kind"}),
    (HumanMessage("hi"), {"role": "user", "content": "hi"}),
    (HumanMessage("hi", name="ann"), {"role": "user", "content": "hi", "name": "ann"}),
    (AIMessage("yes"), {"role": "assistant", "content": "yes"}),
    (AIMessageChunk(content="yes"), {"role": "assistant", "content": "yes"}),
    (ChatMessage("hm", role="critic"), {"role": "critic", "content": "hm"}),
    (FunctionMessage("4", name="add"), {"role": "tool", "content": "4", "name": "add"}),
    (
        ToolMessage("4", tool_call_id="call-1"),
        {"role": "tool", "content": "4", "tool_call_id": "call-1"},
    ),
    (
        ToolMessage("no such key", tool_call_id="call-1", status="error"),
        {"role": "tool", "content": "no such key", "tool_call_id": "call-1"},
    ),
]


@pytest.mark.parametrize(("message", "expected"), SIMPLE)
def test_message_becomes_a_template_dict(message: BaseMessage, expected: dict[str, Any]) -> None:
    assert to_template_messages([message]) == [expected]


def test_consecutive_messages_of_one_role_stay_apart_and_in_order() -> None:
    history = [SystemMessage("a"), SystemMessage("b"), HumanMessage("c"), HumanMessage("d")]

    converted = to_template_messages(history)

    assert [(m["role"], m["content"]) for m in converted] == [
        ("system", "a"),
        ("system", "b"),
        ("user", "c"),
        ("user", "d"),
    ]


def test_text_blocks_are_joined_and_blocks_of_other_fields_dropped() -> None:
    content: list[str | dict[str, Any]] = [
        "one ",
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "two"},
        {"type": "tool_use", "id": "call-1", "name": "add", "input": {}},
        {"text": " three"},
        {"type": "text-plain", "mime_type": "text/plain", "text": " four"},
    ]

    (converted,) = to_template_messages([AIMessage(content=content)])

    assert converted["content"] == "one two three four"


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "image", "base64": "AA==", "mime_type": "image/png"},
        {"type": "audio", "base64": "AA==", "mime_type": "audio/wav"},
        {"type": "file", "base64": "AA==", "mime_type": "application/pdf"},
        {"type": "something_new"},
    ],
)
def test_block_a_text_model_cannot_read_is_refused_by_name(block: dict[str, Any]) -> None:
    history = [HumanMessage("hi"), HumanMessage(content=[{"type": "text", "text": "see"}, block])]

    with pytest.raises(UnsupportedOption, match=rf"message 1 .*'{block['type']}'"):
        to_template_messages(history)


def test_refused_block_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="image"):
        to_template_messages([HumanMessage(content=[{"type": "image", "url": "x"}])])


def test_tool_calls_of_the_history_keep_their_arguments_as_a_dict() -> None:
    (converted,) = to_template_messages([AIMessage("", tool_calls=[CALL])])

    assert converted["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
    ]


def test_invalid_tool_call_stays_in_the_history_as_text() -> None:
    invalid = {"name": "add", "args": '{"a": tru', "id": "1", "error": None}

    (converted,) = to_template_messages([AIMessage("Sure.", invalid_tool_calls=[invalid])])

    assert converted["content"] == (
        'Sure.\n<tool_call>\n{"name": "add", "arguments": {"a": tru}\n</tool_call>'
    )
    assert "tool_calls" not in converted


@pytest.mark.parametrize(
    "message",
    [
        AIMessage("4", additional_kwargs={"reasoning_content": "2+2"}),
        AIMessage(
            content=[{"type": "reasoning", "reasoning": "2+2"}, {"type": "text", "text": "4"}]
        ),
    ],
)
def test_reasoning_of_the_history_has_a_key_of_its_own(message: AIMessage) -> None:
    (converted,) = to_template_messages([message])

    assert converted == {"role": "assistant", "content": "4", "reasoning_content": "2+2"}


def test_message_that_is_no_message_of_a_conversation_is_refused() -> None:
    with pytest.raises(UnsupportedOption, match="RemoveMessage"):
        to_template_messages([RemoveMessage(id="1")])


def test_messages_are_not_changed() -> None:
    message = AIMessage(content=[{"type": "text", "text": "hi"}], tool_calls=[CALL])
    before = message.model_copy(deep=True)

    to_template_messages([message])

    assert message == before
