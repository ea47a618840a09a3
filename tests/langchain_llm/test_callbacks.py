"""Callbacks: every token once, an end or an error for every start (S4, section 1.4)."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.messages import HumanMessage

if TYPE_CHECKING:
    from collections.abc import Callable

    from langchain_core.runnables import Runnable

    from langchain_llm import ChatNanoserve
    from tests.langchain_llm.doors import FakeDoor

TEXT = "Hello."


class Recorder(BaseCallbackHandler):
    """What a run told its callbacks, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.tokens: list[str] = []
        self.threads: set[int] = set()

    def on_chat_model_start(self, *_: Any, **__: Any) -> None:
        self.events.append("start")

    def on_llm_start(self, *_: Any, **__: Any) -> None:
        self.events.append("start")

    def on_llm_new_token(self, token: str, **_: Any) -> None:
        self.events.append("token")
        self.tokens.append(token)
        self.threads.add(threading.get_ident())

    def on_llm_end(self, *_: Any, **__: Any) -> None:
        self.events.append("end")

    def on_llm_error(self, error: BaseException, **_: Any) -> None:
        self.events.append(f"error {type(error).__name__}")

    @property
    def frame(self) -> list[str]:
        """The events without the tokens."""
        return [event for event in self.events if event != "token"]


async def astream(model: Runnable[Any, Any], **options: Any) -> list[Any]:
    return [chunk async for chunk in model.astream("hi", **options)]


async def events(model: Runnable[Any, Any], version: str) -> list[Any]:
    return [e async for e in model.astream_events("hi", version=version)]


def run_all_paths(chat: ChatNanoserve) -> dict[str, Callable[[dict[str, Any]], object]]:
    """The six paths on which tokens can reach a callback."""
    streaming = chat.model_copy(update={"streaming": True})
    streaming.model_fields_set.add("streaming")
    return {
        "stream": lambda config: list(chat.stream("hi", config)),
        "astream": lambda config: asyncio.run(astream(chat, config=config)),
        "invoke, streaming": lambda config: streaming.invoke("hi", config),
        "ainvoke, streaming": lambda config: asyncio.run(streaming.ainvoke("hi", config)),
        "chain": lambda config: list((chat | (lambda m: m)).stream("hi", config)),
        "v2 events": lambda config: asyncio.run(events(chat.with_config(config), version="v2")),
    }


PATHS = ["stream", "astream", "invoke, streaming", "ainvoke, streaming", "chain", "v2 events"]


@pytest.mark.parametrize("path", PATHS)
def test_tokens_reach_chat_callbacks_exactly_once(fake: FakeDoor, path: str) -> None:
    recorder = Recorder()

    run_all_paths(fake.chat())[path]({"callbacks": [recorder]})

    assert "".join(recorder.tokens) == TEXT
    assert recorder.frame == ["start", "end"]


@pytest.mark.parametrize("path", ["stream", "astream", "invoke", "ainvoke"])
def test_tokens_reach_llm_callbacks_exactly_once(fake: FakeDoor, path: str) -> None:
    recorder = Recorder()
    config: Any = {"callbacks": [recorder]}
    llm = fake.llm()
    streaming = fake.llm(streaming=True)
    paths: dict[str, Callable[[], object]] = {
        "stream": lambda: list(llm.stream("hi", config)),
        "astream": lambda: asyncio.run(astream(llm, config=config)),
        "invoke": lambda: streaming.invoke("hi", config),
        "ainvoke": lambda: asyncio.run(streaming.ainvoke("hi", config)),
    }

    paths[path]()

    assert "".join(recorder.tokens) == TEXT
    assert recorder.frame == ["start", "end"]


def test_llm_tells_callbacks_before_it_yields(fake: FakeDoor) -> None:
    recorder = Recorder()
    stream = fake.llm().stream("hi", {"callbacks": [recorder]})

    first = next(stream)

    assert recorder.tokens == [first]
    stream.close()


def test_invoke_without_a_streaming_handler_emits_no_tokens(fake: FakeDoor) -> None:
    recorder = Recorder()

    fake.chat().invoke("hi", {"callbacks": [recorder]})
    fake.llm().invoke("hi", {"callbacks": [recorder]})

    assert recorder.events == ["start", "end"] * 2


@pytest.mark.parametrize("kind", ["chat", "llm"])
def test_streamed_events_carry_every_token(fake: FakeDoor, kind: str) -> None:
    model: Any = fake.chat() if kind == "chat" else fake.llm()
    chain = model | (lambda answer: answer)

    found = asyncio.run(events(chain, "v2"))

    names = {"on_chat_model_stream", "on_llm_stream"}
    pieces = [event["data"]["chunk"] for event in found if event["event"] in names]
    assert "".join(getattr(p, "content", None) or getattr(p, "text", "") for p in pieces) == TEXT


