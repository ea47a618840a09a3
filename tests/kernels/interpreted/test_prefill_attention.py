"""prefill_attention against attention by the book in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanoserve_core.kernels.prefill_attention import (
    PrefillConfig,
    prefill_attention,
    prefill_config,
)
from tests.kernels.paged_cases import PagedCase, paged_case

TOLERANCES = {torch.float32: (2e-6, 1e-5), torch.float16: (2e-3, 2e-3)}
SMALL = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)


def attend(
    case: PagedCase, config: PrefillConfig | None = SMALL, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Run one step of prefill chunks."""
    out = torch.full_like(case.query, torch.nan) if out is None else out
    prefill_attention(
        case.query,
        key_cache=case.key_cache,
        value_cache=case.value_cache,
        block_tables=case.block_tables,
        query_start=case.query_start,
        kv_lens=case.kv_lens,
        out=out,
        config=config,
    )
    return out


def assert_agrees(out: torch.Tensor, case: PagedCase) -> None:
    """Compare with float64."""
    atol, rtol = TOLERANCES[out.dtype]
    torch.testing.assert_close(out.double(), case.expected(), atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype"),
    [
        (2, 2, 64, torch.float32),
        (4, 2, 64, torch.float16),
        (4, 1, 128, torch.float32),
        (5, 1, 64, torch.float32),
        (8, 1, 32, torch.float16),
    ],
)
def test_groups_of_query_heads(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = paged_case(
        [20, 37, 1],
        query_lens=[20, 5, 1],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )

    out = attend(case)

    assert_agrees(out, case)


@pytest.mark.parametrize(
    ("block_size", "block_m", "block_n"),
    [(16, 16, 32), (16, 32, 16), (64, 16, 32), (64, 32, 64), (16, 64, 64)],
)
def test_blocks_and_tiles_of_any_ratio(block_size: int, block_m: int, block_n: int) -> None:
    case = paged_case([70, 64, 30], query_lens=[70, 3, 17], block_size=block_size, head_dim=32)
    config = PrefillConfig(block_m=block_m, block_n=block_n, num_warps=4, num_stages=2)

    out = attend(case, config)

    assert_agrees(out, case)


@pytest.mark.parametrize("query_len", [1, 7, 8, 9, 16, 17])
def test_chunks_around_the_size_of_a_tile(query_len: int) -> None:
    case = paged_case([query_len, 32 + query_len], query_lens=[query_len] * 2, head_dim=32)

    out = attend(case)

    assert_agrees(out, case)


def test_many_rows_of_one_token_and_none() -> None:
    case = paged_case([5, 0, 9, 1, 0], query_lens=[1, 0, 1, 1, 0], head_dim=32)

    out = attend(case)

    assert_agrees(out, case)


def test_the_configuration_of_the_table() -> None:
    case = paged_case([40, 90], query_lens=[40, 70], head_dim=32, block_size=64)

    out = attend(case, None)

    assert_agrees(out, case)


def test_starts_may_be_the_tail_of_a_longer_list() -> None:
    case = paged_case([20, 9], query_lens=[20, 4], head_dim=32)
    expected = attend(case)

    out = attend(replace(case, query_start=case.query_start + 3))

    assert torch.equal(out, expected)


def test_tokens_behind_the_last_row_are_left_alone() -> None:
    case = paged_case([20, 9], query_lens=[20, 4], head_dim=32)
    expected = attend(case)
    padded = replace(case, query=torch.cat((case.query, case.query[:9])))

    out = attend(padded, out=torch.full_like(padded.query, 7.0))

    assert torch.equal(out[:24], expected)
    assert (out[24:] == 7.0).all()


def test_no_token_is_fine() -> None:
    case = paged_case([0], query_lens=[0], head_dim=32)

    out = attend(case)

    assert out.shape == (0, 4, 32)


def test_views_of_larger_tensors() -> None:
    case = paged_case([20], query_lens=[20], head_dim=32)
    wide = torch.zeros(2, 20, 9, 32)
    wide[0, :, 2:6] = case.query
    out = wide[1, :, 2:6]

    attend(replace(case, query=wide[0, :, 2:6]), out=out)

    assert_agrees(out, case)
    assert not wide[1, :, :2].any()
    assert not wide[1, :, 6:].any()


def test_small_chunks_get_small_tiles() -> None:
    few = prefill_config(64, num_rows=8, group=2)
    many = prefill_config(4096, num_rows=8, group=2)

    assert few.block_m < many.block_m


def test_wide_numbers_get_the_smallest_tiles() -> None:
    wide = prefill_config(4096, num_rows=8, group=2, element_nbytes=4)

    assert wide.block_m < prefill_config(64, num_rows=8, group=2).block_m


def test_it_names_the_argument_that_does_not_fit() -> None:
    case = paged_case([20], query_lens=[20], head_dim=32)

    with pytest.raises(ValueError, match=r"query_start has shape \[1\], expected \[2\]"):
        attend(replace(case, query_start=case.query_start[:1]))
    with pytest.raises(ValueError, match="block_m=1, expected 2 or more"):
        attend(case, replace(SMALL, block_m=1))
    with pytest.raises(ValueError, match="query has strides"):
        attend(replace(case, query=case.query.transpose(1, 2).contiguous().transpose(1, 2)))
