"""An engine that is held between two steps."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from hf_generate_shim.pause import EnginePause
from hf_generate_shim.turns import Turns
from nanoserve_adapters.engine_thread import EngineThread
from nanoserve_adapters.testing import FakeEngine
from nanoserve_core import Request, SamplingParams
from nanoserve_core.errors import EngineClosed

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")
PATIENCE_SECONDS = 30


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    """An engine without a model."""
    with EngineThread(FakeEngine()) as thread:
        yield thread


def request(request_id: str) -> Request:
    """A request of four tokens."""
    sampling = SamplingParams(max_tokens=4)
    return Request(request_id=request_id, prompt_token_ids=(1, 2), sampling=sampling)


def test_no_token_comes_before_the_last_holder_is_done(thread: EngineThread) -> None:
    pause = EnginePause(Turns())

    with pause.hold(thread, CPU):
        with pause.hold(thread, CPU):
            stream = thread.stream(request("a"))
        finished = threading.Thread(target=lambda: list(stream))
        finished.start()
        came_early = not finished.is_alive()
    finished.join(PATIENCE_SECONDS)

    assert not came_early
    assert not finished.is_alive()


def test_only_the_holder_is_told_that_it_holds(thread: EngineThread) -> None:
    pause = EnginePause(Turns())
    seen: list[bool] = []

    with pause.hold(thread, CPU):
        other = threading.Thread(target=lambda: seen.append(pause.is_own))
        other.start()
        other.join(PATIENCE_SECONDS)
        inside = pause.is_own

    assert (inside, seen, pause.is_own) == (True, [False], False)


def test_turns_do_not_begin_in_a_pause(thread: EngineThread) -> None:
    turns = Turns()
    pause = EnginePause(turns)

    with pause.hold(thread, CPU):
        waiting = turns.submit(lambda: 7)
        has_run = waiting.done()

    assert not has_run
    assert waiting.result(PATIENCE_SECONDS) == 7
    turns.close()


def test_closed_engine_cannot_be_held() -> None:
    turns = Turns()
    thread = EngineThread(FakeEngine())
    thread.close()

    with pytest.raises(EngineClosed), EnginePause(turns).hold(thread, CPU):
        pass

    assert not turns.lock.locked()


def test_engine_can_be_closed_while_it_is_held() -> None:
    pause = EnginePause(Turns())
    thread = EngineThread(FakeEngine())

    with pause.hold(thread, CPU):
        pause.end()
        thread.close(timeout_seconds=PATIENCE_SECONDS)

    assert not thread.is_alive
