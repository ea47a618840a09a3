"""From plans to tensors: slots by arithmetic, tables by deltas, tokens from two places."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from nanoserve_core.plan import ScheduledSeq, SlotAssignment, StepPlan
from nanoserve_core.request import Request
from nanoserve_core.sampling_params import SamplingParams
from nanoserve_core.step_inputs import StepInputs

if TYPE_CHECKING:
    from nanoserve_core.step_inputs import StepBatch

REQUEST = Request(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams())
LAST_TOKENS = torch.tensor([100, 101, 102, 103])


def test_slot_is_block_times_size_plus_offset() -> None:
    inputs = new_inputs(block_size=4)

    batch = run(inputs, row(0, start=0, token_ids=range(10), new_block_ids=(7, 2, 5)))

    forward = batch.forward
    assert forward.slot_mapping.tolist() == [28, 29, 30, 31, 8, 9, 10, 11, 20, 21]
    assert forward.positions.tolist() == list(range(10))
    assert forward.token_ids.tolist() == list(range(10))
    assert forward.kv_lens.tolist() == [10]
    assert forward.query_start.tolist() == [0, 10]
    assert forward.block_tables.tolist() == [[7, 2, 5]]
    assert forward.logits_indices.tolist() == [9]
    assert batch.sampled_slots.tolist() == [0]
    assert batch.sampled_positions.tolist() == [10]


def test_block_table_grows_by_what_the_plans_add() -> None:
    inputs = new_inputs(block_size=2)
    run(inputs, row(1, start=0, token_ids=(5, 6, 7), new_block_ids=(3, 9)))

    same_block = run(inputs, row(1, start=3), num_decode=1)
    new_block = run(inputs, row(1, start=4, new_block_ids=(0,)), num_decode=1)

    assert same_block.forward.slot_mapping.tolist() == [19]
    assert new_block.forward.slot_mapping.tolist() == [0]
    assert new_block.forward.block_tables.tolist() == [[3, 9, 0]]


@pytest.mark.parametrize("is_released", [True, False])
def test_table_begins_anew_with_the_slots_next_tenant(is_released: bool) -> None:
    inputs = new_inputs(block_size=2)
    run(inputs, row(1, start=0, token_ids=(5, 6, 7), new_block_ids=(3, 9)))

    batch = run(
        inputs,
        row(1, start=0, token_ids=(8,), new_block_ids=(4,)),
        assigned=(1,),
        released=(1,) if is_released else (),
    )

    assert batch.forward.slot_mapping.tolist() == [8]
    assert inputs.live_block_ids().tolist() == [4]


def test_released_slot_has_no_live_blocks() -> None:
    inputs = new_inputs()
    run(inputs, row(0, start=0, token_ids=(1,), new_block_ids=(3,)))
    run(inputs, row(2, start=0, token_ids=(1,), new_block_ids=(3, 1)))
    before = inputs.live_block_ids().tolist()

    inputs.apply(StepPlan(step_id=9, seqs=(), num_decode_seqs=0, released=(2,)))

    assert before == [1, 3]
    assert inputs.live_block_ids().tolist() == [3]


def test_decode_rows_take_the_slots_last_tokens() -> None:
    inputs = new_inputs()
    for slot in (0, 2, 3):
        run(inputs, row(slot, start=0, token_ids=(1, 2), new_block_ids=(slot,)))

    batch = run(inputs, row(3, start=2), row(0, start=2), num_decode=2)

    assert batch.forward.token_ids.tolist() == [103, 100]
    assert batch.forward.positions.tolist() == [2, 2]
    assert batch.sampled_slots.tolist() == [3, 0]


def test_known_and_unknown_tokens_mix_in_a_step() -> None:
    inputs = new_inputs(block_size=4)
    for slot in (0, 1):
        run(inputs, row(slot, start=0, token_ids=(1, 2), new_block_ids=(slot,)))

    batch = run(
        inputs,
        row(1, start=2),
        row(0, start=2, token_ids=(55,)),
        row(2, start=0, token_ids=(7, 8, 9), new_block_ids=(2,), samples=False),
        num_decode=2,
    )

    assert batch.forward.token_ids.tolist() == [101, 55, 7, 8, 9]
    assert batch.forward.slot_mapping.tolist() == [6, 2, 8, 9, 10]
    assert batch.forward.query_start.tolist() == [0, 1, 2, 5]
    assert batch.forward.kv_lens.tolist() == [3, 3, 3]
    assert batch.forward.num_decode_seqs == 2
    assert batch.forward.logits_indices.tolist() == [0, 1]
    assert batch.sampled_slots.tolist() == [1, 0]
    assert batch.sampled_positions.tolist() == [3, 3]


def test_row_with_an_unknown_token_may_stand_behind_a_chunk() -> None:
    inputs = new_inputs(block_size=4)
    run(inputs, row(1, start=0, token_ids=(1, 2), new_block_ids=(1,)))

    batch = run(inputs, row(0, start=0, token_ids=(7, 8), new_block_ids=(2,)), row(1, start=2))

    assert batch.forward.token_ids.tolist() == [7, 8, 101]


def test_step_in_which_nothing_is_sampled_wants_no_logits() -> None:
    inputs = new_inputs()

    batch = run(inputs, row(0, start=0, token_ids=(1, 2), new_block_ids=(0,), samples=False))

    assert batch.forward.logits_indices.tolist() == []
    assert batch.sampled_slots.tolist() == []


def test_host_figures_are_those_of_the_device() -> None:
    inputs = new_inputs()

    forward = run(inputs, row(0, start=0, token_ids=(1, 2), new_block_ids=(0,))).forward

    assert forward.host_query_start.tolist() == forward.query_start.tolist()
    assert forward.host_kv_lens.tolist() == forward.kv_lens.tolist()
    assert forward.host_block_tables.tolist() == forward.block_tables.tolist()


@pytest.mark.parametrize("name", ["token_ids", "positions", "slot_mapping", "logits_indices"])
@pytest.mark.parametrize("is_decode", [True, False])
def test_dtypes_are_those_of_the_contract(name: str, is_decode: bool) -> None:
    inputs = new_inputs()
    prefill = run(inputs, row(0, start=0, token_ids=(1, 2), new_block_ids=(0,)))
    decode = run(inputs, row(0, start=2), num_decode=1)

    forward = (decode if is_decode else prefill).forward

    assert getattr(forward, name).dtype == torch.int64
    for each in (forward.query_start, forward.kv_lens, forward.block_tables):
        assert each.dtype == torch.int32


def new_inputs(*, block_size: int = 16) -> StepInputs:
    """Four slots of at most 64 tokens."""
    return StepInputs(
        max_num_seqs=4, max_model_len=64, block_size=block_size, device=torch.device("cpu")
    )


def row(
    slot: int,
    *,
    start: int,
    token_ids: range | tuple[int, ...] = (),
    new_block_ids: tuple[int, ...] = (),
    samples: bool = True,
) -> ScheduledSeq:
    """One row; without ``token_ids``, one token that the host does not know."""
    return ScheduledSeq(
        sequence_id=slot,
        slot=slot,
        generation=0,
        start=start,
        num_tokens=len(token_ids) or 1,
        token_ids=tuple(token_ids),
        samples=samples,
        new_block_ids=new_block_ids,
    )


def run(
    inputs: StepInputs,
    *rows: ScheduledSeq,
    num_decode: int = 0,
    assigned: tuple[int, ...] = (),
    released: tuple[int, ...] = (),
) -> StepBatch:
    """Apply a plan of these rows and build its tensors."""
    assignments = tuple(
        SlotAssignment(
            slot=slot,
            generation=1,
            request=REQUEST,
            index=0,
            seed=0,
            token_ids=(1,),
            num_prompt_tokens=1,
        )
        for slot in assigned
    )
    plan = StepPlan(
        step_id=0, seqs=rows, num_decode_seqs=num_decode, assigned=assignments, released=released
    )
    inputs.apply(plan)
    return inputs.batch(plan, LAST_TOKENS)
