"""Results become the tensors that transformers returns."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from hf_generate_shim.call import SampleCall
from hf_generate_shim.criteria import TimeLimit
from hf_generate_shim.outputs import assemble
from hf_generate_shim.results import Results
from hf_generate_shim.task import Task
from nanoserve_core.request import FinishReason, StepOutput
from nanoserve_core.sampling_params import SamplingParams
from tests.hf_generate_shim.calls import CACHE
from tests.hf_generate_shim.test_results import group, token

STOP = FinishReason.STOP
IDS = torch.tensor([[0, 5], [6, 7]], dtype=torch.int32)


def call(*, wants_dict: bool = False) -> SampleCall:
    """Two rows of two tokens; a dict brings scores and logits but no cache."""
    config = SimpleNamespace(
        return_dict_in_generate=wants_dict, output_scores=True, output_logits=True, use_cache=False
    )
    return SampleCall(
        model=torch.nn.Module(),
        input_ids=IDS,
        logits_processor=[],
        stopping_criteria=[],
        generation_config=config,
        model_kwargs={},
    )


def task(time_limit: TimeLimit | None = None) -> Task:
    """Pads are 99."""
    return Task(rows=(), sampling=SamplingParams(), pad_token_id=99, time_limit=time_limit)


def test_rows_are_filled_to_the_longest() -> None:
    results = Results(group(a=1, b=1))
    results.add([token("a", 1, 2, 3, reason=STOP), token("b", 4, reason=STOP)])

    output = assemble(call(), task(), results)

    assert output.tolist() == [[0, 5, 1, 2, 3], [6, 7, 4, 99, 99]]
    assert output.dtype == torch.int64


def test_rows_are_cut_where_time_stopped_the_first() -> None:
    results, limit = Results(group(a=1, b=1)), TimeLimit(0.0, 1.0)
    limit(0, [1, 2])
    results.add([token("a", 1, 2, reason=STOP), token("b", 4, 5, 6, reason=STOP)])

    output = assemble(call(), task(limit), results)

    assert output.tolist() == [[0, 5, 1, 2], [6, 7, 4, 5]]


def test_logits_of_steps_are_stacked_and_ended_rows_hold_zeros() -> None:
    results = Results(group(a=1, b=1))
    rows = [torch.full((3,), float(value)) for value in (1, 2, 3)]
    results.add([with_logits("a", 1, rows[0]), with_logits("b", 4, rows[1], STOP)])
    results.add([with_logits("a", 2, rows[2], STOP)])

    output = assemble(call(wants_dict=True), task(), results)

    expected = [[[1.0] * 3, [2.0] * 3], [[3.0] * 3, [0.0] * 3]]
    assert [step.tolist() for step in output.logits] == expected
    assert all(a is b for a, b in zip(output.scores, output.logits, strict=True))
    assert getattr(output, CACHE) is None


def with_logits(
    name: str, token_id: int, row: torch.Tensor, reason: FinishReason | None = None
) -> StepOutput:
    """One token with its row of logits."""
    return StepOutput(
        request_id=name,
        token_ids=(token_id,),
        logits=(row,),
        finish_reason=reason,
        request_finished=reason is not None,
    )
