"""PromptInputs: steps of prompts, filled up to few shapes."""

from __future__ import annotations

import pytest
import torch

from nanoserve_core.cuda_stream import Uploads
from nanoserve_core.plan import ScheduledSeq, StepPlan
from nanoserve_core.prompt_inputs import PromptInputs, PromptShape, num_prompt_ints
from nanoserve_core.step_inputs import StepInputs
from tests.nanoserve_core.host_device import HostStream

CPU = torch.device("cpu")


def make_inputs(max_num_tokens: int = 3000, max_num_rows: int = 100) -> PromptInputs:
    size = num_prompt_ints(max_num_tokens, max_num_rows)
    uploads = Uploads(HostStream(), 3 * size)
    return PromptInputs(
        max_num_tokens=max_num_tokens, max_num_rows=max_num_rows, uploads=uploads, device=CPU
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "shape"),
    [
        (1, 1, (16, 1)),
        (16, 1, (16, 1)),
        (17, 2, (32, 8)),
        (513, 8, (1024, 8)),
        (1025, 9, (2048, 64)),
        (2049, 65, (3000, 100)),
        (3000, 100, (3000, 100)),
    ],
)
def test_the_smallest_shape_that_holds_a_step_is_taken(
    num_tokens: int, num_rows: int, shape: tuple[int, int]
) -> None:
    assert make_inputs().shape_of(num_tokens, num_rows) == shape


def test_limits_below_the_smallest_shape_are_the_shape() -> None:
    assert make_inputs(5, 1).shape_of(2, 1) == (5, 1)


def test_padding_writes_nothing_belongs_to_nobody_and_samples_for_nobody() -> None:
    host = StepInputs(max_num_seqs=4, max_model_len=64, block_size=4, device=CPU)
    seqs = (
        ScheduledSeq(7, 2, 0, 4, 3, (11, 12, 13), True, (5, 6)),
        ScheduledSeq(8, 0, 0, 0, 2, (21, 22), False, (9,)),
    )
    plan = StepPlan(step_id=0, seqs=seqs, num_decode_seqs=0)
    host.apply(plan)
    step = host.arrays(seqs)
    inputs = make_inputs(16, 4)
    shape = PromptShape(16, 4)

    inputs.send(step, shape)

    given = inputs.tensors(shape)
    assert given.token_ids.tolist() == [11, 12, 13, 21, 22, *[0] * 11]
    assert given.positions.tolist() == [4, 5, 6, 0, 1, *[0] * 11]
    assert given.slot_mapping.tolist() == [24, 25, 26, 36, 37, *[-1] * 11]
    assert given.query_start.tolist() == [0, 3, 5, 5, 5]
    assert given.kv_lens.tolist() == [7, 2, 0, 0]
    assert given.row_slots.tolist() == [2, 0, 0, 0]
    assert given.logits_indices.tolist() == [2, 0, 0, 0]
    assert given.sampled_slots.tolist() == [2, -1, -1, -1]


def test_a_shape_has_the_same_addresses_whatever_was_sent_between() -> None:
    inputs = make_inputs()
    shape = PromptShape(64, 8)
    before = inputs.tensors(shape).kv_lens.data_ptr()

    inputs.tensors(PromptShape(1024, 64))

    assert inputs.tensors(shape).kv_lens.data_ptr() == before
    assert before % 16 == 0
