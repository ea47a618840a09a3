"""Reads transformers' logits processors back into `SamplingParams`.

Each is known by its exact class and read from its own attributes. A subclass, an unknown class or a
parameter without a counterpart is never guessed at: it comes back as `Unsupported`, so that no
processor is lost. The engine's order is penalty, biases and masks, rules for single steps,
temperature, top-k, top-p, min-p; a list in which the order matters and differs is refused too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from transformers.generation import logits_process as hf

from hf_generate_shim.call import HFObject
from hf_generate_shim.step_rules import StepRule
from nanoserve_adapters.unsupported import Unsupported

if TYPE_CHECKING:
    from hf_generate_shim.prompts import Prompts


@dataclass
class SamplingDraft:
    """The sampling options of one call while its processors are read."""

    prompts: Prompts
    vocab_size: int
    do_sample: bool
    options: dict[str, Any] = field(default_factory=dict)  # Any: SamplingParams checks each value
    min_tokens: int = 0
    min_tokens_ids: set[int] = field(default_factory=set)
    """What ``min_tokens`` forbids; must equal the ids that end a row, which the engine forbids."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: list[tuple[int, ...]] = field(default_factory=list)
    step_rules: list[StepRule] = field(default_factory=list)
    last_warper: int = 0
    """Rank of the latest of temperature, top-k, top-p, min-p: last, in order, each once."""
    renormalizes: bool = False
    """Scores are log-probabilities: the tokens are the same, and nothing may come after it."""

    @property
    def is_past_masks(self) -> bool:
        """True when biases and masks of all steps would come too late."""
        return bool(self.last_warper or self.step_rules)

    @property
    def has_finite_bias(self) -> bool:
        """True when a bias was added that does not simply forbid its token."""
        return any(math.isfinite(value) for value in self.logit_bias.values())


Reader: TypeAlias = Callable[[HFObject, SamplingDraft], "str | None"]
"""Takes a processor of the class it is registered for. Returns why the engine cannot do the same
(completing "it ..."), or None when the draft now says it all."""

_WRONG_ORDER = "applies it before a processor that transformers would run first here"


def read_processors(
    processors: Iterable[object],
    draft: SamplingDraft,
    generation_config: HFObject,
) -> list[Unsupported]:
    """Fill ``draft`` from the processors in their order.

    Returns why some could not be translated; ``generation_config`` is only read for the messages.
    """
    reasons = []
    for processor in processors:
        because = _READERS.get(type(processor), _unknown)(processor, draft)
        if because is not None:
            reasons.append(_unsupported(processor, because, generation_config))
    return reasons


def _unknown(processor: object, draft: SamplingDraft) -> str | None:
    del draft
    return f"has no counterpart of {type(processor).__name__} in its sampler"


def _repetition_penalty(processor: HFObject, draft: SamplingDraft) -> str | None:
    if not _ignores_exactly_the_pads(processor.prompt_ignore_length, draft.prompts):
        return "sees only unmasked prompt tokens, and this processor would see others"
    if draft.is_past_masks or draft.has_finite_bias or "repetition_penalty" in draft.options:
        return _WRONG_ORDER
    draft.options["repetition_penalty"] = processor.penalty
    return None


def _ignores_exactly_the_pads(ignored: object, prompts: Prompts) -> bool:
    """5.24 is given each row's number of left pads; 5.17 takes one number, and is given none."""
    if ignored is None or isinstance(ignored, int):
        return prompts.is_masked_before(np.full(prompts.num_rows, ignored or 0, dtype=np.int64))
    if isinstance(ignored, torch.Tensor) and tuple(ignored.shape) == (prompts.num_rows,):
        return prompts.is_masked_before(ignored.cpu().numpy())
    return False


