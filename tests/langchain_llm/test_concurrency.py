"""Calls by every route run in one batch, keep their order and their text: public reports B1, B2,
S3, S8.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel

from langchain_llm import ChatNanoserve, NanoserveLLM
from nanoserve_adapters.loop_outbox import TURNS_PER_PASS
from nanoserve_adapters.testing import AdmissionGate

if TYPE_CHECKING:
    from tests.langchain_llm.doors import FakeDoor, RealDoor

PROMPTS = [f"prompt number {number}" for number in range(50)]
NUM_TOKENS = 6

ChatRoute = Callable[[ChatNanoserve], list[str]] if TYPE_CHECKING else Any
LLMRoute = Callable[[NanoserveLLM], list[str]] if TYPE_CHECKING else Any


def chain_of(chat: ChatNanoserve) -> Runnable[dict[str, str], str]:
    return ChatPromptTemplate.from_template("{question}") | chat | StrOutputParser()


def messages_of(chat: ChatNanoserve) -> list[Any]:
    del chat
    return [ChatPromptTemplate.from_template("{q}").format_messages(q=p) for p in PROMPTS]


async def streamed(model: Runnable[Any, Any], prompt: str) -> str:
    parts = [part async for part in model.astream(prompt)]
    return "".join(part if isinstance(part, str) else part.content for part in parts)


async def gather_ainvoke(model: Runnable[Any, Any]) -> list[Any]:
    return await asyncio.gather(*(model.ainvoke(prompt) for prompt in PROMPTS))


async def gather_astream(model: Runnable[Any, Any]) -> list[str]:
    return await asyncio.gather(*(streamed(model, prompt) for prompt in PROMPTS))


def in_threads(call: Callable[[str], str], prompts: list[str]) -> list[str]:
    """Each call on a thread of its own."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(call, prompts))


def in_event_loops(model: Runnable[Any, Any]) -> list[Any]:
    """Ten calls in each of five event loops."""

    async def ten(prompts: list[str]) -> list[Any]:
        return await asyncio.gather(*(model.ainvoke(prompt) for prompt in prompts))

    groups = [PROMPTS[start : start + 10] for start in range(0, 50, 10)]
    with ThreadPoolExecutor(len(groups)) as pool:
        answers = pool.map(lambda prompts: asyncio.run(ten(prompts)), groups)
        return [answer for group in answers for answer in group]


async def as_in_a_notebook(model: Runnable[Any, Any]) -> list[Any]:
    """A sync batch from a thread whose event loop runs."""
    return model.batch(PROMPTS)


def in_order(pairs: list[tuple[int, Any]]) -> list[Any]:
    return [result for _, result in sorted(pairs, key=lambda pair: pair[0])]


QUESTIONS = [{"question": prompt} for prompt in PROMPTS]
CHAT_ROUTES: dict[str, ChatRoute] = {
    "batch": lambda chat: [m.content for m in chat.batch(PROMPTS)],
    "abatch": lambda chat: [m.content for m in asyncio.run(chat.abatch(PROMPTS))],
    "ainvoke": lambda chat: [m.content for m in asyncio.run(gather_ainvoke(chat))],
    "astream": lambda chat: asyncio.run(gather_astream(chat)),
    "generate": lambda chat: [g[0].text for g in chat.generate(messages_of(chat)).generations],
    "agenerate": lambda chat: [
        g[0].text for g in asyncio.run(chat.agenerate(messages_of(chat))).generations
    ],
    "chain.batch": lambda chat: chain_of(chat).batch(QUESTIONS),
    "chain.abatch": lambda chat: asyncio.run(chain_of(chat).abatch(QUESTIONS)),
    "threads": lambda chat: in_threads(lambda prompt: chat.invoke(prompt).text, PROMPTS),
    "stream in threads": lambda chat: in_threads(
        lambda prompt: "".join(chunk.text for chunk in chat.stream(prompt)), PROMPTS
    ),
    "event loops": lambda chat: [m.content for m in in_event_loops(chat)],
    "notebook": lambda chat: [m.content for m in asyncio.run(as_in_a_notebook(chat))],
    "map": lambda chat: [m.content for m in chat.map().invoke(PROMPTS)],
    "chain.map": lambda chat: chain_of(chat).map().invoke(QUESTIONS),
    "fallbacks.batch": lambda chat: [m.content for m in chat.with_fallbacks([chat]).batch(PROMPTS)],
    "bind.batch": lambda chat: [m.content for m in chat.bind(priority=1).batch(PROMPTS)],
    "retry.batch": lambda chat: [m.content for m in chat.with_retry().batch(PROMPTS)],
    "batch_as_completed": lambda chat: [
        m.content for m in in_order(list(chat.batch_as_completed(PROMPTS)))
    ],
}
LLM_ROUTES: dict[str, LLMRoute] = {
    "batch": lambda llm: llm.batch(PROMPTS),
    "batch, exceptions": lambda llm: llm.batch(PROMPTS, return_exceptions=True),
    "batch, window": lambda llm: llm.batch(PROMPTS, {"max_concurrency": 50}),
    "abatch": lambda llm: asyncio.run(llm.abatch(PROMPTS)),
    "abatch, exceptions": lambda llm: asyncio.run(llm.abatch(PROMPTS, return_exceptions=True)),
    "ainvoke": lambda llm: asyncio.run(gather_ainvoke(llm)),
    "astream": lambda llm: asyncio.run(gather_astream(llm)),
    "generate": lambda llm: [g[0].text for g in llm.generate(PROMPTS).generations],
    "chain.batch": lambda llm: (PromptTemplate.from_template("{question}") | llm).batch(QUESTIONS),
    "threads": lambda llm: in_threads(llm.invoke, PROMPTS),
    "event loops": in_event_loops,
    "notebook": lambda llm: asyncio.run(as_in_a_notebook(llm)),
    "batch_as_completed": lambda llm: in_order(list(llm.batch_as_completed(PROMPTS))),
}


