"""The conditions under which the engine can run a call, apart from processors and criteria.

Each function looks at one side of the call and returns what is not served there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import DynamicCache

from hf_generate_shim.call import CACHE_NAMES
from hf_generate_shim.errors import TokenIdOutOfRange
from nanoserve_adapters.unsupported import Unsupported
from nanoserve_core.errors import InvalidRequest

if TYPE_CHECKING:
    from hf_generate_shim.call import SampleCall
    from hf_generate_shim.criteria import StopRules
    from hf_generate_shim.processors import SamplingDraft
    from hf_generate_shim.prompts import Prompts

# Arguments of the model that the engine honours or need not know.
_KNOWN_ARGUMENTS = {
    "attention_mask",
    "position_ids",
    *CACHE_NAMES,
    "logits_to_keep",  # the engine keeps what it samples from
    "use_cache",  # the tokens are the same
    "return_dict",
    "tokenizer",  # only stop strings read it
    "assistant_tokenizer",
    "output_attentions",  # these two also stand in the config
    "output_hidden_states",
}


def call_reasons(call: SampleCall, *, has_user_cache: bool) -> list[Unsupported]:
    """What config, arguments and surroundings of the call ask that the engine does not do."""
    return [
        *_flag_reasons(call),
        *_argument_reasons(call),
        *_cache_reasons(call, has_user_cache),
        *_chunk_reasons(call),
        *_shape_reasons(call),
        *_autocast_reasons(call),
    ]


def is_readable(call: SampleCall) -> bool:
    """Whether the prompts are rows of token ids with a mask of the same shape."""
    return "inputs_embeds" not in call.model_kwargs and not _shape_reasons(call)


def require_tokens(call: SampleCall) -> None:
    """Raise `InvalidRequest` for an empty batch or a prompt without columns."""
    if call.num_rows == 0 or call.width == 0:
        what = "the batch has no rows" if call.num_rows == 0 else "row 0 has no tokens"
        raise InvalidRequest(
            f"input_ids has the shape {tuple(call.input_ids.shape)}: {what}, expected at least one "
            "token in each row. Start the prompt with a BOS token or text."
        )


def require_known_ids(prompts: Prompts, vocab_size: int) -> None:
    """Raise `TokenIdOutOfRange` for an unmasked id outside the vocabulary."""
    wrong = prompts.mask & ((prompts.ids < 0) | (prompts.ids >= vocab_size))
    if wrong.any():
        row, column = (int(index) for index in np.argwhere(wrong)[0])
        raise TokenIdOutOfRange(
            f"input_ids[{row}, {column}] is {int(prompts.ids[row, column])}, which is not in the "
            f"vocabulary: expected 0 <= id < {vocab_size}. Was it made with another tokenizer?"
        )


def prompt_reasons(call: SampleCall, prompts: Prompts) -> list[Unsupported]:
    """What the mask and the positions say that a pad-free run would not reproduce."""
    reasons = []
    if not prompts.lengths.all():
        row = int(prompts.lengths.argmin())
        reasons.append(
            Unsupported(
                option="attention_mask",
                value=f"(row {row} is all zeros)",
                because="needs at least one unmasked token in each row",
                way_out="Leave such rows out of the batch.",
            )
        )
    positions = call.model_kwargs.get("position_ids")
    if positions is not None and not _are_default(positions, prompts):
        reasons.append(
            Unsupported(
                option="position_ids",
                value=f"(shape {tuple(positions.shape)})",
                because="counts positions over the unmasked tokens",
                way_out="Leave position_ids out.",
            )
        )
    return reasons


def _are_default(positions: torch.Tensor, prompts: Prompts) -> bool:
    if positions.ndim != 2 or positions.shape[1] != prompts.width:
        return False
    return bool((positions.cpu().numpy() == prompts.default_position_ids()).all())


def pad_reasons(call: SampleCall, rules: StopRules) -> list[Unsupported]:
    """Rows that end, and nothing to fill them with."""
    if not rules.has_eos_criterion or call.pad_token_id is not None:
        return []
    return [
        Unsupported(
            option="pad_token_id",
            value=None,
            because="fills rows after their end",
            way_out="Set pad_token_id.",
        )
    ]


def rule_reasons(call: SampleCall, draft: SamplingDraft, rules: StopRules) -> list[Unsupported]:
    """Where processors and criteria disagree in a way that rows cannot follow by themselves."""
    reasons = []
    if rules.stop_strings is not None and call.num_rows > 1 and not rules.has_eos_criterion:
        reasons.append(
            Unsupported(
                option="stop_strings",
                value=rules.stop_strings.stop_strings,
                because="ends each row by itself, and without an end-of-sequence id transformers "
                "lets a row run on until all have stopped",
                way_out="Pass eos_token_id too (-1 for one that never comes).",
            )
        )
    forbidden = {token_id for token_id in draft.min_tokens_ids if 0 <= token_id < draft.vocab_size}
    if draft.min_tokens and forbidden != set(rules.known_eos_ids(draft.vocab_size)):
        reasons.append(
            Unsupported(
                option="min_new_tokens",
                value=draft.min_tokens,
                because="forbids the ids that end a row until then, and here they are others",
                way_out="Use the same eos_token_id for both.",
            )
        )
    return reasons


def length_reasons(
    call: SampleCall, prompts: Prompts, rules: StopRules, max_model_len: int
) -> list[Unsupported]:
    """No length, or one beyond the engine's; transformers goes on with a warning."""
    if math.isinf(rules.max_length):
        return [
            Unsupported(
                option="max_length",
                value=None,
                because="needs an upper limit for each row",
                way_out="Pass max_new_tokens.",
            )
        ]
    longest, max_tokens = int(prompts.lengths.max()), rules.max_tokens(call.width)
    if longest + max_tokens <= max_model_len:
        return []
    return [
        Unsupported(
            option="max_length",
            value=longest + max_tokens,
            because=f"holds at most max_model_len={max_model_len} tokens in a row",
            way_out="Lower max_new_tokens, or install with a larger max_model_len.",
        )
    ]


