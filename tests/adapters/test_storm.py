"""Many readers, threads and event loops at once, some of which leave: nothing is lost or left."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from nanoserve_adapters.engine_thread import EngineThread
from nanoserve_adapters.testing import FakeEngine, leak_check, settle
from nanoserve_core.config import EngineConfig
from nanoserve_core.errors import EngineClosed
from tests.adapters.support import (
    PATIENCE_SECONDS,
    hashed_tokens,
    new_request,
    run_threads,
    running,
    tokens_in,
)

if TYPE_CHECKING:
    from nanoserve_core.request import Request, StepOutput

NUM_THREADS, NUM_LOOPS = 8, 3
STREAMS_OF_EACH_THREAD, STREAMS_OF_EACH_LOOP = 13, 32  # 8 * 13 + 3 * 32 = 200

WAYS_TO_LEAVE = ("read", "close", "drop", "cancel by id", "timeout")


class Reader:
    """One stream's life, drawn from a seed: how many pieces it reads and how it leaves."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.way = draw.choice(WAYS_TO_LEAVE)
        self.num_pieces = draw.randrange(3)
        self.request: Request = new_request((seed % 256, 5), max_tokens=draw.randrange(1, 40))
        self.pieces: list[list[StepOutput]] = []
        self.timeout_seconds = 0 if self.way == "timeout" else None

    def read_in_thread(self, thread: EngineThread) -> None:
        """Read the stream in this thread."""
        stream = thread.stream(self.request, timeout_seconds=self.timeout_seconds)
        try:
            for outputs in stream:
                self.pieces.append(outputs)
                if self.leaves(thread):
                    break
        except TimeoutError:
            assert self.way == "timeout"
        if self.way == "close":
            stream.close()

    async def read_in_loop(self, thread: EngineThread) -> None:
        """Read the stream in this event loop."""
        stream = thread.astream(self.request, timeout_seconds=self.timeout_seconds)
        try:
            async for outputs in stream:
                self.pieces.append(outputs)
                if self.leaves(thread):
                    break
        except TimeoutError:
            assert self.way == "timeout"
        if self.way == "close":
            await stream.aclose()

    def leaves(self, thread: EngineThread) -> bool:
        """Whether to stop reading now."""
        if len(self.pieces) <= self.num_pieces or self.way == "read":
            return False
        if self.way == "cancel by id":
            thread.cancel(self.request.request_id)
            return False
        return True

    def check(self) -> None:
        """All tokens for who stayed, the first ones for who left; in order, none twice."""
        tokens, expected = tokens_in(self.pieces), hashed_tokens(self.request)
        assert tokens == expected[: len(tokens)]
        if self.way == "read":
            assert tokens == expected


@pytest.mark.parametrize("seed", range(3))
def test_storm_of_streams_leaves_nothing_running_and_loses_nothing(seed: int) -> None:
    readers = [Reader(1000 * seed + number) for number in range(200)]
    threads, loops = divide(readers)

    with running(FakeEngine(config=EngineConfig(max_num_seqs=24))) as thread:
        run_threads(
            *[threading.Thread(target=read_all, args=(thread, own)) for own in threads],
            *[
                threading.Thread(target=asyncio.run, args=(read_all_in_loop(thread, own),))
                for own in loops
            ],
        )
        settle(thread)
        thread.call(leak_check)

        assert sum(thread.stats().finished_requests.values()) == 200
    for reader in readers:
        reader.check()


def divide(readers: list[Reader]) -> tuple[list[list[Reader]], list[list[Reader]]]:
    """The readers of each thread and of each loop."""
    waiting = iter(readers)
    threads = [[next(waiting) for _ in range(STREAMS_OF_EACH_THREAD)] for _ in range(NUM_THREADS)]
    return threads, [[next(waiting) for _ in range(STREAMS_OF_EACH_LOOP)] for _ in range(NUM_LOOPS)]


def read_all(thread: EngineThread, readers: list[Reader]) -> None:
    """One after the other, as a thread does."""
    for reader in readers:
        reader.read_in_thread(thread)


async def read_all_in_loop(thread: EngineThread, readers: list[Reader]) -> None:
    """All at once, as a loop does; every fifth task is cancelled by its owner."""
    tasks = [asyncio.create_task(reader.read_in_loop(thread)) for reader in readers]
    for reader, task in list(zip(readers, tasks, strict=True))[::5]:
        await asyncio.sleep(0)
        task.cancel()
        reader.way = "cancelled"
    await asyncio.gather(*tasks, return_exceptions=True)


def test_close_in_the_middle_of_a_storm_ends_every_reader() -> None:
    engine = FakeEngine(config=EngineConfig(max_num_seqs=24), max_model_len=10**9)
    with running(engine) as thread, ThreadPoolExecutor(8) as pool:
        begun = threading.Barrier(9)

        def read_endlessly() -> None:
            stream = thread.stream(*[new_request(max_tokens=10**7) for _ in range(3)])
            next(stream)
            begun.wait()
            for _ in stream:
                pass

        readers = [pool.submit(read_endlessly) for _ in range(8)]
        begun.wait()

        thread.close()

        assert {type(reader.exception()).__name__ for reader in readers} == {"EngineClosed"}


def test_submit_that_races_with_the_end_is_answered() -> None:
    for _ in range(50):
        thread = EngineThread(FakeEngine())
        start = threading.Barrier(4)

        def submit(thread: EngineThread, start: threading.Barrier) -> list[int] | None:
            start.wait()
            try:
                return tokens_in(thread.stream(new_request()))
            except EngineClosed:
                return None

        with ThreadPoolExecutor(3) as pool:
            callers = [pool.submit(submit, thread, start) for _ in range(3)]
            start.wait()
            thread.close()
            answers = [caller.result(PATIENCE_SECONDS) for caller in callers]

        assert all(answer is None or len(answer) == 8 for answer in answers)
