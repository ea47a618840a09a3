"""Every way back to transformers' own loop: foretold, counted with its reason, refused when strict.

Oracle: the tokens of the same call before the model was installed.
"""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, TypeAlias

import pytest
import torch
from transformers import DynamicCache

import hf_generate_shim
from hf_generate_shim import NanoserveFallbackWarning, Path
from nanoserve_core.errors import UnsupportedOption
from tests.hf_generate_shim.calls import CACHE, Options, batch, prompt, ragged

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import Qwen3ForCausalLM

    Build: TypeAlias = Callable[[Qwen3ForCausalLM], Options]

ROW = batch(prompt(6))
DICT: Options = {"return_dict_in_generate": True}


def own_loop(model: Qwen3ForCausalLM, input_ids: torch.Tensor, **kwargs: object) -> torch.Tensor:
    """A decoding loop of the user's."""
    del model, kwargs
    return torch.cat([input_ids, input_ids], dim=1)


def embeddings(model: Qwen3ForCausalLM) -> Options:
    """The prompt as vectors; they go without ids."""
    return {"inputs_embeds": model.model.embed_tokens(ROW["input_ids"]).detach(), "input_ids": None}


def masked_row(model: Qwen3ForCausalLM) -> Options:
    """One row is all zeros."""
    del model
    options = ragged()
    options["attention_mask"][1] = 0
    return options


def shifted(model: Qwen3ForCausalLM) -> Options:
    """Positions that begin at 3."""
    del model
    return {"position_ids": torch.arange(3, 9)[None]}


def hooked(model: Qwen3ForCausalLM) -> Options:
    """A forward hook of the user's."""
    model.model.layers[1].register_forward_hook(lambda *_: None)
    return {}


FALLBACKS: dict[str, tuple[str, Build]] = {
    "beams": ("num_beams", lambda _: {"num_beams": 2}),
    "own loop": ("custom_generate", lambda _: {"custom_generate": own_loop}),
    "draft model": ("assistant_model", lambda model: {"assistant_model": copy.deepcopy(model)}),
    "prompt lookup": ("prompt_lookup_num_tokens", lambda _: {"prompt_lookup_num_tokens": 2}),
    "embeddings": ("inputs_embeds", embeddings),
    "own cache": ("past_key_values", lambda _: {CACHE: DynamicCache()}),
    "masked row": ("attention_mask", masked_row),
    "positions": ("position_ids", shifted),
    "hidden states": ("output_hidden_states", lambda _: {**DICT, "output_hidden_states": True}),
    "drafting": ("is_assistant", lambda _: {**DICT, "output_scores": True, "is_assistant": True}),
    "static cache": ("cache_implementation", lambda _: {**DICT, "cache_implementation": "static"}),
    "length": ("max_length", lambda _: {"max_new_tokens": 251, "eos_token_id": list(range(60))}),
    "hook": ("model", hooked),
}  # fmt: skip


def call_of(model: Qwen3ForCausalLM, name: str) -> tuple[str, Options]:
    """The option that a case is about, and its arguments; `hooked` changes the model."""
    option, build = FALLBACKS[name]
    return option, {**ROW, "max_new_tokens": 5, **build(model)}


def fresh(options: Options) -> Options:
    """The arguments for one more call: a cache is filled by the first."""
    return {**options, CACHE: DynamicCache()} if CACHE in options else options


def tokens(output: object) -> list[list[int]]:
    """Of either form of output."""
    found: torch.Tensor = getattr(output, "sequences", output)
    return found.tolist()


def quiet(model: Qwen3ForCausalLM, options: Options) -> list[list[int]]:
    """The tokens of a call, whatever transformers has to say about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tokens(model.generate(**fresh(options)))


@pytest.mark.parametrize("name", FALLBACKS)
def test_fallback_gives_transformers_tokens_and_counts_its_reason(
    model: Qwen3ForCausalLM, name: str
) -> None:
    option, options = call_of(model, name)
    expected = quiet(model, options)

    with (
        hf_generate_shim.installed(model, num_kvcache_blocks=64) as handle,
        pytest.warns(NanoserveFallbackWarning, match=f"^{option}="),
    ):
        output = model.generate(**fresh(options))

    assert tokens(output) == expected
    assert (handle.counters.fast, handle.counters.fallback) == (0, 1)
    assert [reason.partition(":")[0] for reason in handle.counters.reasons] == [option]


@pytest.mark.parametrize("name", FALLBACKS)
def test_fallback_is_foretold_and_refused_when_strict(model: Qwen3ForCausalLM, name: str) -> None:
    option, options = call_of(model, name)

    with hf_generate_shim.installed(model, strict=True, num_kvcache_blocks=64) as handle:
        explanation = hf_generate_shim.explain(model, **fresh(options))
        with pytest.raises(UnsupportedOption, match=f"^{option}=.*strict=True"):
            model.generate(**fresh(options))

    assert explanation.path is Path.FALLBACK
    assert explanation.reasons[0].option == option
    assert str(explanation).startswith(f"fallback: {option}=")
    assert handle.counters.fallback == 1
    assert handle.stats().steps == 0