def _sequence_bias(processor: HFObject, draft: SamplingDraft) -> str | None:
    biases: Mapping[tuple[int, ...], float] = processor.sequence_bias
    if draft.is_past_masks:
        return _WRONG_ORDER
    if any(not token_id < draft.vocab_size for ids in biases for token_id in ids):
        return f"has no token ids beyond the vocabulary of {draft.vocab_size}"
    words = [ids for ids, value in biases.items() if len(ids) > 1]
    if any(value == math.inf or math.isnan(value) for value in biases.values()):
        return "has no bias of +inf or NaN"
    if any(biases[ids] != -math.inf for ids in words):
        return "has no finite bias on a sequence of several tokens"
    if words and not _can_match_alone(words, draft.prompts):
        return "sees only unmasked prompt tokens, and a word may be as long as the shortest prompt"
    draft.bad_words += words
    for ids, value in biases.items():
        if len(ids) == 1:
            draft.logit_bias[ids[0]] = draft.logit_bias.get(ids[0], 0.0) + value
    return None


def _can_match_alone(words: list[tuple[int, ...]], prompts: Prompts) -> bool:
    """Whether the pad-free row matches where transformers' padded one does."""
    longest = max(map(len, words))
    return not prompts.has_holes and longest <= int(prompts.lengths.min())


def _min_length(processor: HFObject, draft: SamplingDraft) -> str | None:
    return _forbid_until(processor.min_length - draft.prompts.width, processor.eos_token_id, draft)


def _min_new_tokens(processor: HFObject, draft: SamplingDraft) -> str | None:
    num_tokens = processor.prompt_length_to_skip + processor.min_new_tokens - draft.prompts.width
    return _forbid_until(num_tokens, processor.eos_token_id, draft)


def _forbid_until(num_tokens: int, eos_token_id: torch.Tensor, draft: SamplingDraft) -> str | None:
    if draft.is_past_masks:
        return _WRONG_ORDER
    if num_tokens > 0:
        draft.min_tokens = max(draft.min_tokens, num_tokens)
        draft.min_tokens_ids.update(eos_token_id.flatten().tolist())
    return None


def _suppress_tokens(processor: HFObject, draft: SamplingDraft) -> str | None:
    if draft.last_warper:
        return _WRONG_ORDER
    token_ids = _known_ids(processor.suppress_tokens, draft)
    draft.logit_bias.update(dict.fromkeys(token_ids, -math.inf))
    # A token that was forced before is suppressed after all; biases come before forced tokens.
    draft.step_rules += [
        StepRule(step=rule.step, token_ids=token_ids, is_forced=False)
        for rule in draft.step_rules
        if not set(rule.token_ids).isdisjoint(token_ids)
    ]
    return None


def _suppress_at_begin(processor: HFObject, draft: SamplingDraft) -> str | None:
    token_ids = _known_ids(processor.begin_suppress_tokens, draft)
    return _step_rule(draft, processor.begin_index, token_ids, is_forced=False)


def _forced_bos(processor: HFObject, draft: SamplingDraft) -> str | None:
    """Of use after a prompt of one token only."""
    return _forced(draft, 1, torch.tensor([processor.bos_token_id]))


def _forced_eos(processor: HFObject, draft: SamplingDraft) -> str | None:
    return _forced(draft, processor.max_length - 1, processor.eos_token_id)


def _forced(draft: SamplingDraft, length: float, forced: torch.Tensor) -> str | None:
    token_ids = _known_ids(forced, draft)
    if len(token_ids) < forced.numel():
        return f"has no token ids beyond the vocabulary of {draft.vocab_size}"
    return _step_rule(draft, length, token_ids, is_forced=True)


def _step_rule(
    draft: SamplingDraft, length: float, token_ids: tuple[int, ...], *, is_forced: bool
) -> str | None:
    """A rule for the rows when they have ``length`` columns, pads included."""
    if draft.last_warper:
        return _WRONG_ORDER
    step = length - draft.prompts.width
    if step >= 0 and step == int(step) and token_ids:
        draft.step_rules.append(StepRule(step=int(step), token_ids=token_ids, is_forced=is_forced))
    return None


