"""News of the engine become transformers' outputs."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.generation.continuous_batching.requests import RequestStatus

from hf_generate_shim.criteria import TimeLimit
from hf_generate_shim.open_request import CANCELLED, OpenRequest, RequestForm
from hf_generate_shim.task import CallRequests
from nanoserve_core.request import FinishReason, Logprob, StepOutput


def opened(
    num_rows: int = 1, time_limit: TimeLimit | None = None, **options: Any
) -> OpenRequest:  # Any: fields of the form
    """A request whose rows are the samples of one of the engine's requests."""
    form = RequestForm(request_id="r", prompt_ids=[1, 2], num_rows=num_rows, **options)
    request = OpenRequest(form)
    sources = tuple(("engine", index) for index in range(num_rows))
    request.expect(CallRequests(requests=(), sources=sources), time_limit)
    return request


def news(*token_ids: int, **options: Any) -> StepOutput:  # Any: fields of a StepOutput
    """One step of a sample."""
    return StepOutput(request_id="engine", token_ids=token_ids, **options)


LAST: dict[str, Any] = {"finish_reason": FinishReason.STOP, "request_finished": True}


def test_result_comes_once_at_the_end() -> None:
    request = opened()

    told = [*request.add(news(5)), *request.add(news(6)), *request.add(news(7, **LAST))]

    assert [output.generated_tokens for output in told] == [[5, 6, 7]]
    assert (told[0].request_id, told[0].prompt_ids) == ("r", [1, 2])
    assert told[0].timestamps is None
    assert request.is_over


def test_streamed_outputs_are_copies_that_grow() -> None:
    request = opened(streaming=True)

    told = [*request.add(news(5)), *request.add(news(6, **LAST))]

    assert [output.generated_tokens for output in told] == [[5], [5, 6]]
    assert [output.status for output in told] == [RequestStatus.DECODING, RequestStatus.FINISHED]


def test_rows_end_each_for_itself_and_are_told_once() -> None:
    request = opened(2)

    first = request.add(news(5, index=1, finish_reason=FinishReason.STOP))
    second = request.add(news(6, index=0, finish_reason=FinishReason.LENGTH, request_finished=True))

    assert [output.request_id for output in first] == ["r"]
    assert [output.request_id for output in second] == ["r__child#0"]
    assert second[0].generated_tokens == [6]


def test_failure_ends_every_row_of_the_request() -> None:
    request = opened(2)
    request.add(news(5, index=0))

    told = request.add(
        news(finish_reason=FinishReason.ERROR, error=ZeroDivisionError("x"), request_finished=True)
    )

    assert [output.error for output in told] == ["ZeroDivisionError: x"] * 2
    assert [output.generated_tokens for output in told] == [[5], []]
    assert request.is_over


def test_abort_is_told_as_a_cancellation() -> None:
    told = opened().add(news(finish_reason=FinishReason.ABORT, request_finished=True))

    assert [(output.status, output.error) for output in told] == [(RequestStatus.FAILED, CANCELLED)]


def test_logprobs_are_those_of_the_tokens() -> None:
    entries = {5: Logprob(-0.25, 2), 4: Logprob(-0.125, 1)}

    told = opened().add(news(5, logprobs=(entries,), **LAST))

    assert told[0].logprobs == [-0.25]


def test_timestamps_are_taken_at_each_token() -> None:
    request = opened(record_timestamps=True)
    request.add(news(5))

    told = request.add(news(6, **LAST))

    assert len(told[0].timestamps) == 2
    assert told[0].created_time <= told[0].timestamps[0] <= told[0].timestamps[1]


def test_rows_of_a_call_that_ran_out_of_time_have_the_same_length() -> None:
    limit = TimeLimit(0.0, 1e12)
    request = opened(2, limit)

    early = request.add(news(5, 6, 7, index=0, finish_reason=FinishReason.STOP))
    limit.num_steps = 2
    told = request.add(news(8, 9, index=1, **LAST))

    assert early == []
    assert [output.generated_tokens for output in told] == [[5, 6], [8, 9]]


def test_engine_s_end_fails_what_is_open() -> None:
    request = opened(2)
    request.add(news(5, index=0, finish_reason=FinishReason.STOP))

    told = request.fail("EngineDead: why")

    assert [(output.request_id, output.error) for output in told] == [("r", "EngineDead: why")]


def test_results_of_transformers_own_loop_replace_what_was_streamed() -> None:
    form = RequestForm(request_id="r", prompt_ids=[1], num_rows=2, streaming=True)
    request = OpenRequest(form)

    partial = request.add_tokens([5, 6])
    told = request.finish([[5], [6, 7]], [[-1.0], [-2.0, -3.0]])

    assert [output.generated_tokens for output in partial] == [[5], [6]]
    assert [output.generated_tokens for output in told] == [[5], [6, 7]]
    assert told[1].logprobs == pytest.approx([-2.0, -3.0])
    assert request.is_over
