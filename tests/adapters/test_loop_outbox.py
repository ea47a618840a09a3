"""The outbox: tasks that start together submit in one go, and leave room for the loop's others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from nanoserve_adapters.loop_outbox import MAX_HELD, TURNS_PER_PASS
from nanoserve_adapters.testing import settle
from nanoserve_core.errors import EngineClosed
from tests.adapters.support import hashed_tokens, new_engine, new_request, running, tokens_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanoserve_adapters.engine_thread import EngineThread
    from nanoserve_adapters.sink import Sink
    from nanoserve_core.request import Request


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests each entry in the engine's queue had, for threads made after it."""
    from nanoserve_adapters.engine_thread import EngineThread

    found: list[int] = []
    enqueue = EngineThread.enqueue

    def count(thread: EngineThread, requests: Sequence[Request], sinks: Sequence[Sink]) -> None:
        found.append(len(requests))
        enqueue(thread, requests, sinks)

    monkeypatch.setattr(EngineThread, "enqueue", count)
    return found


async def read(thread: EngineThread, request: Request) -> list[int]:
    await thread.turn()
    return tokens_in([outputs async for outputs in thread.astream(request)])


def test_tasks_that_start_together_submit_in_one_go(sizes: list[int]) -> None:
    requests = [new_request((1, 2, number)) for number in range(50)]

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(read(thread, request) for request in requests))

    with running() as thread:
        found = asyncio.run(all_of_them())

    assert sizes == [50]
    assert found == [hashed_tokens(request) for request in requests]


def test_many_tasks_submit_in_parts_so_that_the_first_do_not_wait_for_the_last(
    sizes: list[int],
) -> None:
    requests = [new_request((1, number)) for number in range(300)]

    async def all_of_them() -> None:
        await asyncio.gather(*(read(thread, request) for request in requests))

    with running() as thread:
        asyncio.run(all_of_them())

    assert sum(sizes) == 300
    assert len(sizes) >= 3
    assert max(sizes) < MAX_HELD + TURNS_PER_PASS


def test_other_callbacks_of_the_loop_run_between_the_turns_of_many_tasks() -> None:
    order: list[str] = []

    async def one(name: str) -> None:
        await thread.turn()
        order.append(name)

    async def heartbeat() -> None:
        for _ in range(12):
            order.append("beat")
            await asyncio.sleep(0)

    async def all_of_them() -> None:
        await asyncio.gather(*(one(f"task {number}") for number in range(64)), heartbeat())

    with running() as thread:
        asyncio.run(all_of_them())

    tasks = [name for name in order if name != "beat"]
    runs = "".join("b" if name == "beat" else "t" for name in order).split("b")
    assert tasks == [f"task {number}" for number in range(64)]
    assert max(map(len, runs)) <= 2 * TURNS_PER_PASS


def test_task_that_is_cancelled_while_it_waits_for_its_turn_holds_nobody_up() -> None:
    done: list[int] = []

    async def one(number: int) -> None:
        await thread.turn()
        done.append(number)

    async def all_of_them() -> None:
        tasks = [asyncio.ensure_future(one(number)) for number in range(40)]
        await asyncio.sleep(0)
        for task in tasks[TURNS_PER_PASS:36]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with running() as thread:
        asyncio.run(all_of_them())

    assert done == [*range(TURNS_PER_PASS), *range(36, 40)]


def test_request_whose_reader_leaves_in_the_same_pass_never_runs() -> None:
    engine = new_engine()

    async def leave_at_once() -> None:
        thread.astream(new_request()).close()
        stayed = thread.astream(new_request())
        assert [outputs async for outputs in stayed]

    with running(engine) as thread:
        asyncio.run(leave_at_once())

    assert len(engine.requests) == 1


def test_engine_that_ends_before_the_submission_is_told_to_the_reader() -> None:
    async def close_in_between() -> None:
        stream = thread.astream(new_request())
        thread.close()
        with pytest.raises(EngineClosed):
            await anext(stream)

    with running() as thread:
        asyncio.run(close_in_between())


def test_engine_that_has_ended_is_told_to_the_caller() -> None:
    async def call() -> None:
        with pytest.raises(EngineClosed):
            thread.astream(new_request())

    with running() as thread:
        thread.close()
        asyncio.run(call())


def test_bad_request_is_refused_in_the_call_and_others_go_on() -> None:
    async def call() -> list[int]:
        with pytest.raises(ValueError, match="vocabulary"):
            thread.astream(new_request((10**6,)))
        return await read(thread, good)

    good = new_request()
    with running() as thread:
        found = asyncio.run(call())
        settle(thread)

    assert found == hashed_tokens(good)


def test_two_loops_have_outboxes_of_their_own(sizes: list[int]) -> None:
    async def three() -> None:
        await asyncio.gather(*(read(thread, new_request()) for _ in range(3)))

    with running() as thread:
        asyncio.run(three())
        asyncio.run(three())

    assert sizes == [3, 3]
