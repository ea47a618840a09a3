"""apply_token_bitmask."""

from __future__ import annotations

import pytest
import torch

from nanoserve_core.kernels.apply_token_bitmask import apply_token_bitmask
from nanoserve_core.kernels.reference_sampling import apply_token_bitmask as reference


def random_bitmask(num_masks: int, vocab_size: int) -> torch.Tensor:
    """Bits of every word, the sign bit included."""
    size = num_masks, -(-vocab_size // 32)
    return torch.randint(-(2**31), 2**31, size, dtype=torch.int64).to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "rows"),
    [(1, 32, [0]), (3, 100, [2, 0]), (2, 9001, [1]), (4, 4097, [3, 1, 0, 2]), (2, 64, [])],
)
def test_apply_token_bitmask_agrees_with_the_reference(
    num_rows: int, vocab_size: int, rows: list[int], dtype: torch.dtype
) -> None:
    scores = torch.randn(num_rows, vocab_size).to(dtype)
    bitmask = random_bitmask(len(rows), vocab_size)
    row_ids = torch.tensor(rows, dtype=torch.int64)
    expected = scores.clone()
    reference(expected, bitmask, row_ids)

    apply_token_bitmask(scores, bitmask, row_ids)

    assert torch.equal(scores, expected)


def test_apply_token_bitmask_writes_rows_that_are_not_neighbours() -> None:
    wide = torch.zeros(3, 90)
    bitmask = torch.zeros(2, 3, dtype=torch.int32)

    apply_token_bitmask(wide[:, 10:80], bitmask, torch.tensor([0, 2]))

    assert bool((wide[[0, 2], 10:80] == -torch.inf).all())
    assert not wide[1].any()
    assert not wide[:, :10].any()
    assert not wide[:, 80:].any()


@pytest.mark.parametrize(
    ("bitmask", "rows", "message"),
    [
        (torch.zeros(1, 2, dtype=torch.int32), [0], r"bitmask has shape \[1, 2\], expected \[1, 3"),
        (torch.zeros(1, 3, dtype=torch.int32), [0, 1], r"rows has shape \[2\], expected \[1\]"),
        (torch.zeros(1, 3, dtype=torch.int64), [0], r"bitmask has dtype torch.int64"),
    ],
)
def test_apply_token_bitmask_names_the_argument_that_does_not_fit(
    bitmask: torch.Tensor, rows: list[int], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        apply_token_bitmask(torch.zeros(2, 70), bitmask, torch.tensor(rows))
