"""The same texts by every route, also when blocks are short, results late or the model trained."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from langchain_llm import ChatNanoserve, NanoserveLLM
from nanoserve_adapters.testing import AdmissionGate
from tests.langchain_llm.doors import RealDoor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from langchain_core.messages import AIMessage
    from langchain_core.runnables import Runnable
    from transformers import PreTrainedTokenizerFast

PROMPTS = [f"prompt {number}" + " and more" * (number % 4) for number in range(12)]
NUM_TOKENS = 40


@pytest.fixture(params=[(2000, 0), (2000, 2), (16, 0), (16, 2)], ids=str)
def door(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> Iterator[RealDoor]:
    """Engines with many and with few blocks, with results at once and two steps late."""
    num_blocks, run_ahead = request.param
    made = RealDoor(tokenizer, num_blocks=num_blocks, run_ahead=run_ahead)
    yield made
    made.thread.close()


@pytest.fixture(scope="module")
def expected(real: RealDoor) -> list[str]:
    """Greedy answers, one call after another, with blocks to spare."""
    chat = real.chat(max_tokens=NUM_TOKENS, stop=["Q"])
    return [chat.invoke(prompt).text for prompt in PROMPTS]


def test_texts_do_not_depend_on_route_blocks_or_late_results(
    door: RealDoor, expected: list[str]
) -> None:
    chat = door.chat(max_tokens=NUM_TOKENS, stop=["Q"])

    async def streamed(prompt: str) -> str:
        return "".join([chunk.content async for chunk in chat.astream(prompt)])

    async def all_streamed() -> list[str]:
        return await asyncio.gather(*(streamed(prompt) for prompt in PROMPTS))

    with AdmissionGate(door.thread, len(PROMPTS)):
        batch = [answer.text for answer in chat.batch(PROMPTS)]
    with AdmissionGate(door.thread, len(PROMPTS)):
        streams = asyncio.run(all_streamed())

    assert batch == streams == expected
    assert door.reference.tokenizer is not None
    stats = door.thread.stats()
    assert (stats.preemptions > 0) == (stats.num_blocks == 16)
    door.assert_nothing_left()


SCHEMA = {
    "title": "counted",
    "type": "object",
    "properties": {
        "kind": {"enum": ["apple", "pear"]},
        "number": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "number"],
}


@pytest.fixture(scope="module")
def documents(real: RealDoor) -> list[str]:
    """Answers in a format, one call after another, with blocks to spare."""
    bound = formatted(real)
    return [str(bound.invoke(prompt, seed=7).content) for prompt in PROMPTS]


def formatted(door: RealDoor) -> Runnable[Any, AIMessage]:
    """A model whose answers have a format."""
    chat = door.chat(temperature=1.0, max_tokens=NUM_TOKENS, enable_thinking=False)
    return chat.bind(response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}})


def test_documents_do_not_depend_on_route_blocks_or_late_results(
    door: RealDoor, documents: list[str]
) -> None:
    bound = formatted(door)

    async def streamed(prompt: str) -> str:
        return "".join([str(chunk.content) async for chunk in bound.astream(prompt, seed=7)])

    async def all_streamed() -> list[str]:
        return await asyncio.gather(*(streamed(prompt) for prompt in PROMPTS))

    with AdmissionGate(door.thread, len(PROMPTS)):
        batch = [answer.content for answer in bound.batch(PROMPTS, seed=7)]
    with AdmissionGate(door.thread, len(PROMPTS)):
        streams = asyncio.run(all_streamed())

    assert batch == streams == documents
    assert all(json.loads(document).keys() == {"kind", "number"} for document in documents)
    stats = door.thread.stats()
    assert (stats.preemptions > 0) == (stats.num_blocks == 16)
    door.assert_nothing_left()


@pytest.fixture(scope="module")
def trained(tiny_checkpoint: Path) -> Iterator[ChatNanoserve]:
    """A chat model on the checkpoint that the repository ships."""
    options = {"num_kvcache_blocks": 512}
    with ChatNanoserve(
        model=tiny_checkpoint,
        engine_options=options,
        temperature=0,
        max_tokens=16,
        enable_thinking=False,
    ) as chat:
        chat.warmup()
        yield chat


def test_trained_checkpoint_answers_a_chain_of_many_sums(trained: ChatNanoserve) -> None:
    chain: Any = (
        ChatPromptTemplate.from_messages([("user", "What is {a} + {b}?")])
        | trained
        | StrOutputParser()
    )
    sums = [{"a": a, "b": a + 3} for a in range(1, 21)]

    answers = asyncio.run(chain.abatch(sums))

    assert answers == chain.batch(sums) == [chain.invoke(pair) for pair in sums]
    right = [
        answer.strip(" .") == str(s["a"] + s["b"]) for answer, s in zip(answers, sums, strict=True)
    ]
    assert sum(right) >= 15


def test_trained_checkpoint_serves_chat_and_text_from_one_engine(trained: ChatNanoserve) -> None:
    llm = NanoserveLLM(engine=trained.engine, temperature=0, max_tokens=12)

    text = llm.invoke("It is a truth universally acknowledged, that")

    assert llm.engine.thread is trained.engine.thread
    assert any(character.isalpha() for character in text)
    llm.close()
