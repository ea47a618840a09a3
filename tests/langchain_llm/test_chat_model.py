"""`ChatNanoserve`: what one answer carries, and how its tokens are counted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, trim_messages
from langchain_core.tools import tool

from nanoserve_adapters.testing import AdmissionGate

if TYPE_CHECKING:
    from tests.langchain_llm.doors import FakeDoor, RealDoor


def test_answer_has_usage_reason_name_and_times(real: RealDoor) -> None:
    answer = real.chat(max_tokens=5).invoke("hi")

    metadata, usage = answer.response_metadata, answer.usage_metadata
    assert usage is not None
    assert usage["input_tokens"] == real.chat().get_num_tokens_from_messages([HumanMessage("hi")])
    assert usage["output_tokens"] == 5
    assert usage["total_tokens"] == usage["input_tokens"] + 5
    assert metadata["finish_reason"] == "length"
    assert metadata["model_name"] == "tiny"
    assert metadata["model_provider"] == "nanoserve"
    assert metadata["ttft_s"] >= metadata["queue_s"] >= 0


def test_answers_and_last_chunks_say_how_large_their_batch_was(real: RealDoor) -> None:
    chat = real.chat(max_tokens=5)

    async def last_chunk(prompt: str) -> AIMessageChunk:
        return [chunk async for chunk in chat.astream(prompt)][-1]

    async def both() -> list[Any]:
        streams = [last_chunk(f"s{number}") for number in range(3)]
        return await asyncio.gather(chat.abatch(["a", "b", "c"]), *streams)

    with AdmissionGate(real.thread, 6):
        answers, *chunks = asyncio.run(both())

    assert [m.response_metadata["batch_peak"] for m in (*answers, *chunks)] == [6] * 6
    assert chat.invoke("alone").response_metadata["batch_peak"] == 1


def test_stop_string_is_named_in_answers_and_last_chunks(fake: FakeDoor) -> None:
    chat = fake.chat(stop=["lo"])

    *_, last = chat.stream("hi")

    assert chat.invoke("hi").response_metadata["stop_reason"] == "lo"
    assert last.response_metadata["stop_reason"] == "lo"


def test_second_branch_reads_the_common_prefix_from_the_cache(real: RealDoor) -> None:
    chat = real.chat(max_tokens=2, cache_salt="this test")
    system = SystemMessage("a system prompt of some length, common to both branches")
    branches = [[system, HumanMessage(text)] for text in ("first", "second")]

    with AdmissionGate(real.thread, 2):
        answers = chat.batch(branches)

    cached = sorted(a.usage_metadata["input_token_details"]["cache_read"] for a in answers)
    assert cached[0] == 0
    assert cached[1] >= 48


def test_usage_callback_counts_what_the_answers_say(fake: FakeDoor) -> None:
    with get_usage_metadata_callback() as usage:
        fake.chat().invoke("hi")
        list(fake.chat().stream("hi"))
        asyncio.run(fake.chat().ainvoke("hi"))

    assert usage.usage_metadata["tiny"]["output_tokens"] == 3 * 7


def test_generate_of_many_gives_all_and_leaves_nothing(real: RealDoor) -> None:
    chat = real.chat(max_tokens=4)
    conversations: list[list[Any]] = [[HumanMessage(f"q{number}")] for number in range(6)]

    result = chat.generate(conversations)

    assert [row[0].text for row in result.generations] == [
        chat.invoke(conversation).content for conversation in conversations
    ]
    real.assert_nothing_left()


def test_generate_raises_what_one_conversation_does_wrong_at_its_turn(fake: FakeDoor) -> None:
    image: Any = HumanMessage(content=[{"type": "image", "url": "x"}])

    with pytest.raises(ValueError, match="image"):
        fake.chat().generate([[HumanMessage("a")], [image], [HumanMessage("c")]])

    fake.assert_nothing_left()


def test_streaming_generate_uses_what_it_submitted(fake: FakeDoor) -> None:
    conversations: list[list[Any]] = [[HumanMessage("a")], [HumanMessage("b")]]

    with AdmissionGate(fake.thread, 2):
        result = fake.chat(streaming=True).generate(conversations)

    assert [row[0].text for row in result.generations] == ["Hello."] * 2
    assert len(fake.requests) == 2


def test_tokens_are_counted_by_the_models_own_tokenizer(fake: FakeDoor) -> None:
    chat = fake.chat()

    assert chat.get_token_ids("né") == [*"né".encode()]
    assert chat.get_num_tokens("né") == 3
    assert chat.get_num_tokens_from_messages([]) == 0
    assert fake.chat(custom_get_token_ids=lambda _: [1]).get_num_tokens("né") == 1


def test_counted_messages_are_exactly_the_prompt(fake: FakeDoor) -> None:
    messages: list[Any] = [SystemMessage("be kind"), HumanMessage("hi")]
    chat = fake.chat(enable_thinking=False)

    chat.invoke(messages)

    counted = chat.get_num_tokens_from_messages(messages)
    assert counted == len(fake.requests[0].prompt_token_ids)


def test_tools_count_as_the_template_prints_them(fake: FakeDoor) -> None:
    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    template = "{{ tools[0].function.name if tools }}{{ messages[0].content }}"
    chat = fake.chat(chat_template=template)

    assert chat.get_num_tokens_from_messages([HumanMessage("hi")]) == 2
    assert chat.get_num_tokens_from_messages([HumanMessage("hi")], tools=[add]) == 5


def test_messages_are_trimmed_to_the_token(fake: FakeDoor) -> None:
    chat = fake.chat()
    history: list[Any] = [
        HumanMessage("word " * 10),
        HumanMessage("word " * 5),
        HumanMessage("end"),
    ]
    limit = chat.get_num_tokens_from_messages(history[1:])

    kept = trim_messages(history, max_tokens=limit, token_counter=chat, strategy="last")
    fewer = trim_messages(history, max_tokens=limit - 1, token_counter=chat, strategy="last")

    assert kept == history[1:]
    assert fewer == history[2:]
