"""The plain torch ops against float64, against transformers' modules, and at their edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from nanoserve_core.kernels import for_device, reference

EPS = 1e-6
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
SENTINEL = 77.0


def test_every_device_has_ops() -> None:
    ops = for_device(torch.device("cpu"))

    assert ops is reference


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_rms_norm_is_the_formula(num_tokens: int) -> None:
    x, weight = torch.randn(num_tokens, 48).double(), torch.rand(48).double()
    out = torch.empty_like(x)

    reference.rms_norm(x, weight, eps=EPS, out=out)

    expected = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_rms_norm_of_tiny_values_keeps_epsilon() -> None:
    x = torch.full((1, 8), 1e-4)
    out = torch.empty_like(x)

    reference.rms_norm(x, torch.ones(8), eps=EPS, out=out)

    expected = 1e-4 / math.sqrt(1e-8 + EPS)
    torch.testing.assert_close(out, torch.full((1, 8), expected), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 1e-6), (torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)]
)
def test_rms_norm_rounds_where_transformers_does(dtype: torch.dtype, rtol: float) -> None:
    x, weight = torch.randn(64, 256).to(dtype), (torch.rand(256) + 0.5).to(dtype)
    theirs = Qwen3RMSNorm(256, EPS)
    theirs.weight.data = weight
    out = torch.empty_like(x)

    reference.rms_norm(x, weight, eps=EPS, out=out)

    expected = theirs(x).detach()
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=rtol, atol=0.0)
    # The same rounding points: two units in the last place at most, and that in few elements.
    assert (out != expected).float().mean() < (0.001 if dtype != torch.float32 else 1)


def test_rms_norm_may_write_over_its_input() -> None:
    x, weight = torch.randn(3, 32), torch.rand(32)
    apart = torch.empty_like(x)
    reference.rms_norm(x, weight, eps=EPS, out=apart)

    reference.rms_norm(x, weight, eps=EPS, out=x)

    assert torch.equal(x, apart)


def test_add_rms_norm_normalises_the_rounded_sum() -> None:
    x, residual = torch.randn(9, 64).bfloat16(), torch.randn(9, 64).bfloat16()
    weight, out = torch.rand(64).bfloat16(), torch.empty(9, 64).bfloat16()
    total = residual + x
    expected = torch.empty_like(out)
    reference.rms_norm(total, weight, eps=EPS, out=expected)

    reference.add_rms_norm(x, residual, weight=weight, eps=EPS, out=out)

    assert torch.equal(residual, total)
    assert torch.equal(out, expected)


def test_silu_mul_rounds_silu_before_the_product() -> None:
    gate_up = torch.randn(7, 40).bfloat16()
    out = torch.empty(7, 20).bfloat16()
    gate, up = gate_up.chunk(2, dim=1)

    reference.silu_mul(gate, up, out=out)

    assert torch.equal(out, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_writes_into_part_of_a_wider_tensor(has_bias: bool) -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    bias = torch.randn(5) if has_bias else None
    wide = torch.full((3, 9), SENTINEL)

    reference.linear(x, weight.t(), bias=bias, out=wide[:, 2:7])

    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(wide[:, 2:7], expected)
    assert (wide[:, [0, 1, 7, 8]] == SENTINEL).all()


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-6), (torch.float32, 1e-6), (torch.bfloat16, 0.05)]
)
@pytest.mark.parametrize("num_tokens", [1, 6])
def test_q_and_k_are_normalised_and_rotated_as_in_transformers(
    num_tokens: int, dtype: torch.dtype, atol: float
) -> None:
    step = Step(num_tokens, dtype)

    step.run(slots=list(range(num_tokens)))

    q, k = step.expected_q_and_k()
    torch.testing.assert_close(step.q.float(), q.float(), rtol=0.0, atol=atol)
    torch.testing.assert_close(step.k.float(), k.float(), rtol=0.0, atol=atol)


def test_rotation_is_rounded_once_and_so_closer_to_the_truth_than_transformers() -> None:
    step = Step(512, torch.bfloat16)
    truth, _ = Step(512, torch.bfloat16, computed_in=torch.float32).expected_q_and_k()

    step.run(slots=list(range(512)))

    theirs, _ = step.expected_q_and_k()
    assert (step.q.float() - truth).norm() <= (theirs.float() - truth).norm()


def test_k_and_v_are_written_at_their_slots_and_nowhere_else() -> None:
    step = Step(4, torch.float32)
    value = step.value.clone()

    step.run(slots=[9, 0, 511, 3])

    keys, values = step.cache
    assert torch.equal(keys[[9, 0, 511, 3]], step.k)
    assert torch.equal(values[[9, 0, 511, 3]], value)
    untouched = torch.ones(len(keys), dtype=torch.bool)
    untouched[[9, 0, 511, 3]] = False
    assert (step.cache[:, untouched] == SENTINEL).all()


@pytest.mark.parametrize("slots", [[-1], [-1, 5, -1, 7], [2, -1], [-1, -1, -1]])
def test_slot_minus_one_writes_nothing_but_is_rotated(slots: list[int]) -> None:
    step = Step(len(slots), torch.float32)

    step.run(slots=slots)

    written = [slot for slot in slots if slot >= 0]
    rows = [row for row, slot in enumerate(slots) if slot >= 0]
    assert torch.equal(step.cache[0, written], step.k[rows])
    is_sentinel = (step.cache == SENTINEL).all(-1).all(-1).all(0)
    assert sorted((~is_sentinel).nonzero().flatten().tolist()) == sorted(written)
    q, _ = step.expected_q_and_k()
    torch.testing.assert_close(step.q, q, rtol=0.0, atol=1e-6)


def test_views_serve_every_layer_of_a_step() -> None:
    step = Step(3, torch.float32)
    step.run(slots=[0, 1, 2])
    first = step.q.clone()
    step.refill()

    step.run(slots=[0, 1, 2], views=step.views)

    assert torch.equal(step.q, first)


def test_blocks_are_copied_in_all_layers_and_read_before_they_are_written() -> None:
    cache = torch.arange(2 * 3 * 6 * 2 * 2 * 4, dtype=torch.float32).view(2, 3, 6, 2, 2, 4)
    before = cache.clone()

    reference.copy_blocks(
        cache, sources=torch.tensor([0, 1, 4]), destinations=torch.tensor([1, 2, 5])
    )

    assert torch.equal(cache[:, :, [1, 2, 5]], before[:, :, [0, 1, 4]])
    assert torch.equal(cache[:, :, [0, 3, 4]], before[:, :, [0, 3, 4]])


class Step:
    """One call of `qk_norm_rope_write` on random numbers, and what transformers makes of them."""

    def __init__(
        self, num_tokens: int, dtype: torch.dtype, *, computed_in: torch.dtype | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)

        def draw(*size: int) -> Tensor:
            drawn = torch.randn(*size, generator=generator).to(dtype)
            return drawn if computed_in is None else drawn.to(computed_in)

        self.drawn = draw(*shape)
        self.q_weight, self.k_weight = draw(HEAD_DIM), draw(HEAD_DIM)
        self.positions = torch.randint(0, 64, (num_tokens,), generator=generator)
        inv_freq = 1 / 100.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.angles = torch.arange(64.0)[:, None] * inv_freq
        self.cache = torch.full((2, 512, NUM_KV_HEADS, HEAD_DIM), SENTINEL, dtype=self.drawn.dtype)
        self.qkv = self.drawn.clone()
        self.views: reference.QkViews | None = None

    @property
    def q(self) -> Tensor:
        """[tokens, heads, head_dim]."""
        return self.qkv[:, :NUM_HEADS]

    @property
    def k(self) -> Tensor:
        """[tokens, kv_heads, head_dim]."""
        return self.qkv[:, NUM_HEADS : NUM_HEADS + NUM_KV_HEADS]

    @property
    def value(self) -> Tensor:
        """[tokens, kv_heads, head_dim]."""
        return self.qkv[:, NUM_HEADS + NUM_KV_HEADS :]

    def refill(self) -> None:
        """The input of another layer, which happens to be the same."""
        self.qkv.copy_(self.drawn)

    def run(self, *, slots: list[int], views: reference.QkViews | None = None) -> None:
        """Prepare and run the op as the model does."""
        self.views = views or reference.qk_views(self.qkv, num_kv_heads=NUM_KV_HEADS)
        placement = reference.place_tokens(
            torch.cat((self.angles.cos(), self.angles.sin()), dim=-1),
            positions=self.positions,
            slot_mapping=torch.tensor(slots),
        )
        reference.qk_norm_rope_write(
            self.views,
            placement,
            q_weight=self.q_weight,
            k_weight=self.k_weight,
            eps=EPS,
            cache=self.cache,
        )

    def expected_q_and_k(self) -> tuple[Tensor, Tensor]:
        """transformers' norms and rotation of what was drawn."""
        q = self._normed(self.drawn[:, :NUM_HEADS], self.q_weight)
        k = self._normed(self.drawn[:, NUM_HEADS : NUM_HEADS + NUM_KV_HEADS], self.k_weight)
        angles = self.angles[self.positions].repeat(1, 2)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        norm = Qwen3RMSNorm(HEAD_DIM, EPS)
        norm.weight.data = weight
        return norm(x).detach()
