"""apply_deltas, gather_rows and advance_state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanoserve_core.kernels import reference_state, triton_ops
from nanoserve_core.kernels.slot_tables import PickedTokens, TokenRing
from tests.kernels.slot_cases import Slot, slot_case
from tests.kernels.slot_state_contract import SlotStateContract


class TestTritonState(SlotStateContract):
    """In the interpreter."""

    ops = triton_ops


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5])
def test_a_few_steps_leave_what_plain_torch_leaves(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    slots = [
        Slot(
            num_tokens=int(torch.randint(1, 10, (1,), generator=generator)),
            stop_ids=[3, 8],
            first_stop_position=6,
            max_total_tokens=11,
            is_active=index != 2,
        )
        for index in range(6)
    ]
    order = (torch.randperm(7, generator=generator) - 1)[:num_rows].tolist()
    cases = [slot_case(ops, slots, order) for ops in (reference_state, triton_ops)]

    for case in cases:
        case.gather()
    for _ in range(4):
        tokens = torch.randint(-2, 10, (num_rows,), generator=generator).tolist()
        for case in cases:
            case.advance(tokens)

    expected, case = cases
    assert torch.equal(case.tables.storage, expected.tables.storage)
    assert torch.equal(case.ring.token_ids, expected.ring.token_ids)
    assert torch.equal(case.rows.kv_lens, expected.rows.kv_lens)
    assert torch.equal(case.rows.slot_mapping, expected.rows.slot_mapping)


def test_no_row_is_fine() -> None:
    case = slot_case(triton_ops, [Slot(num_tokens=1)], [])

    case.gather()
    case.advance([])

    assert case.ring.step.tolist() == [1]


def test_they_name_the_argument_that_does_not_fit() -> None:
    case = slot_case(triton_ops, [Slot(num_tokens=1)] * 3, [0, 1])
    rows, picked = case.rows, PickedTokens.allocate(3, "cpu")

    with pytest.raises(ValueError, match=r"deltas has shape \[4\], expected \[n \+ 1, 2\]"):
        triton_ops.apply_deltas(case.tables, torch.zeros(4, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"deltas has dtype torch.int64"):
        triton_ops.apply_deltas(case.tables, torch.zeros(4, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"rows.kv_lens has shape \[1\], expected \[2\]"):
        triton_ops.gather_rows(case.tables, replace(rows, kv_lens=rows.kv_lens[:1]))
    with pytest.raises(ValueError, match=r"rows.block_tables has shape \[2, 5\], expected \[2, 6"):
        triton_ops.gather_rows(case.tables, replace(rows, block_tables=rows.block_tables[:, :5]))
    with pytest.raises(ValueError, match=r"picked.token_ids has shape \[3\], expected \[2\]"):
        triton_ops.advance_state(case.tables, rows, picked=picked, ring=case.ring)
    with pytest.raises(ValueError, match=r"ring.token_ids has shape \[4, 1\]"):
        triton_ops.advance_state(
            case.tables, rows, picked=picked.first(2), ring=TokenRing.allocate(4, 1, "cpu")
        )
