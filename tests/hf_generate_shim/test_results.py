"""The sink wakes the caller as seldom as it may; results are sorted by row."""

from __future__ import annotations

import threading

import pytest

from hf_generate_shim.results import CallSink, Results
from hf_generate_shim.task import CallRequests
from nanoserve_core.errors import EngineClosed, RequestFailed
from nanoserve_core.request import FinishReason, Request, StepOutput
from nanoserve_core.sampling_params import SamplingParams

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def group(**samples: int) -> CallRequests:
    """Requests by id with their number of samples; rows in the same order."""
    requests = tuple(
        Request(request_id=name, prompt_token_ids=(1,), sampling=SamplingParams(n=n))
        for name, n in samples.items()
    )
    sources = tuple((name, index) for name, n in samples.items() for index in range(n))
    return CallRequests(requests=requests, sources=sources)


def token(request_id: str, *ids: int, index: int = 0, reason: FinishReason | None = None,
          finished: bool | None = None) -> StepOutput:  # fmt: skip
    """News of one sample; its request ends with it unless said otherwise."""
    return StepOutput(
        request_id=request_id,
        index=index,
        token_ids=ids,
        finish_reason=reason,
        request_finished=reason is not None if finished is None else finished,
    )


def test_sink_hands_over_everything_at_the_end() -> None:
    sink = CallSink(2, every_step=False)

    sink.deliver([token("a", 1), token("b", 2)])
    sink.deliver([token("a", 3, reason=STOP)])
    sink.deliver([token("b", 4, reason=LENGTH)])

    (arrived,) = sink.read()
    assert [output.token_ids for output in arrived] == [(1,), (2,), (3,), (4,)]


def test_sink_for_a_streamer_hands_over_every_step() -> None:
    sink = CallSink(1, every_step=True)

    sink.deliver([token("a", 1)])
    sink.deliver([token("a", 3, reason=STOP)])

    assert [len(arrived) for arrived in sink.read()] == [1, 1]


def test_failure_of_one_request_is_handed_over_at_once() -> None:
    sink = CallSink(2, every_step=False)

    sink.deliver([token("a", reason=FinishReason.ERROR)])

    assert len(next(sink.read())) == 1


def test_end_of_the_engine_is_raised_to_a_waiting_caller() -> None:
    sink = CallSink(1, every_step=False)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            list(sink.read())
        except EngineClosed as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    sink.fail(EngineClosed("closed"))
    thread.join()

    assert len(raised) == 1


def test_rows_take_the_tokens_of_their_sample() -> None:
    results = Results(group(a=2, b=1))

    results.add([token("b", 7), token("a", 1, index=1), token("a", 2, index=0)])

    assert [row.token_ids for row in results.rows] == [[2], [1], [7]]


def test_complete_steps_wait_for_running_rows_only() -> None:
    results = Results(group(a=1, b=1))

    results.add([token("a", 1), token("b", 1)])
    results.add([token("b", 2)])
    before = results.num_complete_steps
    results.add([token("a", reason=STOP)])
    after = results.num_complete_steps
    results.add([token("b", 3, reason=LENGTH)])

    assert (before, after, results.num_complete_steps) == (1, 2, 3)


def test_failed_request_raises_with_its_cause() -> None:
    cause = RuntimeError("the plugin broke")
    output = StepOutput(request_id="a", finish_reason=FinishReason.ERROR, error=cause)

    with pytest.raises(RequestFailed, match="the plugin broke") as caught:
        Results(group(a=1)).add([output])

    assert caught.value.__cause__ is cause


def test_cancelled_request_raises() -> None:
    with pytest.raises(RequestFailed, match="cancelled"):
        Results(group(a=1)).add([token("a", reason=FinishReason.ABORT)])
