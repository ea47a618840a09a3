"""`Feature` and `SlotRules`: what a slot's request asks of the sampler, made ready when it is
assigned.

`Feature` is known on the host, so that the sampler chooses its path without asking the device.
`SlotRules` holds what only a few requests have: biases, bad words, processors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag, auto
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from nanoserve_core.request import LogitsProcessor, Request
    from nanoserve_core.request_group import RequestGroup
    from nanoserve_core.sampling_params import SamplingParams


class Feature(IntFlag):
    """One bit for each thing beyond the argmax; a plain greedy request has none."""

    SAMPLED = auto()
    TOP_K = auto()
    TOP_P = auto()
    MIN_P = auto()
    PENALTIES = auto()
    COUNTS = auto()
    """Presence or frequency penalty: the output's token counts are kept."""
    TOKEN_RULES = auto()
    """Biases or bad words."""
    MIN_TOKENS = auto()
    PROCESSORS = auto()
    """The request's own processors."""
    BATCH_PROCESSORS = auto()
    """Plugins' processors of the whole batch."""
    HISTORY = auto()
    """Something reads the tokens so far: they are kept on the device."""
    RAW_LOGPROBS = auto()
    PROCESSED_LOGPROBS = auto()
    OUTPUT_LOGITS = auto()
    OUTPUT_SCORES = auto()
    GROUP = auto()
    """The token is chosen by the request's group."""
    FAILED = auto()
    """A plugin could not take the request."""
    GRAMMAR = auto()
    """A grammar says which tokens may come; the sampler leaves it out while it says nothing."""


class Phrases(NamedTuple):
    """Bad words of equal length > 1."""

    prefixes: Tensor
    """[words, length - 1] int64."""
    last: Tensor
    """[words] int64: banned where the tokens so far end with the prefix."""


@dataclass(frozen=True, slots=True)
class SlotRules:
    """The rare wishes of one request, as tensors on the device."""

    bias_ids: Tensor
    """[biases] int64, without repetition."""
    bias_values: Tensor
    """[biases] float32."""
    banned_ids: Tensor
    """[words] int64: bad words of one token."""
    phrases: tuple[Phrases, ...]
    stop_ids: Tensor
    """[ids] int64: what may not end the sequence before ``min_tokens``."""
    processors: tuple[LogitsProcessor, ...]
    num_logprobs: int
    group: RequestGroup | None
    member: int
    """Place in ``group``."""


def features_of(request: Request, vocab_size: int) -> int:
    """The `Feature` bits that follow from the request alone."""
    sampling = request.sampling
    counts = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    raw = sampling.logprobs_mode == "raw_logprobs"
    asked = {
        Feature.SAMPLED: not sampling.is_greedy,
        Feature.TOP_K: effective_top_k(sampling, vocab_size) > 0,
        Feature.TOP_P: sampling.top_p < 1,
        Feature.MIN_P: sampling.min_p > 0,
        Feature.PENALTIES: counts or sampling.repetition_penalty != 1,
        Feature.COUNTS: counts,
        Feature.TOKEN_RULES: bool(sampling.logit_bias or sampling.bad_words_ids),
        Feature.MIN_TOKENS: sampling.min_tokens > 0,
        Feature.PROCESSORS: bool(request.logits_processors),
        Feature.HISTORY: sampling.needs_history or bool(request.logits_processors),
        Feature.RAW_LOGPROBS: sampling.logprobs is not None and raw,
        Feature.PROCESSED_LOGPROBS: sampling.logprobs is not None and not raw,
        Feature.OUTPUT_LOGITS: request.output_logits,
        Feature.OUTPUT_SCORES: request.output_scores,
        Feature.GROUP: request.group is not None,
    }
    return sum(feature.value for feature, is_asked in asked.items() if is_asked)


def effective_top_k(sampling: SamplingParams, vocab_size: int) -> int:
    """``top_k``, or 0 where it keeps the whole vocabulary."""
    return sampling.top_k if sampling.top_k < vocab_size else 0


def rules_of(request: Request, eos_token_ids: tuple[int, ...], device: torch.device) -> SlotRules:
    """Bring the rare wishes of ``request`` to the device."""
    sampling = request.sampling

    def ids(tokens: Iterable[int]) -> Tensor:
        return torch.tensor(list(tokens), dtype=torch.int64, device=device)

    values = list(sampling.logit_bias.values())
    words = sampling.bad_words_ids
    return SlotRules(
        bias_ids=ids(sampling.logit_bias),
        bias_values=torch.tensor(values, dtype=torch.float32, device=device),
        banned_ids=ids(word[0] for word in words if len(word) == 1),
        phrases=tuple(
            Phrases(
                torch.stack([ids(word[:-1]) for word in words if len(word) == length]),
                ids(word[-1] for word in words if len(word) == length),
            )
            for length in sorted({len(word) for word in words} - {1})
        ),
        stop_ids=ids({*eos_token_ids, *sampling.stop_token_ids}),
        processors=request.logits_processors,
        num_logprobs=sampling.logprobs or 0,
        group=request.group,
        member=request.group.request_ids.index(request.request_id) if request.group else 0,
    )
