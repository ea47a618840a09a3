"""Streams: the pieces join to the answer of invoke, and only the last one says how it ended (B5,
S2).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from langchain_llm.streaming import PieceAssembler
from nanoserve_adapters.testing import settle
from nanoserve_core import FinishReason, Request, SamplingParams, StepOutput
from tests.langchain_llm.doors import IM_END, summed

if TYPE_CHECKING:
    from collections.abc import Callable

    from langchain_core.messages import AIMessageChunk

    from langchain_llm import ChatNanoserve
    from tests.langchain_llm.doors import FakeDoor, RealDoor

TEXTS = ["Hello.", "", "naïve — 日本語 🙂 done", "alpha beta gam", "gamma gamma! gone"]


def chunks_of(chat: ChatNanoserve, prompt: str = "hi", **options: Any) -> list[AIMessageChunk]:
    return list(chat.stream(prompt, **options))


async def achunks_of(
    chat: ChatNanoserve, prompt: str = "hi", **options: Any
) -> list[AIMessageChunk]:
    return [chunk async for chunk in chat.astream(prompt, **options)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stop", [None, ["gamma!"]])
def test_pieces_join_to_the_answer_of_invoke(
    make_fake: Callable[..., FakeDoor], text: str, stop: list[str] | None
) -> None:
    door = make_fake(text)
    expected = text.split("gamma!")[0] if stop else text

    whole = door.chat(stop=stop).invoke("hi")
    chunks = chunks_of(door.chat(stop=stop))
    asynchronous = asyncio.run(achunks_of(door.chat(stop=stop)))
    lines = list(door.llm(stop=stop).stream("hi"))

    assert whole.content == expected
    assert "".join(chunk.content for chunk in chunks) == expected
    assert "".join(chunk.content for chunk in asynchronous) == expected
    assert "".join(lines) == door.llm(stop=stop).invoke("hi") == expected


def test_no_piece_ends_inside_a_character_or_a_possible_stop_string(
    make_fake: Callable[..., FakeDoor],
) -> None:
    door = make_fake("日本 gamma gam")

    pieces = [chunk.content for chunk in chunks_of(door.chat(stop=["gamma!"]))]

    assert "\ufffd" not in "".join(pieces)
    text = ""
    for piece in pieces[:-1]:
        text += piece
        assert not any(text.endswith("gamma!"[:size]) for size in range(1, 6))


def test_exactly_one_last_chunk_has_usage_reason_and_name(fake: FakeDoor) -> None:
    for chunks in (chunks_of(fake.chat()), asyncio.run(achunks_of(fake.chat()))):
        *others, last = chunks

        assert last.chunk_position == "last"
        assert last.usage_metadata is not None
        assert last.response_metadata["finish_reason"] == "stop"
        assert last.response_metadata["model_name"] == "tiny"
        for chunk in others:
            assert chunk.chunk_position is None
            assert chunk.usage_metadata is None
            assert not chunk.response_metadata


def test_sum_of_the_chunks_is_the_message_of_invoke(fake: FakeDoor) -> None:
    whole = fake.chat().invoke("hi")

    total = summed(chunks_of(fake.chat()))

    assert total.content == whole.content
    assert total.usage_metadata == whole.usage_metadata
    timeless = {"finish_reason", "model_name", "model_provider"}
    assert {k: v for k, v in total.response_metadata.items() if k in timeless} == {
        k: v for k, v in whole.response_metadata.items() if k in timeless
    }


def test_empty_answer_still_is_one_chunk(make_fake: Callable[..., FakeDoor]) -> None:
    door = make_fake("")

    (chunk,) = chunks_of(door.chat())

    assert chunk.content == ""
    assert chunk.chunk_position == "last"
    assert list(door.llm().stream("hi")) == [""]
    assert chunks_of(door.chat(), max_tokens=0)[0].response_metadata["finish_reason"] == "length"


def test_consumer_that_lags_gets_everything_that_waits_in_one_chunk(
    make_fake: Callable[..., FakeDoor],
) -> None:
    door = make_fake("alpha beta gam")
    stream = door.chat(stop=["gamma!"]).stream("hi")
    first = next(stream)

    settle(door.thread)  # the engine is done before the next read
    rest = list(stream)

    assert first.content + "".join(chunk.content for chunk in rest) == "alpha beta gam"
    assert len(rest) <= 1


@pytest.mark.parametrize(
    ("interval", "expected"),
    [(1, ["0", "1", "2", "3", "4", "5", ""]), (2, ["0", "12", "34", "5"]), (9, ["0", "12345"])],
)
def test_interval_gathers_tokens_but_for_the_first_and_the_last(
    fake: FakeDoor, interval: int, expected: list[str]
) -> None:
    request = Request(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams())
    assembler = PieceAssembler(request, fake.tokenizer, interval=interval)
    ending = {"finish_reason": FinishReason.STOP, "request_finished": True}
    steps = [StepOutput(request_id="r", token_ids=(token,)) for token in b"012345"]
    steps.append(StepOutput(request_id="r", token_ids=(IM_END,), **ending))

    pieces = [piece for step in steps for piece in assembler.feed([step])]

    assert [piece.text for piece in pieces] == expected
    assert [piece.ending is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].ending is not None
    assert pieces[-1].ending.num_output_tokens == 7


def test_version_1_content_is_one_text_block(fake: FakeDoor) -> None:
    total = summed(chunks_of(fake.chat(output_version="v1")))

    assert [block["type"] for block in total.content_blocks] == ["text"]
    assert total.content_blocks[0]["text"] == "Hello."


def test_log_probabilities_of_the_pieces_are_those_of_the_whole(real: RealDoor) -> None:
    chat = real.chat(max_tokens=8, logprobs=True, top_logprobs=3)

    whole = chat.invoke("hi")
    total = summed(chunks_of(chat))

    content = whole.response_metadata["logprobs"]["content"]
    assert total.response_metadata["logprobs"]["content"] == content
    assert len(content) == 8
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in content)


def test_tokens_outside_the_top_are_reported_as_chosen_only(real: RealDoor) -> None:
    answer = real.chat(temperature=3.0, seed=1, max_tokens=8, logprobs=True).invoke("hi")

    content = answer.response_metadata["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 0 for entry in content)
    assert all(entry["logprob"] <= 0 for entry in content)


@pytest.mark.parametrize("seed", range(3))
def test_sampled_stream_equals_sampled_invoke_for_the_same_seed(real: RealDoor, seed: int) -> None:
    chat = real.chat(temperature=1.0, seed=seed, max_tokens=20)

    whole = chat.invoke("hi").content
    pieces = [chunk.content for chunk in chunks_of(chat)]

    assert "".join(pieces) == whole


def test_events_of_version_3_are_a_whole_message(fake: FakeDoor) -> None:
    stream = fake.chat().stream_events("hi", version="v3")

    assert list(stream)
    assert stream.output.text == "Hello."
    assert stream.output.usage_metadata["output_tokens"] == 7


def test_streaming_switched_off_gives_one_chunk_and_on_streams_inside_invoke(
    fake: FakeDoor,
) -> None:
    off = chunks_of(fake.chat(streaming=False))
    disabled = chunks_of(fake.chat(disable_streaming=True))
    on = fake.chat(streaming=True).invoke("hi")

    assert [message.content for message in (*off, *disabled, on)] == ["Hello."] * 3
    assert on.usage_metadata == off[0].usage_metadata