def _known_ids(token_ids: torch.Tensor, draft: SamplingDraft) -> tuple[int, ...]:
    """Others match no column, in transformers too."""
    return tuple(i for i in token_ids.flatten().tolist() if 0 <= i < draft.vocab_size)


def _temperature(processor: HFObject, draft: SamplingDraft) -> str | None:
    return _warper(draft, 1, "temperature", processor.temperature)


def _top_k(processor: HFObject, draft: SamplingDraft) -> str | None:
    return _filter(processor, draft, 2, "top_k")


def _top_p(processor: HFObject, draft: SamplingDraft) -> str | None:
    if processor.top_p == 0:
        return "keeps at least some probability mass"
    return _filter(processor, draft, 3, "top_p")


def _min_p(processor: HFObject, draft: SamplingDraft) -> str | None:
    return _filter(processor, draft, 4, "min_p")


def _filter(processor: HFObject, draft: SamplingDraft, rank: int, name: str) -> str | None:
    if processor.filter_value != -math.inf:
        return "sets filtered scores to -inf only"
    if name != "top_k" and processor.min_tokens_to_keep != 1:  # top_k has taken it into its number
        return "keeps at least one token, no other number"
    return _warper(draft, rank, name, getattr(processor, name))


def _warper(draft: SamplingDraft, rank: int, name: str, value: float) -> str | None:
    if not draft.do_sample:
        return "applies no filters in a greedy search"
    if rank <= draft.last_warper:
        return "applies temperature, top-k, top-p and min-p once each and in this order"
    draft.last_warper = rank
    draft.options[name] = value
    return None


def _renormalize(processor: HFObject, draft: SamplingDraft) -> str | None:
    del processor
    draft.renormalizes = True
    draft.last_warper = _AFTER_ALL
    return None


_AFTER_ALL = 5
"""Rank beyond every warper's."""

_READERS: Mapping[type, Reader] = {
    hf.RepetitionPenaltyLogitsProcessor: _repetition_penalty,
    hf.SequenceBiasLogitsProcessor: _sequence_bias,
    hf.NoBadWordsLogitsProcessor: _sequence_bias,
    hf.MinLengthLogitsProcessor: _min_length,
    hf.MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    hf.SuppressTokensLogitsProcessor: _suppress_tokens,
    hf.SuppressTokensAtBeginLogitsProcessor: _suppress_at_begin,
    hf.ForcedBOSTokenLogitsProcessor: _forced_bos,
    hf.ForcedEOSTokenLogitsProcessor: _forced_eos,
    hf.TemperatureLogitsWarper: _temperature,
    hf.TopKLogitsWarper: _top_k,
    hf.TopPLogitsWarper: _top_p,
    hf.MinPLogitsWarper: _min_p,
    hf.LogitNormalization: _renormalize,
}

# The argument of `generate` that makes transformers add a processor, for messages.
_ARGUMENTS: Mapping[str, str] = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "SequenceBiasLogitsProcessor": "sequence_bias",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "TemperatureLogitsWarper": "temperature",
    "TopHLogitsWarper": "top_h",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
    "TypicalLogitsWarper": "typical_p",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "WatermarkLogitsProcessor": "watermarking_config",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
    "LogitNormalization": "renormalize_logits",
}


def _unsupported(
    processor: object,
    because: str,
    generation_config: HFObject,
) -> Unsupported:
    name = type(processor).__name__
    argument = _ARGUMENTS.get(name)
    value = getattr(generation_config, argument, None) if argument else None
    if isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
        argument, value = "prefix_allowed_tokens_fn", "(a function)"
    if argument is None or value is None:  # the user's own, whatever its class
        argument, value = "logits_processor", name
    return Unsupported(
        option=argument,
        value=value,
        because=because,
        way_out=f"Leave {argument} out to let rows run freely.",
    )
