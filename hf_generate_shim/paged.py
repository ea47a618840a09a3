"""`generate(cache_implementation="paged")`: in transformers a detour to its continuous batching.

There it drops mask, stop strings, default length and more, and returns another shape. The engine's
cache is paged anyway, so here the word asks for nothing: the call is a plain one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_generate_shim.batching_options import CONFIG_ARGUMENT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hf_generate_shim.call import HFObject

# Arguments of `generate_batch`, to which the detour passes everything; none changes a token.
_BATCH_ARGUMENTS = {"record_timestamps", "progress_bar", "persistent_manager", "warmup"}
_DROPPED = {"cache_implementation", CONFIG_ARGUMENT, *_BATCH_ARGUMENTS}


def is_paged(arguments: Mapping[str, HFObject]) -> bool:
    """Whether transformers would take the detour: it looks at the argument, never at a config."""
    is_custom = isinstance(arguments.get("custom_generate"), str)  # goes before everything else
    return arguments.get("cache_implementation") == "paged" and not is_custom


def plain_arguments(arguments: Mapping[str, HFObject]) -> dict[str, HFObject]:
    """The same call without the detour. One prompt may be a tensor of one dimension there."""
    plain = {name: value for name, value in arguments.items() if name not in _DROPPED}
    for name in ("inputs", "input_ids", "attention_mask"):
        value = plain.get(name)
        if isinstance(value, torch.Tensor) and value.dim() == 1:
            plain[name] = value.unsqueeze(0)
    return plain
