"""Decides how a call of `_sample` is served; the one place that does.

Everything is read from what transformers has prepared: merged config, processors, criteria, model
arguments. Nothing is run, drawn or changed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from hf_generate_shim.call_options import CallOptions
from hf_generate_shim.conditions import (
    call_reasons,
    is_readable,
    length_reasons,
    pad_reasons,
    prompt_reasons,
    require_known_ids,
    require_tokens,
    rule_reasons,
)
from hf_generate_shim.criteria import StopRules, read_criteria
from hf_generate_shim.processors import SamplingDraft, read_processors
from hf_generate_shim.prompts import Prompts
from hf_generate_shim.task import Task
from nanoserve_adapters.unsupported import Unsupported
from nanoserve_core.errors import ConfigError
from nanoserve_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_generate_shim.call import SampleCall


class Path(str, Enum):
    """Who runs the decoding loop."""

    FAST = "fast"
    """The engine, with its own sampler; rows run freely."""
    LOCKSTEP = "lockstep"
    """The engine computes; transformers' processors and criteria see the whole batch each step."""
    FALLBACK = "fallback"
    """transformers' own loop."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Route:
    """The way of one call: a ``task`` when the engine runs it, and why it is not a faster way."""

    path: Path
    reasons: tuple[Unsupported, ...] = ()
    task: Task | None = None

    @classmethod
    def fallback(cls, reasons: Sequence[Unsupported]) -> Route:
        """transformers' own loop, for these reasons; the first is the one to report."""
        return cls(path=Path.FALLBACK, reasons=tuple(reasons))


_ONE_BLOCK = Unsupported(
    option="rng",
    value="hf",
    because="draws for all rows of a step at once, as transformers does",
    way_out="Install with rng='row' to let rows run freely.",
)


def decide(
    call: SampleCall, *, max_model_len: int, has_user_cache: bool, rng: str = "row"
) -> Route:
    """The route of ``call``. Waits for the device, since it reads the ids and the mask.

    What the engine can compute, but its sampler alone cannot choose, goes in lockstep.

    Raises `InvalidRequest` for an empty batch or prompt, `TokenIdOutOfRange`, and `ConfigError` for
    wrong options of nanoserve's own.
    """
    reasons = call_reasons(call, has_user_cache=has_user_cache)
    if not is_readable(call):
        return Route.fallback(reasons)
    require_tokens(call)
    prompts = Prompts.read(call.input_ids, call.attention_mask)
    require_known_ids(prompts, call.vocab_size)
    reasons += prompt_reasons(call, prompts)
    draft = SamplingDraft(
        prompts=prompts,
        vocab_size=call.vocab_size,
        do_sample=bool(call.generation_config.do_sample),
    )
    rules = StopRules()
    tied = read_processors(call.logits_processor, draft, call.generation_config)
    tied += read_criteria(call.stopping_criteria, rules)
    tied += rule_reasons(call, draft, rules)
    reasons += pad_reasons(call, rules)
    if not reasons:
        reasons = length_reasons(call, prompts, rules, max_model_len)
    if reasons:
        return Route.fallback([*reasons, *tied])
    options = CallOptions.read(
        call.generation_config, num_rows=call.num_rows, pad_token_id=call.pad_token_id
    )
    draws_one_block = draft.do_sample and rng == "hf" and not options.has_seeds
    if draws_one_block:
        tied.append(_ONE_BLOCK)
    lockstep = Task(
        rows=tuple(prompts.rows()),
        sampling=_bounds(rules.max_tokens(call.width)),
        pad_token_id=call.pad_token_id,
        options=options,
        is_lockstep=True,
        draws_one_block=draws_one_block,
        output_logits=call.wants_logits,
        output_scores=call.wants_scores,
    )
    if not tied:
        task = _free_task(call, draft, rules, options)
        if isinstance(task, Task):
            return Route(path=Path.FAST, task=task)
        tied = [task]
    return Route(path=Path.LOCKSTEP, reasons=tuple(tied), task=lockstep)


def _bounds(max_tokens: int) -> SamplingParams:
    """Of a lockstep call: what is sampled is none of the engine's business."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def _free_task(
    call: SampleCall, draft: SamplingDraft, rules: StopRules, options: CallOptions
) -> Task | Unsupported:
    """The task of rows that run freely, or why they cannot."""
    if options.logprobs is not None:
        draft.options |= {"logprobs": 0, "logprobs_mode": options.logprobs}
    try:
        sampling = _sampling(call, draft, rules)
    except ConfigError as error:  # a value that transformers lets pass
        return Unsupported(
            option="generation_config",
            value=type(call.generation_config).__name__,
            because=f"refuses one of its values ({error})",
            way_out="Change that value.",
        )
    pad = call.pad_token_id
    # Without processors transformers' scores are its logits: one of the two is enough.
    scores_are_logits = not call.logits_processor
    return Task(
        rows=tuple(draft.prompts.rows()),
        sampling=sampling,
        pad_token_id=pad,
        time_limit=rules.time_limit,
        stop_strings=rules.stop_strings,
        options=options,
        step_rules=tuple(draft.step_rules),
        renormalizes_scores=draft.renormalizes,
        output_logits=call.wants_logits or (call.wants_scores and scores_are_logits),
        output_scores=call.wants_scores and not scores_are_logits,
    )


def _sampling(call: SampleCall, draft: SamplingDraft, rules: StopRules) -> SamplingParams:
    max_tokens = rules.max_tokens(call.width)
    options = {"temperature": 1.0, **draft.options} if draft.do_sample else dict(draft.options)
    if not draft.do_sample:
        options["temperature"] = 0.0
    return SamplingParams(
        **options,
        max_tokens=max_tokens,
        min_tokens=min(draft.min_tokens, max_tokens),
        stop_token_ids=tuple(rules.known_eos_ids(draft.vocab_size)),
        ignore_eos=True,  # transformers' list is complete: the checkpoint's own ids add nothing
        logit_bias=draft.logit_bias,
        bad_words_ids=tuple(draft.bad_words),
        detokenize=False,
    )
