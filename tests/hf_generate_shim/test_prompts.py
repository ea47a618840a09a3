"""Masked tokens are dropped wherever they stand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_generate_shim.prompts import Prompts

IDS = torch.tensor([[9, 9, 1, 2], [3, 4, 5, 6], [7, 9, 8, 9]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 0, 1, 0]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32])
def test_rows_hold_the_unmasked_tokens_in_order(dtype: torch.dtype) -> None:
    prompts = Prompts.read(IDS, MASK.to(dtype))

    assert prompts.rows() == [(1, 2), (3, 4, 5, 6), (7, 8)]
    assert prompts.lengths.tolist() == [2, 4, 2]


def test_rows_are_whole_without_a_mask() -> None:
    prompts = Prompts.read(IDS.int(), None)

    assert prompts.rows() == [tuple(row) for row in IDS.tolist()]
    assert not prompts.has_holes


def test_left_padding_is_no_hole() -> None:
    assert not Prompts.read(IDS[:2], MASK[:2]).has_holes
    assert Prompts.read(IDS, MASK).has_holes


def test_masked_before_compares_every_row_with_its_column() -> None:
    prompts = Prompts.read(IDS[:2], MASK[:2])

    assert prompts.is_masked_before(np.array([2, 0]))
    assert not prompts.is_masked_before(np.array([0, 0]))
    assert not prompts.is_masked_before(np.array([3, 0]))


def test_default_positions_are_those_of_transformers() -> None:
    prompts = Prompts.read(IDS, MASK)

    expected = (MASK.cumsum(-1) - 1).masked_fill(MASK == 0, 0)
    assert prompts.default_position_ids().tolist() == expected.tolist()
