"""Streams: what a reader gets, what ends it, and that leaving it early frees the engine."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from nanoserve_adapters.testing import AdmissionGate, FakeEngine, scripted, settle
from nanoserve_core.errors import EngineClosed, EngineDead, RequestFailed
from nanoserve_core.request import FinishReason
from tests.adapters.support import (
    PATIENCE_SECONDS,
    Hold,
    endless_request,
    hashed_tokens,
    new_engine,
    new_request,
    running,
    tokens_in,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanoserve_adapters.engine_thread import EngineThread
    from nanoserve_adapters.streams import AsyncRequestStream


def fail_at(num_tokens: int) -> Callable[[int, list[int]], bool]:
    """A stop check that raises at a token."""

    def check(index: int, token_ids: list[int]) -> bool:
        if len(token_ids) == num_tokens:
            raise LookupError(f"bad token of sample {index}")
        return False

    return check


def num_aborted(thread: EngineThread) -> int:
    """Requests that ended with reason abort, once the engine has come to rest."""
    settle(thread)
    return thread.stats().finished_requests.get("abort", 0)


def test_reader_gets_everything_that_waited_at_once() -> None:
    with running() as thread:
        stream = thread.stream(request := new_request(max_tokens=20))
        settle(thread)

        pieces = list(stream)

    assert len(pieces) == 1
    assert tokens_in(pieces) == hashed_tokens(request)


def test_all_samples_of_a_request_come_out_of_its_stream() -> None:
    with running() as thread:
        pieces = list(thread.stream(new_request(max_tokens=4, n=3)))

    outputs = [output for piece in pieces for output in piece]
    assert sorted(output.index for output in outputs) == sorted([0, 1, 2] * 4)
    assert [output.request_finished for output in outputs].count(True) == 1


def test_stream_over_several_requests_ends_with_the_last() -> None:
    requests = [new_request((i,), max_tokens=2 + i) for i in range(4)]

    with running() as thread:
        outputs = [output for piece in thread.stream(*requests) for output in piece]

    for request in requests:
        own = [output for output in outputs if output.request_id == request.request_id]
        assert tokens_in([own]) == hashed_tokens(request)


def test_tokens_before_an_error_come_first() -> None:
    with running() as thread:
        stream = thread.stream(request := new_request(should_stop=fail_at(4)))
        settle(thread)

        tokens = tokens_in([next(stream)])
        with pytest.raises(RequestFailed, match=request.request_id) as failed:
            next(stream)

        assert tokens == hashed_tokens(request)[:3]
        assert isinstance(failed.value.__cause__, LookupError)
        assert list(stream) == []


def test_error_of_one_request_cancels_the_others_of_its_stream_only() -> None:
    with running() as thread:
        bad = new_request(should_stop=fail_at(1))
        with AdmissionGate(thread, 3):
            stream = thread.stream(endless_request(), bad)
            other = thread.stream(request := new_request(max_tokens=30))

        with pytest.raises(RequestFailed):
            tokens_in(stream)

        assert tokens_in(other) == hashed_tokens(request)
        assert num_aborted(thread) == 1


def test_late_request_raises_timeout_and_is_cancelled() -> None:
    with running(before_step=(hold := Hold(at_step=1))) as thread:
        stream = thread.stream(endless_request(), timeout_seconds=0.01)

        with pytest.raises(TimeoutError, match=r"0\.01"):
            next(stream)

        hold.release()
        assert num_aborted(thread) == 1


def test_request_that_ended_in_time_may_be_read_late() -> None:
    with running() as thread:
        stream = thread.stream(request := new_request(), timeout_seconds=0)
        settle(thread)

        assert tokens_in(stream) == hashed_tokens(request)


def test_interrupt_in_the_wait_cancels_the_request() -> None:
    hold = Hold(at_step=3)

    def interrupt(step: int) -> None:
        if step == hold.at_step:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        hold(step)

    with running(before_step=interrupt) as thread:
        stream = thread.stream(endless_request())

        with pytest.raises(KeyboardInterrupt):
            tokens_in(stream)

        hold.release()
        assert num_aborted(thread) == 1


def test_closed_stream_ends_and_cancels() -> None:
    with running() as thread:
        with thread.stream(endless_request()) as stream:
            next(stream)
        stream.close()

        assert list(stream) == []
        assert num_aborted(thread) == 1


def test_dropped_stream_cancels() -> None:
    with running() as thread:
        stream = thread.stream(endless_request())
        next(stream)

        del stream

        assert num_aborted(thread) == 1


def test_stream_closed_by_another_thread_wakes_its_reader() -> None:
    with running(before_step=(hold := Hold(at_step=1))) as thread:
        stream = thread.stream(endless_request())
        reader = threading.Thread(target=tokens_in, args=(stream,))
        reader.start()
        hold.wait()

        stream.close()

        hold.release()
        run_threads_to_end(reader)


def run_threads_to_end(*threads: threading.Thread) -> None:
    """Join threads that were started."""
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def test_cancelled_request_ends_its_stream_with_abort() -> None:
    with running() as thread:
        stream = thread.stream(request := endless_request())

        thread.cancel(request.request_id)

        assert [piece[-1].finish_reason for piece in stream][-1] is FinishReason.ABORT


def test_unsubmitted_request_is_not_cancelled() -> None:
    with running() as thread:
        stream = thread.stream(request := endless_request())

        with pytest.raises(ValueError, match="vocabulary"):
            thread.stream(new_request((10**9,), request_id=request.request_id))

        assert next(stream)
        stream.close()


async def test_sync_stream_works_in_a_thread_that_runs_an_event_loop() -> None:
    with running() as thread:
        tokens = tokens_in(thread.stream(request := new_request()))

    assert tokens == hashed_tokens(request)


async def read(stream: AsyncRequestStream) -> list[int]:
    """All tokens of an async stream."""
    return tokens_in([outputs async for outputs in stream])


async def test_async_streams_give_the_tokens_of_sync_ones() -> None:
    requests = [new_request((i,), max_tokens=6) for i in range(10)]

    with running() as thread:
        streams = thread.astream_many(requests)
        tokens = await asyncio.gather(*map(read, streams))

    assert tokens == [hashed_tokens(request) for request in requests]


async def test_one_async_stream_serves_several_requests() -> None:
    requests = [new_request((i,), max_tokens=6) for i in range(3)]

    with running() as thread:
        tokens = await read(thread.astream(*requests))

    assert sorted(tokens) == sorted(t for request in requests for t in hashed_tokens(request))


def test_each_loop_is_called_at_most_once_per_step() -> None:
    engine = new_engine()
    calls: list[int] = []

    async def read_many(thread: EngineThread) -> None:
        loop, num_calls = asyncio.get_running_loop(), 0
        call_soon_threadsafe = loop.call_soon_threadsafe

        def count(*args: object) -> asyncio.Handle:
            nonlocal num_calls
            num_calls += threading.current_thread().name == "nanoserve-engine"
            return call_soon_threadsafe(*args)

        loop.call_soon_threadsafe = count
        requests = [new_request((i,), max_tokens=12) for i in range(100)]
        tokens = await asyncio.gather(*map(read, map(thread.astream, requests)))
        assert tokens == [hashed_tokens(request) for request in requests]
        calls.append(num_calls)

    with running(engine) as thread:
        loops = [lambda: asyncio.run(read_many(thread)) for _ in range(3)]
        with AdmissionGate(thread, 300):
            threads = [threading.Thread(target=loop) for loop in loops]
            for loop in threads:
                loop.start()
        run_threads_to_end(*threads)

    assert engine.batch_sizes == [300] * 12
    assert all(1 <= num_calls <= 12 for num_calls in calls)
    assert len(calls) == 3


async def test_cancelled_task_frees_its_request_and_no_other() -> None:
    with running() as thread:
        task = asyncio.create_task(read(thread.astream(endless_request())))
        other = thread.astream(request := new_request(max_tokens=30))
        await anext(other)

        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task
        await read(other)
        assert num_aborted(thread) == 1
        assert thread.stats().finished_requests["length"] == 1
        assert request.request_id not in str(task)


async def test_closed_async_stream_ends_and_cancels() -> None:
    with running() as thread:
        async with thread.astream(endless_request()) as stream:
            await anext(stream)
        await stream.aclose()

        assert await read(stream) == []
        assert num_aborted(thread) == 1


async def test_dropped_async_stream_cancels() -> None:
    with running() as thread:
        stream = thread.astream(endless_request())
        await anext(stream)

        del stream

        assert num_aborted(thread) == 1


def test_streams_of_a_closed_loop_are_cancelled() -> None:
    async def begin(thread: EngineThread) -> AsyncRequestStream:
        stream = thread.astream(endless_request())
        await anext(stream)
        return stream

    with running() as thread:
        stream = asyncio.run(begin(thread))

        assert num_aborted(thread) == 1
        assert stream is not None


async def test_late_async_request_raises_timeout_and_is_cancelled() -> None:
    with running(before_step=(hold := Hold(at_step=1))) as thread:
        stream = thread.astream(endless_request(), timeout_seconds=0.01)

        with pytest.raises(TimeoutError, match=r"0\.01"):
            await read(stream)

        hold.release()
        assert num_aborted(thread) == 1


async def test_async_request_in_time_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timers = asyncio.get_running_loop(), []
    call_later = loop.call_later
    monkeypatch.setattr(loop, "call_later", lambda *a: timers.append(call_later(*a)) or timers[-1])

    with running() as thread:
        stream = thread.astream(request := new_request(), timeout_seconds=3600)

        assert await read(stream) == hashed_tokens(request)

    assert [timer.cancelled() for timer in timers] == [True]


async def test_async_error_names_the_cause() -> None:
    with running() as thread, pytest.raises(RequestFailed) as failed:
        await read(thread.astream(new_request(should_stop=fail_at(2))))

    assert isinstance(failed.value.__cause__, LookupError)


async def test_ended_engine_wakes_async_readers() -> None:
    def die(step: int) -> None:
        raise MemoryError(step)

    with running(before_step=die) as thread, pytest.raises(EngineDead):
        await read(thread.astream(new_request()))
    with running(before_step=(hold := Hold(at_step=1))) as thread:
        reader = asyncio.create_task(read(thread.astream(endless_request())))
        await asyncio.to_thread(hold.wait)
        hold.release()
        await asyncio.to_thread(thread.close)

        with pytest.raises(EngineClosed):
            await reader


async def test_second_reader_and_foreign_loop_are_refused() -> None:
    with running(before_step=(hold := Hold(at_step=1))) as thread:
        stream = thread.astream(new_request())
        first = asyncio.create_task(read(stream))
        await asyncio.sleep(0)

        for second in (anext(stream), asyncio.to_thread(asyncio.run, read(stream))):
            with pytest.raises(RuntimeError, match="one reader"):
                await second

        hold.release()
        await first
        assert num_aborted(thread) <= 1


def test_astream_without_an_event_loop_is_refused() -> None:
    with running() as thread, pytest.raises(RuntimeError, match="no running event loop"):
        thread.astream(new_request())


def test_scripted_engine_follows_its_script() -> None:
    engine = FakeEngine(next_token=scripted([5, 6, 7], then=0), eos_token_ids=(0,))

    with running(engine) as thread:
        pieces = list(thread.stream(new_request(max_tokens=30)))

    assert tokens_in(pieces) == [5, 6, 7, 0]
    assert pieces[-1][-1].finish_reason is FinishReason.STOP
