"""gemv and skinny_gemm."""

from __future__ import annotations

import pytest
import torch

from nanoserve_core.kernels import reference
from nanoserve_core.kernels.add_rms_norm import add_rms_norm
from nanoserve_core.kernels.gemv import gemv, gemv_config
from nanoserve_core.kernels.skinny_gemm import SkinnyConfig, num_splits, skinny_gemm

EPS = 1e-6
TOLERANCES = [(torch.float32, 1e-5, 1e-5), (torch.float16, 4e-3, 4e-3)]
SMALL = SkinnyConfig(block_n=16, block_k=32, num_warps=4, num_stages=2)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
@pytest.mark.parametrize(("in_size", "out_size"), [(64, 32), (96, 30), (100, 7), (2, 1)])
def test_gemv_agrees_with_float64(
    in_size: int, out_size: int, dtype: torch.dtype, atol: float, rtol: float
) -> None:
    x = torch.randn(1, in_size).to(dtype)
    weight = torch.randn(out_size, in_size).mul_(in_size**-0.5).to(dtype)
    out = torch.empty(1, out_size, dtype=dtype)

    gemv(x, weight, out=out)

    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, atol=atol, rtol=rtol)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
def test_gemv_norms_before_and_multiplies_and_adds_behind(
    dtype: torch.dtype, atol: float, rtol: float
) -> None:
    x, norm_weight = torch.randn(1, 96).to(dtype), torch.rand(96, dtype=dtype)
    weight, out = torch.randn(80, 96).mul_(0.1).to(dtype), torch.randn(1, 40).to(dtype)
    normed = torch.empty(1, 96, dtype=torch.float64)
    reference.rms_norm(x.double(), norm_weight.double(), eps=EPS, out=normed)
    gate, up = (normed @ weight.double().T).chunk(2, dim=1)
    expected = torch.empty(1, 40, dtype=torch.float64)
    reference.silu_mul(gate, up, out=expected)
    expected += out.double()

    gemv(x, weight, out=out, norm_weight=norm_weight, eps=EPS, silu_mul=True, add=True)

    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=rtol)


def test_gemv_adds_to_a_row_of_a_larger_tensor() -> None:
    x, weight, wide = torch.randn(1, 64), torch.randn(10, 64), torch.randn(3, 20)
    before = wide.clone()

    gemv(x, weight, out=wide[1:2, 4:14], add=True, rows_per_program=4)

    torch.testing.assert_close(wide[1:2, 4:14], before[1:2, 4:14] + x @ weight.T)
    wide[1:2, 4:14] = before[1:2, 4:14]
    assert torch.equal(wide, before)


@pytest.mark.parametrize("size", [1024, 2048, 2560, 3072, 4096, 6144, 9728, 12288, 17408, 25600])
def test_gemv_threads_hold_about_as_much_for_every_size(size: int) -> None:
    config = gemv_config(size)

    assert 32 <= config.rows_per_program * size / (32 * config.num_warps) <= 100


def test_gemv_names_the_argument_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"x has shape \[2, 8\], expected \[1, in_size\]"):
        gemv(torch.randn(2, 8), torch.randn(4, 8), out=torch.empty(2, 4))
    with pytest.raises(ValueError, match=r"weight has shape \[4, 8\], expected \[8, 8\]"):
        gemv(torch.randn(1, 8), torch.randn(4, 8), out=torch.empty(1, 4), silu_mul=True)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
@pytest.mark.parametrize(
    ("num_rows", "in_size", "out_size"), [(1, 64, 32), (5, 96, 40), (17, 100, 16), (0, 64, 16)]
)
def test_skinny_gemm_agrees_with_float64(
    num_rows: int, in_size: int, out_size: int, dtype: torch.dtype, atol: float, rtol: float
) -> None:
    x = torch.randn(num_rows, in_size).to(dtype)
    weight = torch.randn(out_size, in_size).mul_(in_size**-0.5).to(dtype)
    out = torch.empty(num_rows, out_size, dtype=dtype)

    skinny_gemm(x, weight, out=out, config=SMALL)

    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, atol=atol, rtol=rtol)


@pytest.mark.parametrize(("splits", "in_size"), [(2, 128), (3, 128), (3, 100), (4, 64)])
def test_skinny_gemm_leaves_the_parts_of_a_sum_to_add_rms_norm(splits: int, in_size: int) -> None:
    x, weight = torch.randn(3, in_size), torch.randn(32, in_size)
    parts, residual = torch.full((splits, 3, 32), torch.nan), torch.zeros(3, 32)
    skinny_gemm(x, weight, out=parts, config=SMALL)

    add_rms_norm(parts, residual, weight=torch.ones(32), eps=EPS, out=torch.empty(3, 32))

    torch.testing.assert_close(residual, x @ weight.T, atol=1e-4, rtol=1e-5)


def test_skinny_gemm_with_the_configuration_of_the_table() -> None:
    x, weight, out = torch.randn(2, 512), torch.randn(48, 512), torch.empty(2, 48)

    skinny_gemm(x, weight, out=out)

    torch.testing.assert_close(out, x @ weight.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("out_size", "in_size", "splits"),
    [(1024, 3072, 4), (4096, 12288, 2), (5120, 5120, 2), (12288, 1024, 1), (1024, 128, 1)],
)
def test_sums_are_split_where_tiles_are_few(out_size: int, in_size: int, splits: int) -> None:
    assert num_splits(out_size, in_size) == splits


def test_skinny_gemm_names_the_argument_that_does_not_fit() -> None:
    x, weight = torch.randn(65, 8), torch.randn(16, 8)

    with pytest.raises(ValueError, match=r"rows=65, expected at most 64\. Use torch\.mm"):
        skinny_gemm(x, weight, out=torch.empty(65, 16))
    with pytest.raises(TypeError, match=r"out has dtype torch.float16, expected torch.float32"):
        skinny_gemm(x[:2], weight, out=torch.empty(2, 2, 16).half())
