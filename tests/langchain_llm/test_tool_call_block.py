"""Blocks become calls, or invalid calls that LangChain's own aggregation leaves invalid."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk

from langchain_llm.answer_parser import CallBlock
from langchain_llm.tool_call_block import call_chunk, parsed_call

GOOD: list[tuple[str, dict[str, Any]]] = [
    ('\n{"name": "f", "arguments": {"a": [1, "ü"]}}\n', {"a": [1, "ü"]}),
    ('{"arguments": {"a": null}, "name": "f"}', {"a": None}),
    ('{"name": "f", "arguments": {}}', {}),
    ('{"name": "f"}', {}),
    ('{"name": "f", "arguments": null}', {}),
    ('{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
    ('{"name": "f", "arguments": {"a": "x\ny"}}', {"a": "x\ny"}),
]
BAD = [
    ('{"name": "f", "arguments": {"a": tru}}', "f", "no JSON"),
    ('{"name": "f", "arguments": {"a": 1}', "f", "no JSON"),
    ('{"name": "f", "arguments": [1]}', "f", "expected an object"),
    ('{"name": "f", "arguments": "x"}', "f", "no JSON"),
    ('{"name": 3, "arguments": {}}', None, "expected a string"),
    ('["f"]', None, "expected an object"),
    ('{"nam', None, "no JSON"),
    ("", None, "no JSON"),
]


@pytest.mark.parametrize(("text", "arguments"), GOOD)
@pytest.mark.parametrize(("is_closed", "was_cut"), [(True, False), (True, True), (False, False)])
def test_json_with_a_name_is_a_call(
    text: str, arguments: dict[str, Any], is_closed: bool, was_cut: bool
) -> None:
    call = parsed_call(CallBlock(text, is_closed), was_cut=was_cut)

    assert call["type"] == "tool_call"
    assert (call["name"], call["args"]) == ("f", arguments)
    assert call["id"]


@pytest.mark.parametrize(("text", "name", "reason"), BAD)
def test_anything_else_is_an_invalid_call_that_says_why(
    text: str, name: str | None, reason: str
) -> None:
    call = parsed_call(CallBlock(text, is_closed=True), was_cut=False)

    assert call["type"] == "invalid_tool_call"
    assert call["name"] == name
    assert call["args"] == f"<tool_call>{text}</tool_call>"
    assert reason in str(call["error"])


def test_block_cut_by_the_limit_is_no_call_however_whole_it_looks() -> None:
    call = parsed_call(CallBlock('{"name": "f", "arguments": {}}', is_closed=False), was_cut=True)

    assert call["type"] == "invalid_tool_call"
    assert "max_tokens" in str(call["error"])


def test_every_call_has_an_id_of_its_own() -> None:
    block = CallBlock('{"name": "f"}', is_closed=True)

    assert parsed_call(block, was_cut=False)["id"] != parsed_call(block, was_cut=False)["id"]


@pytest.mark.parametrize("text", [text for text, _ in GOOD])
def test_chunk_of_a_call_adds_up_to_the_call(text: str) -> None:
    call = parsed_call(CallBlock(text, is_closed=True), was_cut=False)

    total = AIMessageChunk(content="", tool_call_chunks=[call_chunk(call, 0)]) + AIMessageChunk(
        content="", chunk_position="last"
    )

    assert total.tool_calls == [call]


@pytest.mark.parametrize("text", [*(text for text, _, _ in BAD), *(t[:-2] for t, _ in GOOD)])
def test_chunk_of_an_invalid_call_stays_invalid_in_the_sum(text: str) -> None:
    call = parsed_call(CallBlock(text, is_closed=False), was_cut=True)

    total = AIMessageChunk(content="", tool_call_chunks=[call_chunk(call, 0)]) + AIMessageChunk(
        content="", chunk_position="last"
    )

    assert total.tool_calls == []
    assert [found["args"] for found in total.invalid_tool_calls] == [call["args"]]
