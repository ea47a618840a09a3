"""`PoolWatch` speaks once, when calls queue for the threads of a default pool, and only then."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.runnables import RunnableLambda

from langchain_llm.pool_watch import PoolWatch, default_pool_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.langchain_llm.doors import FakeDoor

SIZE = default_pool_size()
PROMPTS = [f"p{number}" for number in range(3 * SIZE)]


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "langchain_llm.pool_watch")


def texts_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "langchain_llm.pool_watch"]


def call_in_pool(watch: PoolWatch, num_threads: int, num_calls: int, max_num_seqs: int) -> None:
    """Calls that wait for each other in rounds of `num_threads`, as calls in one batch do."""
    barrier = threading.Barrier(num_threads)

    def one(_: int) -> None:
        with watch.call(max_num_seqs):
            barrier.wait(30)

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(one, range(num_calls)))


def test_calls_that_queue_for_a_default_pool_are_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = PoolWatch()

    for _ in range(3):
        call_in_pool(watch, SIZE, 3 * SIZE, max_num_seqs=256)

    (text,) = texts_of(caplog)
    assert f"all {SIZE} threads" in text
    assert "could run 256" in text
    assert "abatch" in text


@pytest.mark.parametrize(
    ("num_threads", "num_calls", "max_num_seqs"),
    [(SIZE, SIZE, 256), (SIZE, 3 * SIZE, SIZE), (2 * SIZE, 6 * SIZE, 256), (2, 8, 256)],
    ids=["nobody queues", "the engine is no larger", "a larger pool", "a smaller pool"],
)
def test_nothing_is_said_when_the_pool_is_not_what_bounds_the_batch(
    caplog: pytest.LogCaptureFixture, num_threads: int, num_calls: int, max_num_seqs: int
) -> None:
    call_in_pool(PoolWatch(), num_threads, num_calls, max_num_seqs)

    assert not texts_of(caplog)


def test_sync_steps_inside_async_code_are_told_of(
    make_fake: Callable[..., FakeDoor], caplog: pytest.LogCaptureFixture
) -> None:
    door = make_fake("x" * 5, seconds_per_step=0.005)
    chat = door.chat()
    step: Any = RunnableLambda(lambda prompt: chat.invoke(prompt).text)

    answers = asyncio.run(step.abatch(PROMPTS))

    assert answers == ["xxxxx"] * len(PROMPTS)
    assert len(texts_of(caplog)) == 1


@pytest.mark.parametrize("way", ["batch", "abatch"])
def test_batches_of_the_model_itself_are_not(
    fake: FakeDoor, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    result: Any = getattr(fake.chat(), way)(PROMPTS)

    assert len(asyncio.run(result) if way == "abatch" else result) == len(PROMPTS)
    assert not texts_of(caplog)