def test_events_of_an_llm_invoked_inside_a_step_carry_every_token(fake: FakeDoor) -> None:
    from langchain_core.runnables import RunnableLambda

    llm = fake.llm()
    step = RunnableLambda(lambda prompt: llm.invoke(prompt), lambda prompt: llm.ainvoke(prompt))

    found = asyncio.run(events(step, "v2"))

    pieces = [e["data"]["chunk"].text for e in found if e["event"] == "on_llm_stream"]
    assert "".join(pieces) == TEXT


def test_batch_with_token_callbacks_tells_each_run_its_own_tokens(
    make_fake: Callable[..., FakeDoor],
) -> None:
    from tests.langchain_llm.doors import SayText

    door = make_fake(next_token=SayText("?", {"<a>": "for a", "<b>": "for b"}))
    recorders = [Recorder(), Recorder()]

    door.llm(streaming=True).batch(["<a>", "<b>"], [{"callbacks": [r]} for r in recorders])

    assert ["".join(recorder.tokens) for recorder in recorders] == ["for a", "for b"]


@pytest.mark.parametrize("kind", ["chat", "streaming chat", "llm"])
def test_cancelled_ainvoke_ends_its_trace_with_one_error(
    make_fake: Callable[..., FakeDoor], kind: str
) -> None:
    reached, release = threading.Event(), threading.Event()

    def hold(step: int) -> None:
        if step == 3:
            reached.set()
            release.wait(30)

    door = make_fake("x" * 500, before_step=hold)
    recorder = Recorder()
    model: Any = (
        door.llm() if kind == "llm" else door.chat(**{"streaming": True} if " " in kind else {})
    )

    async def cancel() -> None:
        task = asyncio.ensure_future(model.ainvoke("hi", {"callbacks": [recorder]}))
        await asyncio.to_thread(reached.wait, 30)
        task.cancel()
        release.set()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancel())

    assert recorder.frame == ["start", "error CancelledError"]


@pytest.mark.parametrize("kind", ["chat", "llm"])
def test_stream_closed_early_ends_its_trace_with_one_error(
    make_fake: Callable[..., FakeDoor], kind: str
) -> None:
    door = make_fake("x" * 500)
    recorder = Recorder()
    model: Any = door.chat() if kind == "chat" else door.llm()
    stream = model.stream("hi", {"callbacks": [recorder]})
    next(stream)

    stream.close()

    assert recorder.frame == ["start", "error GeneratorExit"]


def test_failed_call_ends_its_trace_with_one_error(make_fake: Callable[..., FakeDoor]) -> None:
    door = make_fake(max_model_len=16)
    recorder = Recorder()

    with pytest.raises(ValueError, match="16"):
        door.chat().invoke("far too long for sixteen", {"callbacks": [recorder]})

    assert recorder.events == ["start", "error RequestTooLong"]


def test_callbacks_run_in_the_consumers_thread(fake: FakeDoor) -> None:
    recorder = Recorder()

    list(fake.llm().stream("hi", {"callbacks": [recorder]}))

    assert recorder.threads == {threading.get_ident()}


def test_slow_async_handler_does_not_hold_other_calls(fake: FakeDoor) -> None:
    class Slow(AsyncCallbackHandler):
        def __init__(self) -> None:
            self.go = asyncio.Event()

        async def on_llm_new_token(self, *_: Any, **__: Any) -> None:
            await self.go.wait()

    async def both() -> str:
        slow = Slow()
        stuck = asyncio.ensure_future(astream(fake.chat(), config={"callbacks": [slow]}))
        answer = await fake.chat().ainvoke("hi")
        slow.go.set()
        await stuck
        return answer.text

    assert asyncio.run(both()) == TEXT


def test_generate_of_several_conversations_has_a_run_for_each(fake: FakeDoor) -> None:
    recorder = Recorder()

    result = fake.chat().generate([[HumanMessage("a")], [HumanMessage("b")]], callbacks=[recorder])

    assert recorder.events == ["start", "start", "end", "end"]
    assert result.run is not None
    assert len(result.run) == 2


def test_plugins_see_the_run_of_a_request(fake: FakeDoor) -> None:
    config: Any = {"tags": ["blue"], "metadata": {"tenant": "t1"}}

    fake.chat().invoke("hi", config)
    fake.llm().invoke("hi", config)
    list(fake.chat().stream("hi"))

    first, second, third = (request.metadata for request in fake.requests)
    for metadata in (first, second):
        assert metadata["source"] == "langchain"
        assert metadata["run_id"]
        assert "blue" in metadata["tags"]
        assert metadata["metadata"]["tenant"] == "t1"
    assert third["source"] == "langchain"
