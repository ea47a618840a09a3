"""decode_attention over the plans of decode_plan, against attention by the book in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanoserve_core.kernels.decode_config import DecodeConfig
from tests.kernels.decode_runs import run_decode
from tests.kernels.paged_cases import paged_case

TOLERANCES = {torch.float32: (2e-6, 1e-5), torch.float16: (2e-3, 2e-3)}


def config_for(*, chunk: int = 32, block_n: int = 16, num_programs: int = 3) -> DecodeConfig:
    """A configuration with one chunk size."""
    return DecodeConfig(
        min_chunk=chunk,
        max_chunk=chunk,
        target_items=1,
        num_programs=num_programs,
        block_n=block_n,
        num_warps=2,
        num_stages=3,
    )


def assert_agrees(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with a float64 result."""
    atol, rtol = TOLERANCES[out.dtype]
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype"),
    [
        (2, 2, 64, torch.float32),
        (4, 2, 64, torch.float32),
        (4, 2, 128, torch.float16),
        (8, 2, 64, torch.float16),
        (5, 1, 64, torch.float32),
        (8, 1, 64, torch.float32),
    ],
)
def test_groups_of_query_heads(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = paged_case(
        [70, 1, 33],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )

    out = run_decode(case, config_for())

    assert_agrees(out, case.expected())


@pytest.mark.parametrize(
    ("block_size", "chunk", "block_n"),
    [(16, 16, 16), (16, 64, 32), (64, 32, 32), (64, 64, 16), (64, 128, 64), (256, 256, 64)],
)
def test_blocks_chunks_and_tiles_of_any_ratio(block_size: int, chunk: int, block_n: int) -> None:
    case = paged_case([150, 64, 129, 16], block_size=block_size, head_dim=32)

    out = run_decode(case, config_for(chunk=chunk, block_n=block_n))

    assert_agrees(out, case.expected())


def test_rows_of_length_zero_get_zeros() -> None:
    case = paged_case([0, 40, 0], head_dim=32)

    out = run_decode(case, config_for())

    assert_agrees(out, case.expected())
    assert not out[::2].any()


def test_chunks_chosen_by_the_planner() -> None:
    case = paged_case([300, 20, 100], head_dim=32)
    config = replace(config_for(), max_chunk=128, target_items=16)

    out = run_decode(case, config)

    assert_agrees(out, case.expected())


@pytest.mark.parametrize("num_programs", [1, 7, 100])
def test_the_number_of_programs_changes_nothing(num_programs: int) -> None:
    case = paged_case([100, 47], head_dim=32)
    expected = run_decode(case, config_for())

    out = run_decode(case, config_for(num_programs=num_programs))

    assert torch.equal(out, expected)


def test_a_row_alone_and_in_a_batch_agree_bit_for_bit() -> None:
    case = paged_case([100, 47, 64, 1], head_dim=32)
    together = run_decode(case, config_for())

    alone = [run_decode(case.row(row), config_for()) for row in range(4)]

    assert torch.equal(torch.cat(alone), together)


# NumPy's products, which the interpreter computes with, round by the position of a row in its tile.
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (4, 1), (5, 1), (8, 1)])
def test_packed_rows_agree_with_plain_ones(num_heads: int, num_kv_heads: int) -> None:
    case = paged_case(
        [70, 64, 100, 90, 65],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=32,
        shared_tokens=64,
    )
    plain = run_decode(case, config_for())

    packed = run_decode(case, config_for(), shared=64)

    torch.testing.assert_close(packed, plain, atol=1e-6, rtol=1e-6)
    assert_agrees(packed, case.expected())


def test_packed_rows_survive_the_end_of_their_neighbours() -> None:
    case = paged_case([70, 70, 70, 70], head_dim=32, shared_tokens=64)
    ended = replace(case, kv_lens=case.kv_lens * torch.tensor([0, 1, 0, 1], dtype=torch.int32))

    out = run_decode(ended, config_for(), shared=64)

    assert_agrees(out, ended.expected())


def test_views_of_larger_tensors() -> None:
    case = paged_case([40, 17], head_dim=32)
    expected = case.expected()
    wide = torch.zeros(2, 9, 32)
    wide[:, 2:6] = case.query
    heads_first = [
        cache.transpose(1, 2).contiguous().transpose(1, 2)
        for cache in (case.key_cache, case.value_cache)
    ]
    case = replace(case, query=wide[:, 2:6], key_cache=heads_first[0], value_cache=heads_first[1])

    out = run_decode(case, config_for())

    assert_agrees(out, expected)


def test_it_names_the_argument_that_does_not_fit() -> None:
    case = paged_case([40], head_dim=32)
    odd = replace(case, key_cache=case.key_cache[:, :15], value_cache=case.value_cache[:, :15])
    heads_first = case.value_cache.transpose(1, 2).contiguous().transpose(1, 2)
    mixed = replace(case, value_cache=heads_first)

    with pytest.raises(ValueError, match="block_size=15, expected a power of two"):
        run_decode(odd, config_for())
    with pytest.raises(ValueError, match="value_cache has strides"):
        run_decode(mixed, config_for())
    with pytest.raises(ValueError, match="block_n=32, expected a divisor of min_chunk"):
        run_decode(case, config_for(chunk=16, block_n=32))