@pytest.fixture(scope="module")
def chat_texts(real: RealDoor) -> list[str]:
    """The chat model's answers to PROMPTS, one call after another."""
    chat = real.chat(max_tokens=NUM_TOKENS)
    return [chat.invoke(prompt).text for prompt in PROMPTS]


@pytest.fixture(scope="module")
def llm_texts(real: RealDoor) -> list[str]:
    """The LLM's answers to PROMPTS, one call after another."""
    llm = real.llm(max_tokens=NUM_TOKENS)
    return [llm.invoke(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("route", CHAT_ROUTES.values(), ids=CHAT_ROUTES)
def test_50_chat_calls_run_in_one_batch_with_the_texts_of_single_calls(
    route: ChatRoute, real: RealDoor, chat_texts: list[str]
) -> None:
    real.watch.peak = 0

    with AdmissionGate(real.thread, 50):
        texts = route(real.chat(max_tokens=NUM_TOKENS))

    assert texts == chat_texts
    assert real.watch.peak == 50
    real.assert_nothing_left()


@pytest.mark.parametrize("route", LLM_ROUTES.values(), ids=LLM_ROUTES)
def test_50_llm_calls_run_in_one_batch_with_the_texts_of_single_calls(
    route: LLMRoute, real: RealDoor, llm_texts: list[str]
) -> None:
    real.watch.peak = 0

    with AdmissionGate(real.thread, 50):
        texts = route(real.llm(max_tokens=NUM_TOKENS))

    assert texts == llm_texts
    assert real.watch.peak == 50
    real.assert_nothing_left()


@pytest.mark.parametrize("way", ["abatch", "batch"])
def test_three_parallel_branches_of_50_inputs_run_in_a_batch_of_150(
    real: RealDoor, chat_texts: list[str], way: str
) -> None:
    chain = chain_of(real.chat(max_tokens=NUM_TOKENS))
    branches = RunnableParallel(a=chain, b=chain, c=chain)
    real.watch.peak = 0

    with AdmissionGate(real.thread, 150):
        if way == "abatch":
            answers = asyncio.run(branches.abatch(QUESTIONS))
        else:  # LangChain runs one thread for each input and branch, if it may
            answers = branches.batch(QUESTIONS, {"max_concurrency": 150})

    assert answers == [{"a": text, "b": text, "c": text} for text in chat_texts]
    assert real.watch.peak == 150


def test_batch_of_a_chain_takes_as_many_steps_as_its_longest_answer(real: RealDoor) -> None:
    real.script.texts = "exactly 20 tokens ok"[:19]  # and the end of sequence
    prompts = PROMPTS[:40]
    before = real.thread.stats().steps

    with AdmissionGate(real.thread, 40):
        answers = real.chat().batch(prompts)

    real.script.texts = {}
    assert {answer.text for answer in answers} == {"exactly 20 tokens o"}
    assert real.thread.stats().steps - before <= 30


def test_branches_threads_and_event_loops_at_once_get_their_own_texts(real: RealDoor) -> None:
    texts = {f"<{name}>": f"text for {name}" for name in "abcdefghijklmnopqrst"}
    keys = list(texts)
    real.script.texts = texts
    chat = real.chat()
    found: dict[str, str] = {}

    def plain(key: str) -> None:
        found[key] = chat.invoke(key).text

    def loop(pair: list[str]) -> None:
        async def both() -> list[Any]:
            return await asyncio.gather(*(chat.ainvoke(key) for key in pair))

        found.update(zip(pair, [m.text for m in asyncio.run(both())], strict=True))

    def parallel(branches: list[str]) -> None:
        steps = {key: RunnableLambda(lambda _, key=key: key) | chat for key in branches}
        found.update({k: m.text for k, m in RunnableParallel(**steps).invoke("x").items()})

    jobs: list[tuple[Callable[[Any], None], Any]] = [(plain, key) for key in keys[:8]]
    jobs += [(loop, keys[8:10]), (loop, keys[10:12]), (parallel, keys[12:20])]
    threads = [threading.Thread(target=job, args=(argument,)) for job, argument in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    real.script.texts = {}
    assert found == texts
    real.assert_nothing_left()


def test_event_loop_goes_on_while_streams_wait_for_the_engine(
    make_fake: Callable[..., FakeDoor],
) -> None:
    release = threading.Event()
    door = make_fake("Hello.", before_step=lambda step: release.wait(30) if step == 1 else None)

    async def wait_and_release() -> list[str]:
        chat = door.chat()
        streams = [asyncio.ensure_future(streamed(chat, p)) for p in PROMPTS[:8]]
        for _ in range(100):
            await asyncio.sleep(0)  # comes back only if no stream blocks the loop
        release.set()
        return await asyncio.gather(*streams)

    texts = asyncio.run(wait_and_release())

    assert texts == ["Hello."] * 8


@pytest.mark.parametrize("kind", ["chat", "llm"])
def test_calls_that_start_together_prepare_a_few_at_a_time(
    fake: FakeDoor, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = fake.chat() if kind == "chat" else fake.llm()
    prepared: list[int] = []  # prompts tokenised between two beats of the loop
    encode = fake.tokenizer.encode

    def counted(text: str, **options: Any) -> list[int]:
        prepared[-1] += 1
        token_ids: list[int] = encode(text, **options)
        return token_ids

    async def heartbeat() -> None:
        while True:
            prepared.append(0)
            await asyncio.sleep(0)

    async def calls_beside_a_heartbeat() -> list[Any]:
        beats = asyncio.ensure_future(heartbeat())
        await asyncio.sleep(0)
        monkeypatch.setattr(fake.tokenizer, "encode", counted)
        half = PROMPTS[:25]
        answers = [asyncio.gather(*(model.ainvoke(prompt) for prompt in half))]
        answers += [asyncio.gather(*(streamed(model, prompt) for prompt in half))]
        found = await asyncio.gather(*answers)
        beats.cancel()
        return found

    model.invoke("what is done once is done")
    answers = asyncio.run(calls_beside_a_heartbeat())

    assert len(answers[0]) == len(answers[1]) == 25
    assert sum(prepared) >= 50
    assert max(prepared) <= 2 * TURNS_PER_PASS


def test_sync_calls_inside_async_code_finish_though_the_loop_limits_them(fake: FakeDoor) -> None:
    chat = fake.chat()
    sync_step = RunnableLambda(lambda prompt: chat.invoke(prompt).text)

    texts = asyncio.run(sync_step.abatch(PROMPTS))

    assert texts == ["Hello."] * 50


def test_sync_call_from_a_running_event_loop_does_not_deadlock(fake: FakeDoor) -> None:
    async def as_in_a_notebook() -> str:
        return fake.chat().invoke("hi").text

    assert asyncio.run(as_in_a_notebook()) == "Hello."


def test_batch_of_more_than_the_engine_holds_is_answered_in_order(
    make_fake: Callable[..., FakeDoor],
) -> None:
    from nanoserve_core import EngineConfig

    door = make_fake("Hello.", config=EngineConfig(max_num_seqs=4))

    with AdmissionGate(door.thread, 50):
        answers = door.chat().batch(PROMPTS, return_exceptions=True)

    assert [answer.text for answer in answers] == ["Hello."] * 50
    assert door.thread.stats().peak_batch == 4
