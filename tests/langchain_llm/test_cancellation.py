"""Whoever stops waiting gives the engine its blocks back, in each way there is to stop waiting."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.output_parsers import StrOutputParser

from nanoserve_adapters.testing import AdmissionGate
from nanoserve_core import EngineClosed, EngineDead, RequestFailed
from tests.langchain_llm.doors import SayText

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from langchain_llm import ChatNanoserve, NanoserveLLM
    from nanoserve_core.request import Request
    from tests.langchain_llm.doors import FakeDoor

LONG = 2000
"""Tokens of an answer that nobody waits for to the end."""
PATIENCE_SECONDS = 30


class Held:
    """A fake engine that runs freely up to its ``step``-th step and then waits for ``go``."""

    def __init__(self, make_fake: Callable[..., FakeDoor], step: int, **options: Any) -> None:
        self.reached = threading.Event()
        self.released = threading.Event()
        self.step = step
        self.door = make_fake("x" * LONG, before_step=self._before_step, **options)

    def _before_step(self, number: int) -> None:
        if number == self.step:
            self.reached.set()
            self.released.wait(PATIENCE_SECONDS)

    def go(self) -> None:
        """Let the engine run on, and wait until it has nothing to do."""
        self.released.set()
        self.door.assert_nothing_left()

    @property
    def endings(self) -> dict[str, int]:
        """How the requests ended."""
        endings: dict[str, int] = self.door.thread.stats().finished_requests
        return endings


@pytest.fixture
def held(make_fake: Callable[..., FakeDoor]) -> Iterator[Held]:
    """Runs five steps and waits before the sixth."""
    engine = Held(make_fake, step=6)
    yield engine
    engine.released.set()


@pytest.fixture(params=["chat", "llm"])
def model(request: pytest.FixtureRequest, held: Held) -> ChatNanoserve | NanoserveLLM:
    """Both classes on the held engine."""
    return held.door.chat() if request.param == "chat" else held.door.llm(max_tokens=-1)


def test_cancelled_task_cancels_its_request(
    held: Held, model: ChatNanoserve | NanoserveLLM
) -> None:
    async def cancel_while_it_waits() -> None:
        task = asyncio.ensure_future(model.ainvoke("hi"))
        await asyncio.to_thread(held.reached.wait, PATIENCE_SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_while_it_waits())

    held.go()
    assert held.endings == {"abort": 1}


def test_timeout_of_the_caller_cancels_the_request(
    held: Held, model: ChatNanoserve | NanoserveLLM
) -> None:
    async def call() -> None:
        await asyncio.wait_for(model.ainvoke("hi"), 0.05)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(call())

    held.go()
    assert set(held.endings) <= {"abort"}  # on a busy machine the time is up before it begins


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
def test_timeout_option_raises_and_cancels_the_request(
    held: Held, model: ChatNanoserve | NanoserveLLM, way: str
) -> None:
    async def astream() -> None:
        async for _ in model.astream("hi", timeout=0.05):
            pass

    calls: dict[str, Callable[[], object]] = {
        "invoke": lambda: model.invoke("hi", timeout=0.05),
        "ainvoke": lambda: asyncio.run(model.ainvoke("hi", timeout=0.05)),
        "stream": lambda: list(model.stream("hi", timeout=0.05)),
        "astream": lambda: asyncio.run(astream()),
    }

    with pytest.raises(TimeoutError, match=r"0\.05"):
        calls[way]()

    held.go()
    assert held.endings == {"abort": 1}


def test_break_out_of_an_async_stream_cancels_the_request(
    held: Held, model: ChatNanoserve | NanoserveLLM
) -> None:
    async def first_chunk() -> None:
        async for _ in model.astream("hi"):
            break

    asyncio.run(first_chunk())

    held.go()
    assert held.endings == {"abort": 1}


def test_aclose_of_an_async_stream_cancels_the_request(
    held: Held, model: ChatNanoserve | NanoserveLLM
) -> None:
    async def close_after_the_first_chunk() -> None:
        stream: Any = model.astream("hi")
        await anext(stream)
        await stream.aclose()

    asyncio.run(close_after_the_first_chunk())

    held.go()
    assert held.endings == {"abort": 1}


# LangChain's own astream wants to await a callback when it is dropped, and cannot.
@pytest.mark.filterwarnings(
    "ignore:coroutine .*on_llm_error:RuntimeWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)
def test_event_loop_closed_under_a_stream_cancels_the_request(
    held: Held, model: ChatNanoserve | NanoserveLLM
) -> None:
    loop = asyncio.new_event_loop()
    stream: Any = model.astream("hi")
    loop.run_until_complete(stream.__anext__())

    loop.close()
    del stream
    gc.collect()

    held.go()
    assert held.endings == {"abort": 1}


@pytest.mark.parametrize("ending", ["close", "del", "throw"])
def test_stream_that_is_left_cancels_its_request(
    held: Held, model: ChatNanoserve | NanoserveLLM, ending: str
) -> None:
    stream: Any = model.stream("hi")
    next(stream)

    if ending == "close":
        stream.close()
    elif ending == "throw":
        with pytest.raises(LookupError):
            stream.throw(LookupError())
    del stream

    held.go()
    assert held.endings == {"abort": 1}


@pytest.mark.parametrize("kind", ["chat", "llm"])
def test_async_chain_stream_that_is_closed_cancels_its_request(
    make_fake: Callable[..., FakeDoor], kind: str
) -> None:
    door = make_fake("x" * LONG, seconds_per_step=0.001)  # a chain reads a chunk ahead
    model: Any = door.chat() if kind == "chat" else door.llm(max_tokens=-1)

    async def close_after_the_first_chunk() -> None:
        stream: Any = (model | StrOutputParser()).astream("hi")
        await anext(stream)
        await stream.aclose()

    asyncio.run(close_after_the_first_chunk())

    door.assert_nothing_left()
    assert door.thread.stats().finished_requests == {"abort": 1}


def test_chain_stream_that_is_closed_leaves_nothing_behind(
    make_fake: Callable[..., FakeDoor],
) -> None:
    door = make_fake("x" * 50)
    stream: Any = (door.chat() | StrOutputParser()).stream("hi")
    next(stream)

    stream.close()  # langchain-core (1.8) reads the answer to its end here, for its trace

    door.assert_nothing_left()


def interrupt_at_step_5(step: int) -> None:
    """What Ctrl-C does, at a known moment; engine thread."""
    if step == 5:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.mark.parametrize("way", ["invoke", "batch", "generate", "batch_as_completed"])
def test_interrupt_from_the_keyboard_cancels_all_requests_of_the_call(
    make_fake: Callable[..., FakeDoor], way: str
) -> None:
    door = make_fake("x" * LONG, before_step=interrupt_at_step_5, seconds_per_step=0.001)
    chat = door.chat()
    messages = [[message] for message in chat_messages("abc")]
    calls: dict[str, Callable[[], object]] = {
        "invoke": lambda: chat.invoke("a"),
        "batch": lambda: chat.batch(["a", "b", "c"]),
        "generate": lambda: chat.generate(messages),
        "batch_as_completed": lambda: list(chat.batch_as_completed(["a", "b", "c"])),
    }

    with pytest.raises(KeyboardInterrupt):
        calls[way]()

    door.assert_nothing_left()
    assert set(door.thread.stats().finished_requests) == {"abort"}


def test_interrupt_of_an_llm_batch_cancels_all_its_requests(
    make_fake: Callable[..., FakeDoor],
) -> None:
    door = make_fake("x" * LONG, before_step=interrupt_at_step_5, seconds_per_step=0.001)

    with pytest.raises(KeyboardInterrupt):
        door.llm(max_tokens=-1).batch(["a", "b", "c"])

    door.assert_nothing_left()
    assert door.thread.stats().finished_requests == {"abort": 3}


class PoisonAt:
    """``next_token`` of a fake engine: fails for prompts with "poison", goes on for all others."""

    def __init__(self, position: int) -> None:
        self.position = position

    def __call__(self, request: Request, index: int, token_ids: Sequence[int]) -> int:
        del index
        prompt = bytes(token for token in request.prompt_token_ids if token < 256)
        if b"poison" in prompt and len(token_ids) - len(request.prompt_token_ids) == self.position:
            raise LookupError("poisoned")
        return ord("x")


BATCH_WAYS: dict[str, Callable[[Any, list[str]], object]] = {
    "batch": lambda model, prompts: model.batch(prompts, {"max_concurrency": 64}),
    "abatch": lambda model, prompts: asyncio.run(model.abatch(prompts, {"max_concurrency": 64})),
    "as_completed": lambda model, prompts: list(model.batch_as_completed(prompts)),
}


@pytest.mark.parametrize("way", BATCH_WAYS)
@pytest.mark.parametrize("kind", ["chat", "llm"])
def test_input_that_fails_cancels_the_others_of_its_batch(
    make_fake: Callable[..., FakeDoor], way: str, kind: str
) -> None:
    door = make_fake(next_token=PoisonAt(5))
    model = door.chat() if kind == "chat" else door.llm(max_tokens=-1)
    prompts = ["a", "b", "poison", "c"]

    with pytest.raises(RequestFailed, match="poisoned"), AdmissionGate(door.thread, 4):
        BATCH_WAYS[way](model, prompts)

    door.assert_nothing_left()
    assert door.thread.stats().finished_requests == {"error": 1, "abort": 3}


def test_inner_batch_is_cancelled_with_the_outer_one(make_fake: Callable[..., FakeDoor]) -> None:
    from langchain_llm import dispatch

    door = make_fake(next_token=PoisonAt(5))
    chat = door.chat()
    jobs: list[Callable[[], object]] = [
        lambda: chat.batch(["a", "b"]),
        lambda: chat.invoke("poison"),
    ]

    with pytest.raises(RequestFailed, match="poisoned"), AdmissionGate(door.thread, 3):
        dispatch.batch_in_window(lambda job: job(), jobs, size=2, return_exceptions=False)

    door.assert_nothing_left()
    assert door.thread.stats().finished_requests == {"error": 1, "abort": 2}


def test_request_that_somebody_else_cancels_raises_and_gives_no_half_answer(held: Held) -> None:
    def cancel_it() -> None:
        held.reached.wait(PATIENCE_SECONDS)
        held.door.thread.cancel(held.door.requests[0].request_id)
        held.released.set()

    helper = threading.Thread(target=cancel_it)
    helper.start()

    with pytest.raises(RequestFailed, match="cancelled"):
        held.door.chat().invoke("hi")

    helper.join()


def test_closed_engine_ends_waiting_calls(held: Held, model: ChatNanoserve | NanoserveLLM) -> None:
    stream: Any = model.stream("hi")
    next(stream)
    closer = threading.Thread(target=held.door.thread.close)
    closer.start()
    held.released.set()

    with pytest.raises(EngineClosed):
        list(stream)

    closer.join()


def test_dead_engine_fails_the_call_with_the_cause(make_fake: Callable[..., FakeDoor]) -> None:
    def die(step: int) -> None:
        if step == 3:
            raise ZeroDivisionError("a broken step")

    door = make_fake("x" * LONG, before_step=die)

    with pytest.raises(EngineDead) as caught:
        door.chat().invoke("hi")

    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_generate_that_fails_half_way_cancels_what_it_submitted(
    make_fake: Callable[..., FakeDoor],
) -> None:
    door = make_fake(next_token=PoisonAt(0))
    messages = [[message] for message in chat_messages(["poison", "b", "c"])]

    with pytest.raises(RequestFailed, match="poisoned"), AdmissionGate(door.thread, 3):
        door.chat().generate(messages)

    door.assert_nothing_left()
    assert door.thread.stats().finished_requests == {"error": 1, "abort": 2}


def test_batch_as_completed_that_is_left_cancels_the_rest(
    make_fake: Callable[..., FakeDoor],
) -> None:
    door = make_fake(next_token=SayText("x" * LONG, {"short": "short"}))
    with AdmissionGate(door.thread, 3):
        ended = door.chat().batch_as_completed(["a", "short", "b"])
        first = next(ended)

    ended.close()

    door.assert_nothing_left()
    assert first[0] == 1
    assert door.thread.stats().finished_requests == {"stop": 1, "abort": 2}


def chat_messages(texts: Sequence[str]) -> list[Any]:
    """One human message for each text."""
    from langchain_core.messages import HumanMessage

    return [HumanMessage(text) for text in texts]
