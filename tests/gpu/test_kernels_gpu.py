"""Every kernel on the card, in bfloat16, against float64; and what only a real device can show: the
order of sums under different grids, captured launches, dependent launches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from nanoserve_core.kernels import reference
from nanoserve_core.kernels import triton_ops as ops
from nanoserve_core.kernels.prefill_attention import PrefillConfig
from tests.kernels.decode_runs import plan_for, run_decode
from tests.kernels.paged_cases import PagedCase, paged_case

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

EPS = 1e-6
NUM_MULTIPROCESSORS = 132
NUM_REPEATS = 200
# bfloat16 has 8 bits: half a unit in the last place is 2 to 4 thousandths.
ROUNDED_ONCE = {"atol": 4e-3, "rtol": 4e-3}
ROUNDED_OFTEN = {"atol": 1e-2, "rtol": 1.6e-2}
# Weights of the softmax are rounded before their product with the values.
ATTENTION = {"atol": 8e-3, "rtol": 2e-2}


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers on the device."""
    return torch.randn(shape, device="cuda").mul_(scale).to(dtype)


def as_float64(*shape: int) -> Tensor:
    """Room for an exact result."""
    return torch.empty(shape, dtype=torch.float64, device="cuda")


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """``run`` as a graph, after one ordinary run that compiles it."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


# ---- the small kernels


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1024), (257, 1024), (64, 5120), (3, 2560)])
def test_norms(num_rows: int, size: int) -> None:
    x, residual, out = randn(num_rows, size), randn(num_rows, size), randn(num_rows, size)
    weight, expected = randn(size), as_float64(num_rows, size)
    rounded = residual + x
    reference.rms_norm(rounded.double(), weight.double(), eps=EPS, out=expected)

    ops.add_rms_norm(x, residual, weight=weight, eps=EPS, out=out)
    alone = torch.empty_like(out)
    ops.rms_norm(rounded, weight, eps=EPS, out=alone)

    assert torch.equal(residual, rounded)
    torch.testing.assert_close(alone, out, **ROUNDED_ONCE)
    torch.testing.assert_close(out.double(), expected, **ROUNDED_OFTEN)


def test_embed_rms_norm() -> None:
    embedding, weight = randn(1000, 1024), randn(1024)
    token_ids = torch.randint(0, 1000, (65,), device="cuda")
    residual, out, expected = randn(65, 1024), randn(65, 1024), randn(65, 1024)
    ops.rms_norm(embedding[token_ids], weight, eps=EPS, out=expected)

    ops.embed_rms_norm(token_ids, embedding, weight=weight, eps=EPS, residual=residual, out=out)

    assert torch.equal(residual, embedding[token_ids])
    torch.testing.assert_close(out, expected, **ROUNDED_ONCE)


@pytest.mark.parametrize(("num_rows", "size"), [(1, 3072), (300, 12288), (5, 1000)])
def test_silu_mul(num_rows: int, size: int) -> None:
    gate, up = randn(num_rows, 2 * size, scale=3).chunk(2, dim=1)
    out, expected = randn(num_rows, size), as_float64(num_rows, size)
    reference.silu_mul(gate.double(), up.double(), out=expected)

    ops.silu_mul(gate, up, out=out)

    torch.testing.assert_close(out.double(), expected, **ROUNDED_OFTEN)


def test_copy_blocks() -> None:
    cache = randn(2, 3, 20, 64, 8, 128)
    sources, destinations = torch.tensor([[4, 0, 7, -1], [1, 6, 19, 3]], device="cuda")
    expected = cache.clone()
    reference.copy_blocks(expected, sources=sources[:3], destinations=destinations[:3])

    ops.copy_blocks(cache, sources=sources, destinations=destinations)

    assert torch.equal(cache, expected)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(16, 8), (40, 8), (14, 2)])
def test_qk_norm_rope_write(num_heads: int, num_kv_heads: int) -> None:
    num_tokens, head_dim = 130, 128
    qkv = randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    cache = torch.zeros(2, 1024, num_kv_heads, head_dim, device="cuda").bfloat16()
    angles = torch.arange(300, device="cuda")[:, None] * 0.9 ** torch.arange(64, device="cuda")
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, 300, (num_tokens,), device="cuda")
    slots = torch.randperm(1024, device="cuda")[:num_tokens]
    slots[::5] = -1
    q_weight, k_weight = (torch.rand(2, head_dim, device="cuda") + 0.5).bfloat16()
    exact_qkv, exact_cache = qkv.double(), cache.double()
    reference.qk_norm_rope_write(
        reference.qk_views(exact_qkv, num_kv_heads=num_kv_heads),
        reference.place_tokens(table.double(), positions=positions, slot_mapping=slots),
        q_weight=q_weight.double(),
        k_weight=k_weight.double(),
        eps=EPS,
        cache=exact_cache,
    )

    ops.qk_norm_rope_write(
        ops.qk_views(qkv, num_kv_heads=num_kv_heads),
        ops.place_tokens(table, positions=positions, slot_mapping=slots),
        q_weight=q_weight,
        k_weight=k_weight,
        eps=EPS,
        cache=cache,
    )

    torch.testing.assert_close(qkv.double(), exact_qkv, atol=6e-2, rtol=1.6e-2)
    torch.testing.assert_close(cache.double(), exact_cache, atol=6e-2, rtol=1.6e-2)
    assert torch.equal(cache != 0, exact_cache != 0)


# ---- products of few rows


@pytest.mark.parametrize(("in_size", "out_size"), [(1024, 4096), (3072, 1024), (9728, 2560)])
def test_gemv(in_size: int, out_size: int) -> None:
    x, weight = randn(1, in_size), randn(out_size, in_size, scale=in_size**-0.5)
    out = randn(1, out_size)

    ops.gemv(x, weight, out=out)

    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, **ROUNDED_ONCE)


def test_gemv_with_norm_silu_and_sum() -> None:
    x, norm_weight = randn(1, 1024), randn(1024)
    weight, out = randn(6144, 1024, scale=1024**-0.5), randn(1, 3072)
    normed, activated = torch.empty_like(x), torch.empty_like(out)
    ops.rms_norm(x, norm_weight, eps=EPS, out=normed)
    gate, up = (normed @ weight.T).chunk(2, dim=1)
    ops.silu_mul(gate, up, out=activated)
    expected = out + activated

    ops.gemv(x, weight, out=out, norm_weight=norm_weight, eps=EPS, silu_mul=True, add=True)

    torch.testing.assert_close(out.double(), expected.double(), **ROUNDED_OFTEN)


@pytest.mark.parametrize("num_rows", [2, 16, 33, 64])
@pytest.mark.parametrize(("in_size", "out_size"), [(1024, 6144), (3072, 1024), (1024, 151936)])
def test_skinny_gemm(num_rows: int, in_size: int, out_size: int) -> None:
    x, weight = randn(num_rows, in_size), randn(out_size, in_size, scale=in_size**-0.5)
    splits = ops.num_splits(out_size, in_size)
    out = torch.full((num_rows, out_size), torch.nan, device="cuda").bfloat16()
    parts = torch.full((splits, num_rows, out_size), torch.nan, device="cuda")
    expected = x.double() @ weight.double().T

    ops.skinny_gemm(x, weight, out=out)
    ops.skinny_gemm(x, weight, out=parts)

    torch.testing.assert_close(out.double(), expected, **ROUNDED_ONCE)
    torch.testing.assert_close(parts.double().sum(0), expected, atol=1e-4, rtol=1e-4)


def test_linear_chooses_by_the_number_of_rows_and_agrees_with_itself() -> None:
    weight = randn(1024, 2048, scale=2048**-0.5)
    x = randn(100, 2048)
    expected = x.double() @ weight.double().T

    for num_rows in (1, 2, 16, 17, 64, 100):
        out = randn(num_rows, 1024)
        ops.linear(x[:num_rows], weight.t(), bias=None, out=out)
        torch.testing.assert_close(out.double(), expected[:num_rows], **ROUNDED_ONCE)


def test_dependent_launches_see_what_the_launches_before_them_wrote() -> None:
    hidden, num_layers = 1024, 40
    up = randn(num_layers, 2 * 3072, hidden, scale=hidden**-0.5)
    down = randn(num_layers, hidden, 3072, scale=3072**-0.5)
    norm, start = randn(hidden), randn(1, hidden)
    residual, activated = torch.empty_like(start), randn(1, 3072)

    def stack(*, pdl: bool) -> None:
        residual.copy_(start)
        for layer in range(num_layers):
            ops.gemv(
                residual,
                up[layer],
                out=activated,
                norm_weight=norm,
                eps=EPS,
                silu_mul=True,
                pdl=pdl,
            )
            ops.gemv(activated, down[layer], out=residual, add=True, pdl=pdl)

    stack(pdl=False)
    expected = residual.clone()
    graph = captured(lambda: stack(pdl=True))
    for _ in range(NUM_REPEATS):
        residual.fill_(torch.nan)

        graph.replay()

        assert torch.equal(residual, expected)


# ---- decode attention

INVARIANT = ops.decode_config(64, num_multiprocessors=NUM_MULTIPROCESSORS, batch_invariant=True)
ADAPTIVE = ops.decode_config(16, num_multiprocessors=NUM_MULTIPROCESSORS)


def decode_case(
    num_rows: int = 24,
    *,
    longest: int = 1500,
    num_heads: int = 16,
    num_kv_heads: int = 8,
    block_size: int = 64,
    head_dim: int = 128,
) -> PagedCase:
    """Rows of random lengths, among them the awkward ones."""
    generator = torch.Generator().manual_seed(num_rows)
    lens = torch.randint(1, longest + 1, (num_rows,), generator=generator).tolist()
    lens[: min(4, num_rows)] = [longest, 256, 257, 1][: min(4, num_rows)]
    return paged_case(
        lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.bfloat16,
        device="cuda",
    )


@pytest.mark.parametrize("config", [INVARIANT, ADAPTIVE], ids=["invariant", "adaptive"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        (8, 8, 128, 64),
        (16, 8, 128, 16),
        (16, 8, 128, 64),
        (16, 8, 64, 64),
        (32, 8, 128, 256),
        (40, 8, 128, 64),
        (64, 8, 128, 64),
    ],
)
def test_decode_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, config: ops.DecodeConfig
) -> None:
    case = decode_case(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size
    )

    out = run_decode(case, config)

    torch.testing.assert_close(out.double(), case.expected(), **ATTENTION)


@pytest.mark.parametrize("kv_len", [1, 64, 500, 5000])
def test_decode_attention_of_one_row(kv_len: int) -> None:
    case = decode_case(1, longest=kv_len)

    out = run_decode(case, ops.decode_config(1, num_multiprocessors=NUM_MULTIPROCESSORS))

    torch.testing.assert_close(out.double(), case.expected(), **ATTENTION)


def test_ended_rows_get_zeros_and_disturb_nobody() -> None:
    case = decode_case()
    expected = run_decode(case, INVARIANT)
    lens = case.kv_lens.clone()
    lens[1::2] = 0

    out = run_decode(replace(case, kv_lens=lens), INVARIANT)

    assert not out[1::2].any()
    assert torch.equal(out[::2], expected[::2])


def test_the_grid_and_the_order_of_arrival_change_no_bit() -> None:
    case = decode_case(64)
    plan, expected = plan_for(case, INVARIANT), run_decode(case, INVARIANT)
    out = torch.empty_like(expected)
    for repeat in range(NUM_REPEATS):
        num_programs = NUM_MULTIPROCESSORS * (1 + repeat % 8) - repeat % 3
        out.fill_(torch.nan)

        run_decode(case, replace(INVARIANT, num_programs=num_programs), plan=plan, out=out)

        assert torch.equal(out, expected), f"repeat {repeat}, {num_programs} programs"


def test_a_row_alone_and_in_a_batch_agree_bit_for_bit() -> None:
    case = decode_case(64)
    together = run_decode(case, INVARIANT)

    alone = [run_decode(case.row(row), INVARIANT) for row in range(64)]

    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 8), (16, 8), (32, 8), (40, 8)])
def test_packed_rows_agree_with_plain_ones_bit_for_bit(num_heads: int, num_kv_heads: int) -> None:
    case = paged_case(
        [1024 + 37 * row for row in range(20)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        block_size=64,
        dtype=torch.bfloat16,
        device="cuda",
        shared_tokens=1024,
    )
    plain = run_decode(case, INVARIANT)

    packed = run_decode(case, INVARIANT, shared=1024)

    assert torch.equal(packed, plain)
    torch.testing.assert_close(packed.double(), case.expected(), **ATTENTION)


def test_a_captured_step_follows_lengths_that_change() -> None:
    case = decode_case()
    lens, plan = case.kv_lens.clone(), plan_for(case, INVARIANT)
    live = replace(case, kv_lens=lens)
    out = torch.empty_like(case.query)

    def step() -> None:
        ops.decode_plan(lens, plan=plan, config=INVARIANT)
        ops.decode_attention(
            live.query,
            key_cache=live.key_cache,
            value_cache=live.value_cache,
            block_tables=live.block_tables,
            kv_lens=lens,
            plan=plan,
            config=INVARIANT,
            out=out,
        )

    graph = captured(step)
    for shorter_by in (0, 1, 255, 700):
        lens.copy_((case.kv_lens - shorter_by).clamp_(min=0))

        graph.replay()

        assert torch.equal(out, run_decode(live, INVARIANT))


# ---- prefill attention


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(16, 8, 128, 64), (32, 8, 128, 16), (40, 8, 128, 256), (8, 8, 64, 64)],
)
def test_prefill_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, block_m: int
) -> None:
    case = paged_case(
        [700, 40, 513, 1, 1024],
        query_lens=[700, 9, 130, 1, 65],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.bfloat16,
        device="cuda",
    )
    config = PrefillConfig(block_m=block_m, block_n=64, num_warps=block_m // 16, num_stages=3)
    out = torch.full_like(case.query, torch.nan)

    ops.prefill_attention(
        case.query,
        key_cache=case.key_cache,
        value_cache=case.value_cache,
        block_tables=case.block_tables,
        query_start=case.query_start,
        kv_lens=case.kv_lens,
        out=out,
        config=config,
    )

    torch.testing.assert_close(out.double(), case.expected(), **ATTENTION)
