"""`ModelSpec.from_hf_config`: every Qwen3 is read, and what we would compute wrongly is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from nanoserve_core.config import ModelSpec
from nanoserve_core.errors import ConfigError
from tests.nanoserve_core.random_qwen3 import random_config

# hidden, intermediate, layers, heads, kv heads, tied: the published sizes, all with head_dim 128.
SIZES = {
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "1.7B": (2048, 6144, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
    "14B": (5120, 17408, 40, 40, 8, False),
    "32B": (5120, 25600, 64, 64, 8, False),
}
KV_BYTES_PER_TOKEN = {"0.6B": 114_688, "4B": 147_456, "14B": 163_840, "32B": 262_144}  # bfloat16


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_read(size: str) -> None:
    hidden, intermediate, layers, heads, kv_heads, is_tied = SIZES[size]
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=is_tied,
        max_position_embeddings=40960,
        rope_theta=1_000_000,
        architectures=["Qwen3ForCausalLM"],
    )

    spec = ModelSpec.from_hf_config(config, dtype=torch.bfloat16, eos_token_ids=[151645, 151643])

    assert (spec.hidden_size, spec.intermediate_size, spec.num_hidden_layers) == (
        hidden,
        intermediate,
        layers,
    )
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim) == (
        heads,
        kv_heads,
        128,
    )
    assert spec.tie_word_embeddings is is_tied
    assert spec.rope_parameters == {"rope_type": "default", "rope_theta": 1_000_000}
    assert spec.eos_token_ids == (151645, 151643)
    assert spec.architecture == "Qwen3ForCausalLM"
    if size in KV_BYTES_PER_TOKEN:
        assert spec.kv_bytes_per_token == KV_BYTES_PER_TOKEN[size]


def test_block_of_256_tokens_of_the_smallest_takes_28_mib() -> None:
    config = Qwen3Config(num_hidden_layers=28, num_key_value_heads=8, head_dim=128)

    spec = ModelSpec.from_hf_config(config, dtype=torch.bfloat16)

    assert spec.block_nbytes(256) == 29_360_128


@pytest.mark.parametrize(
    ("legacy", "rope_type"),
    [
        ({"rope_theta": 5e5}, "default"),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
    ],
)
def test_rope_of_older_configs_is_read_as_transformers_stores_it(
    legacy: dict[str, Any], rope_type: str
) -> None:
    spec = ModelSpec.from_hf_config(random_config(**legacy), dtype=torch.float32)

    assert spec.rope_parameters["rope_type"] == rope_type
    assert spec.rope_parameters["rope_theta"] == legacy.get("rope_theta", 10_000.0)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
        ({"use_sliding_window": True, "max_window_layers": 1}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, "num_attention_heads=5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(
    overrides: dict[str, Any], named: str
) -> None:
    config = random_config(**overrides)

    with pytest.raises(ConfigError, match=named):
        ModelSpec.from_hf_config(config, dtype=torch.float32)


@pytest.mark.parametrize("rope_type", ["longrope", "proportional", "something_new"])
def test_unknown_rope_type_is_refused_by_name(rope_type: str) -> None:
    config = random_config()
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 1e4}

    with pytest.raises(
        ConfigError, match=f"rope_type='{rope_type}'.*default, linear, llama3, yarn"
    ):
        ModelSpec.from_hf_config(config, dtype=torch.float32)


def test_missing_rope_parameter_is_named() -> None:
    config = random_config()
    config.rope_parameters = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}

    with pytest.raises(ConfigError, match="low_freq_factor"):
        ModelSpec.from_hf_config(config, dtype=torch.float32)


def test_other_model_types_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="model_type='llama'"):
        ModelSpec.from_hf_config(LlamaConfig(), dtype=torch.float32)
