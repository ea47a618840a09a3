"""Random Qwen3 models of any shape, and the logits transformers computes with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

VOCAB_SIZE = 199


def random_config(**overrides: Any) -> Qwen3Config:  # Any: Qwen3Config's fields
    """2 layers of hidden size 64 with 4 query and 2 key/value heads, unless overridden."""
    options: dict[str, Any] = {  # Any: as above
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        # Ten times the usual: the prompt matters, and the best token leads by more than rounding.
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 7,
        "pad_token_id": None,
    }
    return Qwen3Config(**{**options, **overrides})


def random_model(
    *, seed: int = 0, **overrides: Any
) -> Qwen3ForCausalLM:  # Any: Qwen3Config's fields
    """A float32 model in eval mode, the same for the same seed; norms and biases are random too.

    Freshly made ones are 1 and 0, which would hide that somebody leaves them out.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(random_config(**overrides)).float().eval()
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.data.normal_(std=0.3)
    return model


def frozen(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The same model with no parameter that requires grad: its weights may be fused."""
    return model.requires_grad_(False)


def random_tokens(length: int, *, seed: int = 0) -> list[int]:
    """``length`` token ids that depend on ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
    return tokens


@torch.no_grad()
def reference_logits(model: Qwen3ForCausalLM, token_ids: Sequence[int]) -> Tensor:
    """transformers' logits at all positions: [tokens, vocab_size] float32."""
    logits: Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return logits.float()
