"""qk_norm_rope_write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from nanoserve_core.kernels import reference
from nanoserve_core.kernels.qk_norm_rope_write import qk_norm_rope_write

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-6
NUM_SLOTS = 80


@dataclass(kw_only=True)
class Case:
    """Arguments of one call, of any float dtype."""

    qkv: Tensor
    weights: Tensor
    cache: Tensor
    rotary_table: Tensor
    positions: Tensor
    slots: Tensor

    def to(self, dtype: torch.dtype) -> Case:
        """A copy in ``dtype``; the rotation stays float32 unless all is float64."""
        table = self.rotary_table.double() if dtype == torch.float64 else self.rotary_table
        return Case(
            qkv=self.qkv.to(dtype, copy=True),
            weights=self.weights.to(dtype),
            cache=self.cache.to(dtype, copy=True),
            rotary_table=table,
            positions=self.positions,
            slots=self.slots,
        )

    def run_reference(self) -> None:
        """Carry it out in plain torch."""
        views = reference.qk_views(self.qkv, num_kv_heads=self.cache.shape[2])
        placement = reference.place_tokens(
            self.rotary_table, positions=self.positions, slot_mapping=self.slots
        )
        q_weight, k_weight = self.weights
        reference.qk_norm_rope_write(
            views, placement, q_weight=q_weight, k_weight=k_weight, eps=EPS, cache=self.cache
        )

    def run_kernel(self) -> None:
        """Carry it out in one launch."""
        q_weight, k_weight = self.weights
        qk_norm_rope_write(
            self.qkv,
            rotary_table=self.rotary_table,
            positions=self.positions,
            slot_mapping=self.slots,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=EPS,
            cache=self.cache,
        )


def make_case(slots: list[int], *, num_heads: int, num_kv_heads: int, head_dim: int) -> Case:
    """Random tokens at random positions; the cache holds -1 everywhere."""
    num_tokens = len(slots)
    angles = torch.arange(40.0)[:, None] * 0.3 ** torch.arange(head_dim // 2)
    return Case(
        qkv=torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim),
        weights=torch.rand(2, head_dim) + 0.5,
        cache=torch.full((2, NUM_SLOTS, num_kv_heads, head_dim), -1.0),
        rotary_table=torch.cat((angles.cos(), angles.sin()), dim=-1),
        positions=torch.randint(0, 40, (num_tokens,)),
        slots=torch.tensor(slots, dtype=torch.int64),
    )


def assert_agree(case: Case, expected: Case, *, atol: float, rtol: float) -> None:
    """Compare what the call changed."""
    torch.testing.assert_close(case.qkv.double(), expected.qkv, atol=atol, rtol=rtol)
    torch.testing.assert_close(case.cache.double(), expected.cache, atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    ("dtype", "atol", "rtol"), [(torch.float32, 1e-5, 1e-5), (torch.float16, 6e-3, 4e-3)]
)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(2, 2, 64), (4, 2, 128), (8, 4, 64), (5, 1, 64), (3, 3, 32)],
)
def test_it_agrees_with_float64(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, atol: float, rtol: float
) -> None:
    case = make_case(
        [17, 3, 79], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    ).to(dtype)
    expected = case.to(torch.float64)
    expected.run_reference()

    case.run_kernel()

    assert_agree(case, expected, atol=atol, rtol=rtol)


def test_tokens_without_a_slot_are_rotated_and_not_written() -> None:
    case = make_case([-1, 20, -1], num_heads=4, num_kv_heads=2, head_dim=32)
    expected = case.to(torch.float64)
    expected.run_reference()

    case.run_kernel()

    assert_agree(case, expected, atol=1e-5, rtol=1e-5)
    written = (case.cache != -1).flatten(2).any(-1).nonzero()
    assert written.tolist() == [[0, 20], [1, 20]]


def test_values_are_copied_bit_for_bit() -> None:
    case = make_case([5], num_heads=2, num_kv_heads=2, head_dim=32).to(torch.float16)
    values = case.qkv[0, 4:].clone()

    case.run_kernel()

    assert torch.equal(case.cache[1, 5], values)
    assert torch.equal(case.qkv[0, 4:], values)


def test_no_token_is_fine() -> None:
    case = make_case([], num_heads=2, num_kv_heads=2, head_dim=32)

    case.run_kernel()

    assert (case.cache == -1).all()


def test_it_works_on_views_of_larger_tensors() -> None:
    case = make_case([33, 2], num_heads=4, num_kv_heads=2, head_dim=32)
    expected = case.to(torch.float64)
    expected.run_reference()
    all_layers, wide = torch.full((2, 3, NUM_SLOTS, 2, 32), -1.0), torch.zeros(2, 10, 32)
    wide[:, :8] = case.qkv
    case.cache, case.qkv = all_layers[:, 1], wide[:, :8]

    case.run_kernel()

    assert_agree(case, expected, atol=1e-5, rtol=1e-5)
    assert (all_layers[:, ::2] == -1).all()
    assert not wide[:, 8:].any()


def test_it_names_the_argument_that_does_not_fit() -> None:
    case = make_case([1], num_heads=2, num_kv_heads=2, head_dim=48)
    with pytest.raises(ValueError, match="head_dim=48, expected a power of two from 16"):
        case.run_kernel()

    case = make_case([1], num_heads=2, num_kv_heads=2, head_dim=32)
    case.slots = torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"slot_mapping has shape \[2\], expected \[1\]"):
        case.run_kernel()
