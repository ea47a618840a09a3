"""`EngineThread`: who is served when, who is told what, and how it ends."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from nanoserve_adapters.engine_thread import EngineThread
from nanoserve_adapters.testing import AdmissionGate, FakeEngine, settle
from nanoserve_core.errors import (
    EngineClosed,
    EngineDead,
    InvalidRequest,
    PluginError,
    RequestFailed,
    RequestTooLong,
)
from nanoserve_core.request import FinishReason
from tests.adapters.support import (
    Hold,
    RecordingSink,
    endless_request,
    hashed_tokens,
    new_engine,
    new_request,
    run_threads,
    running,
    tokens_in,
)

if TYPE_CHECKING:
    from nanoserve_core.request import Request, StepOutput


def test_sink_gets_one_delivery_per_step_with_all_its_requests() -> None:
    sink = RecordingSink()
    requests = [new_request((i,), max_tokens=3) for i in range(5)]

    with running() as thread:
        thread.submit_many(requests, [sink] * 5)
        settle(thread)

    assert [len(outputs) for outputs in sink.deliveries] == [5, 5, 5]


def test_sink_is_called_on_the_engine_thread_only() -> None:
    sink = RecordingSink()

    with running() as thread:
        thread.submit(new_request(), sink)
        sink.wait()

    assert [t.name for t in sink.threads] == ["nanoserve-engine"]


def test_bad_request_raises_in_the_caller_and_is_not_queued() -> None:
    engine = FakeEngine(max_model_len=16)

    with running(engine) as thread, pytest.raises(RequestTooLong, match="40"):
        thread.submit(new_request(range(40)), RecordingSink())

    assert engine.requests == []


def test_one_bad_request_of_many_queues_none() -> None:
    engine = new_engine()
    bad = new_request((10**9,))

    with running(engine) as thread, pytest.raises(InvalidRequest):
        thread.submit_many([new_request(), bad], [RecordingSink(), RecordingSink()])

    assert engine.requests == []


def test_requests_submitted_together_are_admitted_before_the_next_step() -> None:
    engine = new_engine(before_step=(hold := Hold(at_step=2)))
    with running(engine) as thread:
        first = thread.stream(new_request(max_tokens=9))
        hold.wait()

        streams = thread.stream_many([new_request(max_tokens=2) for _ in range(20)])

        hold.release()
        assert [len(tokens_in(stream)) for stream in (first, *streams)] == [9] + [2] * 20
    assert engine.batch_sizes == [1, 1, 21, 21, 1, 1, 1, 1, 1]


def test_idle_engine_makes_no_step() -> None:
    engine = new_engine()

    with running(engine) as thread:
        tokens_in(thread.stream(new_request(max_tokens=3)))
        tokens_in(thread.stream(new_request(max_tokens=4)))

    assert len(engine.batch_sizes) == 7


def test_callers_of_many_threads_are_served_in_one_batch() -> None:
    engine = new_engine()
    requests = [new_request((i, 7), max_tokens=5) for i in range(8)]

    with running(engine) as thread, ThreadPoolExecutor(8) as pool:
        with AdmissionGate(thread, 8):
            calls = [pool.submit(lambda r: tokens_in(thread.stream(r)), r) for r in requests]
        tokens = [call.result() for call in calls]

    assert tokens == [hashed_tokens(request) for request in requests]
    assert engine.batch_sizes == [8] * 5


def test_request_id_in_use_is_refused_and_the_first_goes_on() -> None:
    with running(before_step=(hold := Hold(at_step=2))) as thread:
        first = thread.stream(request := new_request(request_id="same"))
        hold.wait()
        second = RecordingSink()

        thread.submit(new_request(request_id="same"), second)

        hold.release()
        assert tokens_in(first) == hashed_tokens(request)
    assert isinstance(second.deliveries[0][0].error, InvalidRequest)


def test_request_that_the_engine_refuses_fails_alone() -> None:
    class Refusing(FakeEngine):
        def add_request(self, request: Request) -> None:
            if request.request_id == "unwanted":
                raise PluginError("not today")
            super().add_request(request)

    with running(Refusing()) as thread:
        good, bad = new_request(), new_request(request_id="unwanted")
        served, refused = thread.stream_many([good, bad])

        with pytest.raises(RequestFailed, match="unwanted") as failed:
            next(refused)

        assert isinstance(failed.value.__cause__, PluginError)
        assert tokens_in(served) == hashed_tokens(good)


def test_cancelled_request_ends_with_abort_and_others_go_on() -> None:
    with running(before_step=(hold := Hold(at_step=3))) as thread:
        sink = RecordingSink()
        thread.submit(cancelled := endless_request(), sink)
        other = thread.stream(request := new_request())
        hold.wait()

        thread.cancel(cancelled.request_id)

        hold.release()
        assert tokens_in(other) == hashed_tokens(request)
    assert sink.reasons == [FinishReason.ABORT]


def test_request_cancelled_before_admission_gets_no_token() -> None:
    with running() as thread:
        sink = RecordingSink()
        with AdmissionGate(thread, 1):
            thread.submit(request := new_request(), sink)
            thread.cancel(request.request_id)
        sink.wait()

    assert tokens_in(sink.deliveries) == []
    assert sink.reasons == [FinishReason.ABORT]


def test_cancel_is_idempotent_and_ignores_unknown_and_finished_ids() -> None:
    with running() as thread:
        tokens_in(thread.stream(done := new_request()))
        thread.submit(request := endless_request(), sink := RecordingSink())

        for request_id in (request.request_id, request.request_id, done.request_id, "unknown"):
            thread.cancel(request_id)

        sink.wait()
        assert thread.stats().finished_requests == {"length": 1, "abort": 1}


@pytest.mark.parametrize("broken", ["deliver", "wake"])
def test_sink_that_raises_loses_its_requests_and_nobody_elses(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenSink(RecordingSink):
        def deliver(self, outputs: list[StepOutput]) -> BrokenSink:
            super().deliver(outputs)
            if broken == "deliver":
                raise OSError("disk full")
            return self

        def wake(self) -> None:
            raise OSError("nobody is at home")

    with running() as thread:
        sink = BrokenSink()
        request = new_request()

        with AdmissionGate(thread, 3):
            thread.submit_many([endless_request(), endless_request()], [sink, sink])
            stream = thread.stream(request)

        assert tokens_in(stream) == hashed_tokens(request)
        settle(thread)
        assert thread.stats().finished_requests == {"abort": 2, "length": 1}
    assert len(sink.deliveries) == 1
    assert ("disk full" in caplog.text) == (broken == "deliver")


def test_call_runs_between_steps_on_the_engine_thread() -> None:
    def look(engine: FakeEngine) -> tuple[FakeEngine, str]:
        return engine, threading.current_thread().name

    engine = new_engine()
    with running(engine) as thread:
        result = thread.call(look)

    assert result == (engine, "nanoserve-engine")


def test_call_raises_what_the_function_raises_and_the_engine_goes_on() -> None:
    with running() as thread:
        with pytest.raises(ZeroDivisionError):
            thread.call(lambda _: 1 // 0)

        assert tokens_in(thread.stream(request := new_request())) == hashed_tokens(request)


def test_call_from_the_engine_thread_runs_at_once() -> None:
    with running() as thread:
        steps = thread.call(lambda engine: thread.call(lambda same: same is engine))

    assert steps is True


def test_dead_engine_fails_every_waiting_caller_with_the_cause() -> None:
    def die(step: int) -> None:
        if step == 3:
            raise MemoryError("out of blocks")

    engine = new_engine(before_step=die)
    with running(engine) as thread, ThreadPoolExecutor(5) as pool:
        with AdmissionGate(thread, 4):
            waiting = [
                pool.submit(lambda: tokens_in(thread.stream(new_request()))) for _ in range(4)
            ]
        errors = [call.exception() for call in waiting]

        assert [type(error) for error in errors] == [EngineDead] * 4
        assert len(set(map(id, errors))) == 4, "callers must not share one exception's traceback"
        assert {repr(error.__cause__) for error in errors} == {"MemoryError('out of blocks')"}
        for late in (thread.stats, lambda: thread.stream(new_request())):
            with pytest.raises(EngineDead, match="out of blocks"):
                late()
        assert not thread.is_alive
    assert engine.num_closes == 1


def test_actions_queued_when_the_engine_dies_fail_too() -> None:
    hold = Hold(at_step=1)

    def die(step: int) -> None:
        hold(step)
        raise MemoryError("out of blocks")

    with running(before_step=die) as thread, ThreadPoolExecutor(1) as pool:
        first = thread.stream(new_request())
        hold.wait()
        queued = thread.stream(new_request())
        call = pool.submit(thread.stats)

        hold.release()

        for wait in (lambda: next(first), lambda: next(queued), call.result):
            with pytest.raises(EngineDead):
                wait()


def test_engine_that_loses_a_request_dies_instead_of_hanging() -> None:
    class Forgetful(FakeEngine):
        def step(self) -> list[StepOutput]:
            super().step()
            self._samples.clear()
            return []

    with running(Forgetful()) as thread, pytest.raises(EngineDead, match="lost"):
        next(thread.stream(new_request()))


def test_close_fails_waiting_callers_and_closes_the_engine_on_its_thread() -> None:
    closed_on: list[str] = []

    class Engine(FakeEngine):
        def close(self) -> None:
            super().close()
            closed_on.append(threading.current_thread().name)

    engine = Engine(before_step=(hold := Hold(at_step=2)), max_model_len=10**9)
    with ThreadPoolExecutor(3) as pool:
        thread = EngineThread(engine)
        waiting = [pool.submit(tokens_in, thread.stream(endless_request())) for _ in range(2)]
        hold.wait()
        closing = pool.submit(thread.close)
        hold.release()

        assert [type(call.exception()) for call in waiting] == [EngineClosed] * 2
        assert closing.result() is None
    assert closed_on == ["nanoserve-engine"]


def test_closed_thread_refuses_every_call_and_closes_again_for_nothing() -> None:
    engine = new_engine()
    thread = EngineThread(engine)
    unread = thread.stream(endless_request())

    run_threads(*[threading.Thread(target=thread.close, name=f"closer {i}") for i in range(4)])

    for call in (thread.stats, lambda: thread.stream(new_request()), lambda: list(unread)):
        with pytest.raises(EngineClosed, match="closed"):
            call()
    thread.cancel("anything")
    assert engine.num_closes == 1
    assert not thread.is_alive


def test_close_on_the_engine_thread_does_not_wait_for_itself() -> None:
    engine = new_engine()
    thread = EngineThread(engine)

    thread.call(lambda _: thread.close())

    thread.close()
    assert engine.num_closes == 1


def test_close_raises_what_closing_the_engine_raised_once() -> None:
    class Stubborn(FakeEngine):
        def close(self) -> None:
            raise OSError("device is busy")

    thread = EngineThread(Stubborn())

    with pytest.raises(OSError, match="busy"):
        thread.close()

    thread.close()
