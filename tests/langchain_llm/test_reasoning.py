"""Thinking kept apart from the answer, by every route, wherever the answer begins (B13)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from langchain_llm.answer_start import AnswerStart
from langchain_llm.reasoning_tokens import num_reasoning_tokens
from tests.langchain_llm.doors import summed

if TYPE_CHECKING:
    from collections.abc import Callable

    from langchain_core.messages import AIMessage, AIMessageChunk
    from transformers import PreTrainedTokenizerFast

    from tests.langchain_llm.doors import FakeDoor, RealDoor

THOUGHT = "<think>\nhm\n</think>\n\nParis."
OPENED = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"


def by_every_route(door: RealDoor, **options: Any) -> list[AIMessage]:
    """The answers of invoke, batch, stream and astream."""
    chat = door.chat(**options)

    async def streamed() -> AIMessageChunk:
        return summed([chunk async for chunk in chat.astream("hi")])

    return [
        chat.invoke("hi"),
        *chat.batch(["hi"]),
        summed(list(chat.stream("hi"))),
        asyncio.run(streamed()),
    ]


@pytest.mark.parametrize(
    ("options", "text", "reasoning", "num_tokens"),
    [
        ({"enable_thinking": False}, "Paris.", None, 0),
        ({"enable_thinking": True}, THOUGHT, "hm", 4),
        ({}, THOUGHT, "hm", 4),
        ({}, "Paris.", None, 0),
        ({"chat_template": OPENED}, "hm\n</think>\n\nParis.", "hm", 3),
    ],
)
def test_reasoning_and_answer_are_kept_apart(
    real: RealDoor, options: dict[str, Any], text: str, reasoning: str | None, num_tokens: int
) -> None:
    real.script.texts = text

    for answer in by_every_route(real, **options):
        assert answer.content == "Paris."
        assert answer.additional_kwargs.get("reasoning_content") == reasoning
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_token_details"] == {"reasoning": num_tokens}
        assert answer.response_metadata["finish_reason"] == "stop"


def test_thinking_cut_by_the_limit_is_reasoning_without_an_answer(real: RealDoor) -> None:
    real.script.texts = "<think>\nhm, it is a capital"

    for answer in by_every_route(real, max_tokens=8):
        assert answer.content == ""
        assert answer.additional_kwargs == {"reasoning_content": "hm, it"}
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_token_details"] == {"reasoning": 7}
        assert answer.response_metadata["finish_reason"] == "length"


def test_answer_is_not_taken_for_thinking_when_the_prompt_has_closed_the_block(
    real: RealDoor,
) -> None:
    real.script.texts = "<think> is a mark, </think> too."

    for answer in by_every_route(real, enable_thinking=False):
        assert answer.content == "<think> is a mark, </think> too."
        assert answer.additional_kwargs == {}


def test_reasoning_is_streamed_as_it_comes_with_empty_content(real: RealDoor) -> None:
    real.script.texts = "<think>\none two three\n</think>\n\nfour five"

    chunks = list(real.chat().stream("hi"))

    thoughts = [c for c in chunks if c.additional_kwargs]
    assert len(thoughts) >= 4
    assert all(chunk.content == "" for chunk in thoughts)
    assert "".join(c.additional_kwargs["reasoning_content"] for c in thoughts) == "one two three"
    assert "".join(c.content for c in chunks) == "four five"


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_content_blocks_hold_reasoning_and_then_text(real: RealDoor, version: str) -> None:
    real.script.texts = THOUGHT

    for answer in by_every_route(real, output_version=version):
        blocks = [
            {key: block[key] for key in ("type", "reasoning", "text") if key in block}
            for block in answer.content_blocks
        ]
        assert blocks == [
            {"type": "reasoning", "reasoning": "hm"},
            {"type": "text", "text": "Paris."},
        ]
        assert answer.text == "Paris."


def test_events_of_version_3_have_reasoning_and_text(real: RealDoor) -> None:
    real.script.texts = THOUGHT

    stream = real.chat().stream_events("hi", version="v3")
    events = list(stream)

    deltas = [e["delta"] for e in events if e["event"] == "content-block-delta"]
    assert "".join(d["reasoning"] for d in deltas if d["type"] == "reasoning-delta") == "hm"
    assert stream.output.text == "Paris."


def test_answer_with_reasoning_goes_back_into_the_history(
    make_fake: Callable[..., FakeDoor],
) -> None:
    door = make_fake(THOUGHT)
    template = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"

    answer = door.chat().invoke("hi")
    door.chat(chat_template=template).invoke([answer])

    assert door.prompts()[1] == "[hm|Paris.]"


@pytest.mark.parametrize(
    ("start", "text", "expected"),
    [
        (AnswerStart.UNDECIDED, "<think>\nhm\n</think>\n\nParis", 4),
        (AnswerStart.UNDECIDED, "<think>\nhm", 3),
        (AnswerStart.REASONING, "hm\n</think>\n\nParis", 3),
        (AnswerStart.REASONING, "hm", 2),
    ],
)
def test_tokens_inside_the_marks_are_counted(
    tokenizer: PreTrainedTokenizerFast, start: AnswerStart, text: str, expected: int
) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)

    assert num_reasoning_tokens(tokenizer, token_ids, start, "hm") == expected


def test_marks_spelled_in_letters_are_counted_by_their_text(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    spelled = [*b"<think>hm</think>ok"]

    count = num_reasoning_tokens(tokenizer, spelled, AnswerStart.UNDECIDED, "hm")

    assert count == 2


def test_plain_text_model_takes_nothing_apart(make_fake: Callable[..., FakeDoor]) -> None:
    llm = make_fake(THOUGHT).llm()

    assert llm.invoke("hi") == "".join(llm.stream("hi")) == THOUGHT
