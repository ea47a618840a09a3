"""Rotary frequencies against transformers', to the bit, for every type that is served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from nanoserve_core.config import ModelSpec
from nanoserve_core.layers.norm_rope import RotaryFrequencies, rotary_frequencies, rotary_table
from tests.nanoserve_core.random_qwen3 import random_config

ORIGINAL = {"original_max_position_embeddings": 128}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: list[dict[str, Any]] = [  # Any: transformers' rope parameters
    {"rope_type": "default", "rope_theta": 1_000_000.0},
    {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
    {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, **BANDS, **ORIGINAL},
    {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, **ORIGINAL},
    {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 0.5, **ORIGINAL},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "truncate": False, **ORIGINAL},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.7, **ORIGINAL},
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 16.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "beta_fast": 24,
        "beta_slow": 2,
        **ORIGINAL,
    },
    {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "beta_fast": 1, **ORIGINAL},
]


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_table_is_transformers_cos_and_sin_at_every_position(
    rope: dict[str, Any], head_dim: int
) -> None:
    config = random_config(rope_parameters=dict(rope), head_dim=head_dim)
    spec = ModelSpec.from_hf_config(config, dtype=torch.float32)

    frequencies = rotary_frequencies(spec)
    table = rotary_table(frequencies, num_positions=400)

    theirs = Qwen3RotaryEmbedding(config)
    cos, sin = theirs(torch.zeros(1), torch.arange(400)[None])
    assert torch.equal(frequencies.inv_freq, theirs.inv_freq)
    assert frequencies.attention_scaling == theirs.attention_scaling
    assert torch.equal(
        table, torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), -1)
    )


def test_table_of_rounded_frequencies_is_computed_in_float32() -> None:
    inv_freq = torch.tensor([1.0, 0.1]).bfloat16()

    table = rotary_table(
        RotaryFrequencies(inv_freq=inv_freq, attention_scaling=2.0), num_positions=3
    )

    assert table.dtype == torch.float32
    torch.testing.assert_close(table[2, :2], 2 * (2 * inv_freq.float()).cos())
