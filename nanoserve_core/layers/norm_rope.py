"""Rotary position embedding: inverse frequencies of each supported type, and the table of cos and
sin.

The formulas are those of transformers (``modeling_rope_utils.py``), so that a checkpoint means the
same here and there. The norms and the rotation itself are ops of `kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.config import ModelSpec

RopeParameters: TypeAlias = Mapping[str, Any]  # Any: numbers, strings and flags, by rope type
Rotation: TypeAlias = "tuple[Tensor, float]"
"""Inverse frequencies [head_dim / 2] and the factor on cos and sin."""

REQUIRED_ROPE_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "llama3": (
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("rope_theta", "original_max_position_embeddings"),
}
"""The rope types served, and the parameters each cannot do without."""


@dataclass(frozen=True, kw_only=True)
class RotaryFrequencies:
    """What defines the rotation of a model."""

    inv_freq: Tensor
    """[head_dim / 2] float32: radians per position."""
    attention_scaling: float
    """Factor on cos and sin (YaRN's temperature); 1 for the other types."""


def rotary_frequencies(spec: ModelSpec) -> RotaryFrequencies:
    """The frequencies of ``spec.rope_parameters``, on the CPU; the type was checked when the spec
    was made.
    """
    parameters = spec.rope_parameters
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    wavelengths = parameters["rope_theta"] ** exponents
    inv_freq, scaling = _ROPE_TYPES[parameters["rope_type"]](wavelengths, parameters, spec)
    return RotaryFrequencies(inv_freq=inv_freq, attention_scaling=scaling)


def rotary_table(frequencies: RotaryFrequencies, *, num_positions: int) -> Tensor:
    """[num_positions, head_dim] float32: cos of all frequencies, then sin, at each position,
    scaled.
    """
    inv_freq = frequencies.inv_freq.float()
    positions = torch.arange(num_positions, dtype=torch.float32, device=inv_freq.device)
    angles = positions[:, None] * inv_freq
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(frequencies.attention_scaling)


# The functions below take wavelengths / 2 pi and keep the order of operations of their source: one
# unit in the last place of a frequency is a visible angle at position 40,000.


def _default(periods: Tensor, _parameters: RopeParameters, _spec: ModelSpec) -> Rotation:
    return 1.0 / periods, 1.0


def _linear(periods: Tensor, parameters: RopeParameters, _spec: ModelSpec) -> Rotation:
    return 1.0 / periods / parameters["factor"], 1.0


def _llama3(periods: Tensor, parameters: RopeParameters, _spec: ModelSpec) -> Rotation:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between interpolated
    (Llama 3.1).
    """
    factor = parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    plain = 1.0 / periods
    wavelengths = 2 * math.pi / plain
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    stretched = torch.where(wavelengths > original / low, plain / factor, plain)
    is_between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(is_between, between, stretched), 1.0


def _yarn(periods: Tensor, parameters: RopeParameters, spec: ModelSpec) -> Rotation:
    """YaRN (Peng et al., 2023): slow dimensions interpolated, fast ones kept, a ramp between,
    attention scaled.
    """
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor")
    if factor is None:
        factor = spec.max_position_embeddings / original
    low, high = _yarn_ramp_bounds(parameters, spec.head_dim, original)
    dims = torch.arange(spec.head_dim // 2, dtype=torch.float32)
    kept = 1 - torch.clamp((dims - low) / (high - low), 0, 1)
    inv_freq = 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept
    return inv_freq, _yarn_attention_scaling(parameters, factor)


def _yarn_ramp_bounds(parameters: RopeParameters, dim: int, original: int) -> tuple[float, float]:
    """First and last dimension of the ramp: those that turn beta_fast and beta_slow times in the
    old context.
    """

    def dimension_of(num_rotations: float) -> float:
        base = parameters["rope_theta"]
        return dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dimension_of(parameters.get("beta_fast") or 32)
    high = dimension_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high  # a ramp of no width would divide by zero


def _yarn_attention_scaling(parameters: RopeParameters, factor: float) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


_ROPE_TYPES: Mapping[str, Callable[[Tensor, RopeParameters, ModelSpec], Rotation]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
