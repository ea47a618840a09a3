"""Rules edit the scores of their own step, in order."""

from __future__ import annotations

import math

import pytest
import torch

from hf_generate_shim.step_rules import StepRule, StepRules

INF = math.inf
FORCE = StepRule(step=1, token_ids=(0, 2), is_forced=True)
FORBID = StepRule(step=1, token_ids=(2,), is_forced=False)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([FORCE], [0.0, -INF, 0.0]),
        ([FORBID], [1.0, 2.0, -INF]),
        ([FORCE, FORBID], [0.0, -INF, -INF]),
        ([FORBID, FORCE], [0.0, -INF, 0.0]),
    ],
)
def test_rules_apply_at_their_step_in_order(rules: list[StepRule], expected: list[float]) -> None:
    processor = StepRules(rules, num_prompt_tokens=3)

    steps = [
        processor(torch.zeros(1, 3 + step), torch.tensor([[1.0, 2.0, 3.0]])) for step in range(3)
    ]

    untouched = [[1.0, 2.0, 3.0]]
    assert [step.tolist() for step in steps] == [untouched, [expected], untouched]
