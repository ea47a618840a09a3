"""Calls of `generate` on a tiny model: batches, captured arguments, results side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from packaging.version import Version

from hf_generate_shim.call import SampleCall
from nanoserve_adapters.testing import tiny_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Qwen3ForCausalLM

Options = dict[str, Any]  # Any: arguments of transformers' generate

PAD = 256
EOS = 258
VOCAB_SIZE = 263
PENALTY_SKIPS_PADS = Version(transformers.__version__) >= Version("5.24")
"""Before that the repetition penalty also sees the pads on the left, and padded calls fall back."""
CACHE = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


def new_model(**config: Any) -> Qwen3ForCausalLM:  # Any: fields of Qwen3Config
    """A tiny float32 model that nothing else uses, without an EOS of its own."""
    model = tiny_model(**{"eos_token_id": None, "max_position_embeddings": 256, **config})
    model.generation_config.eos_token_id = config.get("eos_token_id")
    return model


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random bytes."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return [int(i) for i in torch.randint(0, 256, (length,), generator=generator)]


def batch(*rows: Sequence[int], pad: int = PAD) -> Options:
    """``input_ids`` and ``attention_mask`` of the rows, padded on the left."""
    width = max(map(len, rows))
    ids = [[pad] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def ragged(num_rows: int = 4, seed: int = 0) -> Options:
    """Prompts of distinct lengths."""
    return batch(*(prompt(3 + 2 * row, seed) for row in range(num_rows)))


def capture(model: Qwen3ForCausalLM, **options: Any) -> SampleCall:  # Any: see Options
    """What transformers would hand to `_sample`, by way of its hook for custom loops."""
    calls: list[SampleCall] = []

    def loop(model: Qwen3ForCausalLM, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
        names = ("logits_processor", "stopping_criteria", "generation_config")
        named = {name: given.pop(name) for name in names}
        given.pop("synced_gpus", None)
        calls.append(SampleCall(model=model, input_ids=input_ids, **named, model_kwargs=given))
        return input_ids

    model.generate(**options, custom_generate=loop)
    return calls[0]


def new_tokens(output: torch.Tensor, options: Options) -> list[list[int]]:
    """The columns after the prompt."""
    width = options["input_ids"].shape[1]
    return [[int(token) for token in row] for row in output[:, width:]]
