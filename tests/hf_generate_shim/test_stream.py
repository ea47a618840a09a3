"""A streamer sees what transformers' loop would show it, though rows run freely."""

from __future__ import annotations

import torch

from hf_generate_shim.criteria import TimeLimit
from hf_generate_shim.results import Results
from hf_generate_shim.stream import LockstepFeed
from hf_generate_shim.task import Task
from nanoserve_core.request import FinishReason
from nanoserve_core.sampling_params import SamplingParams
from tests.hf_generate_shim.test_results import group, token


class Recorder:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        """Record one step."""
        assert (value.dtype, value.device.type, value.ndim) == (torch.int64, "cpu", 1)
        self.steps.append(value.tolist())


def feed(results: Results, time_limit: TimeLimit | None = None) -> tuple[LockstepFeed, Recorder]:
    """A feed with pad id 99 and its recorder."""
    task = Task(rows=(), sampling=SamplingParams(), pad_token_id=99, time_limit=time_limit)
    recorder = Recorder()
    return LockstepFeed(recorder, results, task), recorder


def test_step_is_put_once_all_running_rows_have_it() -> None:
    results = Results(group(a=1, b=1))
    lockstep, recorder = feed(results)

    results.add([token("a", 1), token("a", 2)])
    lockstep.push()
    held = list(recorder.steps)
    results.add([token("b", 5)])
    lockstep.push()

    assert (held, recorder.steps) == ([], [[1, 5]])


def test_ended_rows_send_pads() -> None:
    results = Results(group(a=1, b=1))
    lockstep, recorder = feed(results)

    results.add([token("a", 1, reason=FinishReason.STOP), token("b", 5)])
    results.add([token("b", 6), token("b", 7, reason=FinishReason.LENGTH)])
    lockstep.push()
    lockstep.push()

    assert recorder.steps == [[1, 5], [99, 6], [99, 7]]


def test_nothing_is_put_beyond_a_time_limit() -> None:
    results, limit = Results(group(a=1, b=1)), TimeLimit(0.0, 1.0)
    lockstep, recorder = feed(results, limit)

    results.add([token("b", 5), token("b", 6)])
    limit(0, [1])
    results.add([token("a", 1, reason=FinishReason.STOP)])
    lockstep.push()

    assert recorder.steps == [[1, 5]]
