"""Small random Qwen3 models and transformers' greedy tokens: the oracle of the engine's tests."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB_SIZE = 256
EOS = 7

SHAPES: dict[str, dict[str, object]] = {
    "gqa": {},
    "tied": {"tie_word_embeddings": True, "num_hidden_layers": 1},
    "mha_biased": {"num_key_value_heads": 4, "attention_bias": True},
    "wide_heads": {"num_key_value_heads": 1, "head_dim": 64},
}


@cache
def tiny_qwen3(shape: str = "gqa") -> Qwen3ForCausalLM:
    """A random float32 model, the same at every call.

    Its weights are larger than transformers' default initialisation, so that the best token leads
    by far more than float32 rounding and the prompt matters.
    """
    options: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(sum(map(ord, shape)))
    model = Qwen3ForCausalLM(Qwen3Config(**{**options, **SHAPES[shape]})).float().eval()
    torch.random.set_rng_state(generator_state)
    model.generation_config.eos_token_id = EOS
    return model


@lru_cache(maxsize=4096)
def greedy_tokens(
    shape: str, prompt: tuple[int, ...], max_tokens: int, *, ignore_eos: bool = False
) -> tuple[int, ...]:
    """What transformers' `generate` gives for one prompt alone; EOS included when it comes."""
    model = tiny_qwen3(shape)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=-1 if ignore_eos else EOS,
        pad_token_id=0,
    )
    return tuple(out[0, len(prompt) :].tolist())


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """``length`` ids that depend on ``seed``, never EOS."""
    generator = torch.Generator().manual_seed(seed)
    ids: Sequence[int] = torch.randint(8, VOCAB_SIZE, (length,), generator=generator).tolist()
    return tuple(ids)
