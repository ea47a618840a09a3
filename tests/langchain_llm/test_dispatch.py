"""The window: contexts are copied, limits slide, failures end it or are returned in place (S5)."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import pytest

from langchain_llm import dispatch
from nanoserve_core import RequestTooLong

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.langchain_llm.doors import FakeDoor

VARIABLE: ContextVar[str] = ContextVar("VARIABLE", default="unset")


def batch(
    call: Callable[[int], Any], *, size: int = 4, return_exceptions: bool = False
) -> list[Any]:
    return dispatch.batch_in_window(call, range(10), size=size, return_exceptions=return_exceptions)


def test_results_come_in_the_order_of_the_items() -> None:
    assert batch(lambda item: item * item) == [item * item for item in range(10)]


def test_each_call_runs_in_its_own_copy_of_the_context() -> None:
    def call(item: int) -> tuple[str, str]:
        inherited = VARIABLE.get()
        VARIABLE.set(str(item))
        return inherited, VARIABLE.get()

    token = VARIABLE.set("outer")
    results = batch(call)
    VARIABLE.reset(token)

    assert results == [("outer", str(item)) for item in range(10)]


def test_exceptions_are_returned_in_their_places() -> None:
    results = batch(lambda item: 6 // (item - 3), return_exceptions=True)

    assert isinstance(results[3], ZeroDivisionError)
    assert results[4] == 6


def test_first_exception_is_raised_and_what_has_not_begun_never_begins() -> None:
    begun: list[int] = []

    def call(item: int) -> None:
        begun.append(item)
        raise LookupError(item)

    with pytest.raises(LookupError, match="0"):
        batch(call, size=1)

    assert len(begun) < 10


def test_interrupt_inside_a_call_is_raised_even_where_exceptions_are_returned() -> None:
    def call(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        batch(call, return_exceptions=True)


def test_window_slides_and_never_waits_for_a_whole_slice() -> None:
    slow_one, others_done = threading.Event(), threading.Semaphore(0)

    def call(item: int) -> int:
        if item == 0:
            slow_one.wait(30)
        else:
            others_done.release()
        return item

    def release_when_nine_are_done() -> None:
        for _ in range(9):
            others_done.acquire(timeout=30)
        slow_one.set()

    helper = threading.Thread(target=release_when_nine_are_done)
    helper.start()
    results = batch(call, size=2)
    helper.join()

    assert results == list(range(10))


@pytest.mark.parametrize("kind", ["chat", "llm"])
def test_max_concurrency_bounds_the_batch_of_the_engine(fake: FakeDoor, kind: str) -> None:
    model: Any = fake.chat() if kind == "chat" else fake.llm()

    model.batch([f"p{number}" for number in range(20)], {"max_concurrency": 3})
    asyncio.run(model.abatch([f"p{number}" for number in range(20)], {"max_concurrency": 3}))

    assert len(fake.requests) == 40
    assert fake.thread.stats().peak_batch <= 3


@pytest.mark.parametrize("way", ["batch", "abatch", "batch_as_completed"])
@pytest.mark.parametrize("kind", ["chat", "llm"])
def test_over_long_prompt_fails_alone(
    make_fake: Callable[..., FakeDoor], kind: str, way: str
) -> None:
    door = make_fake(max_model_len=60)
    model: Any = door.chat() if kind == "chat" else door.llm(max_tokens=8)
    prompts = ["a", "much too long " * 10, "c"]
    ways: dict[str, Callable[[], list[Any]]] = {
        "batch": lambda: model.batch(prompts, return_exceptions=True),
        "abatch": lambda: asyncio.run(model.abatch(prompts, return_exceptions=True)),
        "batch_as_completed": lambda: [
            result
            for _, result in sorted(
                model.batch_as_completed(prompts, return_exceptions=True), key=lambda p: p[0]
            )
        ],
    }

    first, second, third = ways[way]()

    assert isinstance(second, RequestTooLong)
    assert "60" in str(second)
    assert getattr(first, "text", first) == getattr(third, "text", third) == "Hello."


def test_configs_of_a_batch_belong_to_their_inputs(fake: FakeDoor) -> None:
    configs: Any = [{"tags": ["first"]}, {"tags": ["second"]}]

    fake.chat().batch(["a", "b"], configs)

    found = {
        ("a" if "user\na" in prompt else "b", tag)
        for prompt, request in zip(fake.prompts(), fake.requests, strict=True)
        for tag in request.metadata["tags"]
        if tag in ("first", "second")
    }
    assert found == {("a", "first"), ("b", "second")}


@pytest.mark.parametrize("way", ["batch", "abatch"])
def test_no_inputs_give_no_results(fake: FakeDoor, way: str) -> None:
    for model in (fake.chat(), fake.llm()):
        result = getattr(model, way)([])

        assert (asyncio.run(result) if way == "abatch" else result) == []
        assert list(model.batch_as_completed([])) == []


def test_gather_returns_exceptions_in_their_places() -> None:
    async def call(item: int) -> float:
        return 6 / (item - 3)

    async def gather() -> list[Any]:
        return await dispatch.gather_in_window(call, range(5), size=2, return_exceptions=True)

    results = asyncio.run(gather())

    assert isinstance(results[3], ZeroDivisionError)
    assert results[4] == 6


def test_gather_cancels_and_awaits_the_others_on_the_first_failure() -> None:
    cancelled: list[int] = []

    async def call(item: int) -> None:
        if item == 0:
            raise LookupError(item)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    async def gather() -> None:
        await dispatch.gather_in_window(call, range(4), size=None, return_exceptions=False)

    with pytest.raises(LookupError):
        asyncio.run(gather())

    assert cancelled == [1, 2, 3]
