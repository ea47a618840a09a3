"""An `EngineThread` at the edges of its life: dropped, forked, left open at interpreter exit."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from nanoserve_adapters.engine_thread import EngineThread
from nanoserve_adapters.testing import FakeEngine
from nanoserve_core.errors import EngineDead, RequestFailed
from tests.adapters.forked_child import in_forked_child
from tests.adapters.support import (
    PATIENCE_SECONDS,
    endless_request,
    hashed_tokens,
    new_engine,
    new_request,
    running,
    tokens_in,
)
from tests.house.source_tree import run_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without the cycle collector: what goes, goes by reference counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def engine_threads() -> list[threading.Thread]:
    """The engine threads that run now."""
    return [t for t in threading.enumerate() if t.name == "nanoserve-engine"]


def wait_until_ended(threads: list[threading.Thread]) -> None:
    """Wait for threads that are about to end."""
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), f"{thread.name} goes on"


@pytest.mark.usefixtures("no_collector")
def test_dropped_thread_closes_its_engine_and_ends() -> None:
    engine = new_engine()
    thread = EngineThread(engine)
    tokens_in(thread.stream(new_request()))
    threads = engine_threads()

    del thread

    wait_until_ended(threads)
    assert engine.num_closes == 1


def failed_request(thread: EngineThread) -> None:
    """The request's own stop check raises."""
    with suppress(RequestFailed):
        next(thread.stream(new_request(should_stop=lambda *_: 1 // 0)))


def late_request(thread: EngineThread) -> None:
    """The stream's time is over before it is read."""
    with suppress(TimeoutError):
        tokens_in(thread.stream(endless_request(), timeout_seconds=0))


def late_async_request(thread: EngineThread) -> None:
    """The same in an event loop."""

    async def read() -> None:
        with suppress(TimeoutError):
            async for _ in thread.astream(endless_request(), timeout_seconds=0):
                pass

    asyncio.run(read())


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("provoke", [failed_request, late_request, late_async_request])
def test_error_leaves_no_cycle_that_keeps_the_engine(
    provoke: Callable[[EngineThread], None],
) -> None:
    thread = EngineThread(new_engine())
    threads = engine_threads()
    provoke(thread)

    del thread

    wait_until_ended(threads)


def test_cycle_of_model_engine_and_thread_is_collected_while_idle() -> None:
    class Model:
        thread: EngineThread

    class AdoptingEngine(FakeEngine):
        model: Model

    model, engine = Model(), AdoptingEngine()
    engine.model, model.thread = model, EngineThread(engine)
    threads = engine_threads()
    tokens_in(model.thread.stream(new_request()))
    reference = weakref.ref(model)

    del model, engine
    gc.collect()
    wait_until_ended(threads)  # the thread has closed the engine; now nothing refers to the cycle
    gc.collect()

    assert reference() is None


@pytest.mark.usefixtures("no_collector")
def test_stream_keeps_its_engine_until_it_is_read() -> None:
    engine = new_engine()
    request = new_request(max_tokens=50)

    tokens = tokens_in(EngineThread(engine).stream(request))

    assert tokens == hashed_tokens(request)
    wait_until_ended(engine_threads())


@pytest.mark.usefixtures("no_collector")
def test_dead_engine_lets_go_of_its_thread() -> None:
    def die(step: int) -> None:
        raise MemoryError(step)

    engine = new_engine(before_step=die)
    with EngineThread(engine) as thread, pytest.raises(EngineDead):
        next(thread.stream(new_request()))

    wait_until_ended(engine_threads())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # that it is risky is the point
def test_forked_child_is_told_and_the_parents_engine_goes_on() -> None:
    with running() as thread:
        unread = thread.stream(new_request())
        said = in_forked_child(
            lambda: thread.stream(new_request()),
            lambda: next(unread),
            thread.stats,
            thread.close,
        )

        assert [kind for kind, _ in said] == ["EngineClosed"] * 3 + ["None"]
        assert all(str(os.getpid()) in text and "fork" in text for _, text in said[:3])
        assert tokens_in(thread.stream(request := new_request())) == hashed_tokens(request)
        unread.close()


AT_EXIT = """
import atexit, os, threading
from nanoserve_adapters.engine_thread import EngineThread
from nanoserve_adapters.testing import FakeEngine
from tests.adapters.support import new_request

class Engine(FakeEngine):
    def close(self):
        os.write(1, b"engine closed\\n")  # not print: that writes text and line end apart

def wait(stream):
    try:
        for _ in stream:
            has_begun.set()
    except Exception as error:
        os.write(1, f"{type(error).__name__}\\n".encode())

atexit.register(lambda: waiter.join(10))  # after the engines' own hooks: the last comes first
busy = EngineThread(Engine(max_model_len=10**9, next_token=lambda *_: 1))
idle = EngineThread(Engine())
has_begun = threading.Event()
stream = busy.stream(new_request(max_tokens=10**8))
waiter = threading.Thread(target=wait, args=(stream,), daemon=True)
waiter.start()
has_begun.wait()
"""


def test_interpreter_exit_closes_engines_and_tells_waiting_callers() -> None:
    result = run_python(AT_EXIT)

    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split()) == sorted(["EngineClosed", *("engine", "closed") * 2])
    assert result.stderr == ""