def _flag_reasons(call: SampleCall) -> list[Unsupported]:
    because = {
        "synced_gpus": "keeps no step with other processes, and needs all weights in this one",
        "is_assistant": "drafts no tokens for another model",
        "output_attentions": "keeps no attention weights",
        "output_hidden_states": "keeps no hidden states",
    }
    values = {name: getattr(call.generation_config, name, False) for name in because}
    values["synced_gpus"] = call.synced_gpus
    return [
        Unsupported(option=name, value=value, because=because[name], way_out=f"Pass {name}=False.")
        for name, value in values.items()
        if value
    ]


def _argument_reasons(call: SampleCall) -> list[Unsupported]:
    return [
        Unsupported(
            option=name,
            value=f"({type(value).__name__})",
            because="passes token ids and a mask to the model, nothing else",
            way_out=f"Leave {name} out.",
        )
        for name, value in call.model_kwargs.items()
        if value is not None and name not in _KNOWN_ARGUMENTS
    ]


def _cache_reasons(call: SampleCall, has_user_cache: bool) -> list[Unsupported]:
    if has_user_cache:
        return [
            Unsupported(
                option="past_key_values",
                value=type(call.cache).__name__,
                because="neither reads nor fills a cache that the caller keeps",
                way_out="Leave it out: the engine finds shared prefixes by itself.",
            )
        ]
    implementation = call.generation_config.cache_implementation
    is_special = any(word in (implementation or "") for word in ("offloaded", "quantized"))
    is_other = call.cache is not None and type(call.cache) is not DynamicCache
    if not is_special and not (is_other and call.wants_dict):
        return []
    return [
        Unsupported(
            option="cache_implementation",
            value=implementation,
            because="keeps its own paged cache, and returns a DynamicCache in a dict",
            way_out="Leave it out.",
        )
    ]


def _chunk_reasons(call: SampleCall) -> list[Unsupported]:
    config = call.generation_config
    if getattr(config, "prefill_chunk_size", None) is None or config.use_cache:
        return []
    return [
        Unsupported(
            option="prefill_chunk_size",
            value=config.prefill_chunk_size,
            because="leaves to transformers to refuse it together with use_cache=False",
            way_out="Leave one of the two out.",
        )
    ]


def _shape_reasons(call: SampleCall) -> list[Unsupported]:
    ids, mask = call.input_ids, call.attention_mask
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        option, value = "input_ids", str(ids.dtype)
    elif mask is not None and mask.shape != ids.shape:
        option, value = "attention_mask", f"(shape {tuple(mask.shape)})"
    else:
        return []
    return [
        Unsupported(
            option=option,
            value=value,
            because="needs integer ids and a mask of their shape",
            way_out="Use what the tokenizer returns.",
        )
    ]


def _autocast_reasons(call: SampleCall) -> list[Unsupported]:
    # Of the ids: an offloaded model's parameters are on the meta device, which has no autocast.
    if not torch.is_autocast_enabled(call.input_ids.device.type):
        return []
    return [
        Unsupported(
            option="autocast",
            value=True,
            because="computes in the dtype of the weights",
            way_out="Call generate outside torch.autocast.",
        )
    ]
