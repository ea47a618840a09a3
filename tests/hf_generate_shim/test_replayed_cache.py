"""The cache in a dict output is computed once, when somebody looks; copies leave the model out."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from tests.hf_generate_shim.calls import CACHE, Options, ragged

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle

CALL: Options = {**ragged(), "max_new_tokens": 5, "return_dict_in_generate": True}


def test_cache_is_computed_at_first_use_only(model: Qwen3ForCausalLM, handle: Handle) -> None:
    cache = getattr(model.generate(**CALL), CACHE)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))

    before = len(calls)
    lengths = [cache.get_seq_length(), cache.get_seq_length()]

    assert (before, lengths, len(calls)) == (0, [9 + 5 - 1] * 2, 1)
    assert not cache.layers[0].keys.requires_grad
    assert handle.counters.fast == 1


def test_copies_and_pickles_hold_the_values_and_not_the_model(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    cache = getattr(model.generate(**CALL), CACHE)

    twin = copy.deepcopy(cache)
    file = io.BytesIO()
    torch.save(cache, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)

    num_values = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert len(file.getvalue()) < 4 * num_values + 20_000
    for other in (twin, loaded):
        assert isinstance(other, DynamicCache)
        for layer, expected in zip(other.layers, cache.layers, strict=True):
            assert torch.equal(layer.keys, expected.keys)
            assert torch.equal(layer.values, expected.values)
    assert handle.counters.fast == 1


def test_cache_grows_like_any_other(model: Qwen3ForCausalLM, handle: Handle) -> None:
    output = model.generate(**CALL)
    cache = getattr(output, CACHE)

    with torch.no_grad():
        model(output.sequences[:, -1:], use_cache=True, **{CACHE: cache})

    assert cache.get_seq_length() == 14
    assert handle.counters.fast == 1
