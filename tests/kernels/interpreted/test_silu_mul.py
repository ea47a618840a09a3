"""silu_mul."""

from __future__ import annotations

import pytest
import torch

from nanoserve_core.kernels import reference
from nanoserve_core.kernels.silu_mul import silu_mul


@pytest.mark.parametrize(
    ("dtype", "atol", "rtol"), [(torch.float32, 1e-6, 1e-5), (torch.float16, 2e-3, 2e-3)]
)
@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (2, 1500), (0, 64)])
def test_silu_mul_agrees_with_float64(
    shape: tuple[int, int], dtype: torch.dtype, atol: float, rtol: float
) -> None:
    gate, up = torch.randn(2, *shape).mul_(4).to(dtype)
    out, expected = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=torch.float64)
    reference.silu_mul(gate.double(), up.double(), out=expected)

    silu_mul(gate, up, out=out)

    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=rtol)


def test_silu_mul_reads_and_writes_rows_that_are_not_neighbours() -> None:
    gate_up, wide_out, expected = torch.randn(3, 140), torch.zeros(3, 90), torch.empty(3, 70)
    gate, up = gate_up.chunk(2, dim=1)
    reference.silu_mul(gate, up, out=expected)

    silu_mul(gate, up, out=wide_out[:, 10:80])

    torch.testing.assert_close(wide_out[:, 10:80], expected, atol=1e-6, rtol=1e-5)
    assert not wide_out[:, :10].any()
    assert not wide_out[:, 80:].any()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_silu_mul_stays_finite_for_large_inputs() -> None:
    gate, up, out = torch.tensor([[-200.0, 200.0]]), torch.tensor([[1.0, 2.0]]), torch.empty(1, 2)

    silu_mul(gate, up, out=out)

    torch.testing.assert_close(out, torch.tensor([[0.0, 400.0]]), atol=1e-6, rtol=1e-6)


def test_silu_mul_names_the_argument_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"gate has shape \[2, 12\], expected \[2, 8\]"):
        silu_mul(torch.randn(2, 12), torch.randn(2, 8), out=torch.empty(2, 8))
