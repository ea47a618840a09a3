"""`SampleCall`: what transformers hands to `_sample`, once its own preparation is done.

Knows the names of the arguments in every supported transformers version, and nothing of what is
done with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

HFObject: TypeAlias = Any
"""An object of transformers or of its user: a config, processor, criterion, streamer or cache. No
types are published for these, so each is compared with an exact class before it is read."""

CACHE_NAMES = ("cache", "past_key_values")
"""The cache, as argument and as output field: ``cache`` since transformers 5.24, before that
``past_key_values``."""


@dataclass(frozen=True, kw_only=True)
class SampleCall:
    """The arguments of one call of `_sample`."""

    model: nn.Module
    input_ids: torch.Tensor
    """[num_rows, width]: prompts with pads, already repeated for ``num_return_sequences``."""
    logits_processor: Sequence[HFObject]
    """The final list, the config's and the user's own, in the order in which they run."""
    stopping_criteria: Sequence[HFObject]
    generation_config: HFObject
    """The merged config, a copy that belongs to this call."""
    synced_gpus: bool = False
    streamer: HFObject = None
    model_kwargs: Mapping[str, HFObject]

    @property
    def num_rows(self) -> int:
        """Rows of the output: batch size times ``num_return_sequences``."""
        return int(self.input_ids.shape[0])

    @property
    def width(self) -> int:
        """Columns of the prompt tensor, pads included."""
        return int(self.input_ids.shape[1])

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        config: HFObject = self.model.config
        return int(config.vocab_size)

    @property
    def attention_mask(self) -> torch.Tensor | None:
        """[num_rows, width], zero where a token is masked; None when none is."""
        return self.model_kwargs.get("attention_mask")

    @property
    def cache(self) -> HFObject:
        """The cache that transformers made for this call, or that the user passed, or None."""
        found = (self.model_kwargs.get(name) for name in CACHE_NAMES)
        return next((cache for cache in found if cache is not None), None)

    @property
    def pad_token_id(self) -> int | None:
        """What fills the rows that have ended, as transformers resolved it."""
        pad = getattr(self.generation_config, "_pad_token_tensor", None)
        return None if pad is None else int(pad)

    @property
    def wants_dict(self) -> bool:
        """True when the caller gets a `GenerateDecoderOnlyOutput`, not a tensor."""
        return bool(self.generation_config.return_dict_in_generate)

    @property
    def wants_scores(self) -> bool:
        """True when the caller gets the processed scores of every step."""
        return self.wants_dict and bool(self.generation_config.output_scores)

    @property
    def wants_logits(self) -> bool:
        """True when the caller gets the raw logits of every step."""
        return self.wants_dict and bool(self.generation_config.output_logits)
