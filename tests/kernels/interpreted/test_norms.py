"""rms_norm, add_rms_norm and embed_rms_norm."""

from __future__ import annotations

import pytest
import torch

from nanoserve_core.kernels import reference
from nanoserve_core.kernels.add_rms_norm import add_rms_norm
from nanoserve_core.kernels.embed_rms_norm import embed_rms_norm
from nanoserve_core.kernels.rms_norm import rms_norm

EPS = 1e-6
TOLERANCES = [(torch.float32, 1e-5, 1e-5), (torch.float16, 4e-3, 4e-3)]
SHAPES = [(1, 64), (3, 100), (5, 1024), (0, 64)]


@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_agrees_with_float64(
    shape: tuple[int, int], dtype: torch.dtype, atol: float, rtol: float
) -> None:
    x, weight = torch.randn(shape, dtype=dtype), torch.rand(shape[1], dtype=dtype)
    out, expected = torch.empty_like(x), torch.empty(shape, dtype=torch.float64)
    reference.rms_norm(x.double(), weight.double(), eps=EPS, out=expected)

    rms_norm(x, weight, eps=EPS, out=out)

    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=rtol)


def test_rms_norm_reads_and_writes_rows_that_are_not_neighbours() -> None:
    wide, weight = torch.randn(4, 160), torch.rand(70)
    x, expected = wide[::2, 10:80], torch.empty(2, 70)
    reference.rms_norm(x, weight, eps=EPS, out=expected)

    rms_norm(x, weight, eps=EPS, out=x)

    torch.testing.assert_close(x, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_agrees_with_float64(
    shape: tuple[int, int], dtype: torch.dtype, atol: float, rtol: float
) -> None:
    x, residual = torch.randn(2, *shape).to(dtype)
    weight, out = torch.rand(shape[1], dtype=dtype), torch.empty_like(x)
    exact_residual, expected = residual.double(), torch.empty(shape, dtype=torch.float64)
    reference.add_rms_norm(
        x.double(), exact_residual, weight=weight.double(), eps=EPS, out=expected
    )

    add_rms_norm(x, residual, weight=weight, eps=EPS, out=out)

    torch.testing.assert_close(residual.double(), exact_residual, atol=atol, rtol=rtol)
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=rtol)


def test_add_rms_norm_rounds_the_residual_as_the_reference_does() -> None:
    x, residual = torch.randn(2, 4, 96).half()
    expected = residual + x

    add_rms_norm(x, residual, weight=torch.rand(96).half(), eps=EPS, out=torch.empty_like(x))

    assert torch.equal(residual, expected)


def test_add_rms_norm_adds_the_parts_of_a_split_sum_in_order() -> None:
    parts, residual = torch.randn(3, 5, 96), torch.randn(5, 96).half()
    expected = residual + ((parts[0] + parts[1]) + parts[2]).half()

    add_rms_norm(
        parts, residual, weight=torch.rand(96).half(), eps=EPS, out=torch.empty(5, 96).half()
    )

    assert torch.equal(residual, expected)


@pytest.mark.parametrize("token_dtype", [torch.int64, torch.int32])
def test_embed_rms_norm_gathers_and_norms(token_dtype: torch.dtype) -> None:
    embedding, weight = torch.randn(11, 100), torch.rand(100)
    token_ids = torch.tensor([10, 0, 3, 3], dtype=token_dtype)
    residual, out = torch.empty(2, 4, 100)
    expected = torch.empty(4, 100, dtype=torch.float64)
    reference.rms_norm(embedding[token_ids].double(), weight.double(), eps=EPS, out=expected)

    embed_rms_norm(token_ids, embedding, weight=weight, eps=EPS, residual=residual, out=out)

    assert torch.equal(residual, embedding[token_ids])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_embed_rms_norm_gives_zeros_for_ids_outside_the_vocabulary() -> None:
    token_ids, embedding = torch.tensor([-1, 7, 1]), torch.randn(7, 32)
    residual, out = torch.full((2, 3, 32), torch.nan)

    embed_rms_norm(token_ids, embedding, weight=torch.ones(32), eps=EPS, residual=residual, out=out)

    assert not residual[:2].any()
    assert not out[:2].any()
    assert torch.equal(residual[2], embedding[1])


def test_norms_name_the_argument_that_does_not_fit() -> None:
    x = torch.randn(2, 64)

    with pytest.raises(ValueError, match=r"rms_norm: weight has shape \[32\], expected \[64\]"):
        rms_norm(x, torch.rand(32), eps=EPS, out=x)
    with pytest.raises(ValueError, match="rms_norm: x has strides"):
        rms_norm(torch.randn(64, 2).T, torch.rand(64), eps=EPS, out=x)
    with pytest.raises(ValueError, match=r"add_rms_norm: x has shape \[3, 64\]"):
        add_rms_norm(torch.randn(3, 64), x, weight=torch.rand(64), eps=EPS, out=x)
    with pytest.raises(TypeError, match=r"x has dtype torch.float16, expected torch.float32"):
        add_rms_norm(x[None].half(), x, weight=torch.rand(64), eps=EPS, out=x)
