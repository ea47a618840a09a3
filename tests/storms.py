"""A storm: requests of all kinds that come, go and are aborted while blocks are short.

Whatever happens around it, a request must give what it gives alone. Rows of other batches are other
matrix products, so numbers differ by rounding; a token that differs is forgiven only where the two
tokens were as good as tied, and few of those are.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from nanoserve_core import Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from nanoserve_core import Engine
    from nanoserve_core.request import StepOutput

FIRST_ID = 8
"""Ids below are left out of prompts: end of sequence and the like."""
TIE = 1e-4
"""Difference of scores, or probability between two draws, that rounding may cross."""
LOGPROB_TOLERANCE = 2e-3

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05},
)
WISHES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"logprobs": 2},
    {"min_tokens": 4},
    {"logit_bias": {11: 1.5, 12: -3.0}},
    {"bad_words_ids": ((13,), (14, 15))},
    {"prompt_logprobs": 1},
)
"""What only the host's sampler does."""


class ProcessorError(Exception):
    """What the processors of some requests raise."""


@dataclass(frozen=True, kw_only=True)
class Visitor:
    """A request of the storm."""

    request: Request
    step: int
    abort_step: int | None
    fails: bool


@dataclass
class Told:
    """What one sample was told."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str | None = None
    scores: list[Tensor] = field(default_factory=list)


def favour_a_third(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A processor in HuggingFace's form, whose wish changes with the last token."""
    ids = torch.arange(scores.shape[1], device=scores.device)
    return scores + (ids % 3 == input_ids[0, -1] % 3).to(scores.dtype)


def fail_late(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A processor that gives up on long sequences."""
    if input_ids.shape[1] > 24:
        raise ProcessorError("too long for me")
    return scores


def draw_storm(
    num_requests: int, *, num_steps: int, vocab_size: int, max_tokens: int, seed: int = 5
) -> list[Visitor]:
    """Mixed lengths, prefixes, priorities, samples and wishes; one in six is aborted."""
    rng = random.Random(seed)
    prefixes = [_ids(rng, length, vocab_size) for length in (16, 32, 45)]
    visitors = []
    for number in range(num_requests):
        prefix = rng.choice(prefixes) if rng.random() < 0.4 else ()
        prompt = prefix + _ids(rng, rng.randint(1, 60), vocab_size)
        wishes = rng.choice(WISHES) if rng.random() < 0.25 else {}
        processors = rng.choices([(), (favour_a_third,), (fail_late,)], [90, 8, 2])[0]
        sampling = SamplingParams(
            n=rng.choice([1, 1, 1, 1, 1, 2, 3]),
            max_tokens=rng.randint(max(wishes.get("min_tokens", 1), 1), max_tokens),
            seed=number,
            **{**rng.choice(SAMPLINGS), **wishes},
        )
        request = Request(
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling=sampling,
            priority=rng.choice([0, 0, 0, 1, 2]),
            logits_processors=processors,
        )
        step = rng.randint(0, num_steps)
        abort_step = step + rng.randint(0, 30) if rng.random() < 1 / 6 else None
        fails = processors == (fail_late,)
        visitors.append(Visitor(request=request, step=step, abort_step=abort_step, fails=fails))
    return visitors


def serve_storm(
    engine: Engine, visitors: Sequence[Visitor], *, num_steps: int
) -> dict[str, list[StepOutput]]:
    """Requests come and are aborted at their steps; outputs by request id."""
    coming: dict[int, list[Request]] = {}
    aborted: dict[int, list[str]] = {}
    for visitor in visitors:
        coming.setdefault(visitor.step, []).append(visitor.request)
        if visitor.abort_step is not None:
            aborted.setdefault(visitor.abort_step, []).append(visitor.request.request_id)
    outputs: dict[str, list[StepOutput]] = {v.request.request_id: [] for v in visitors}
    step, last = 0, num_steps + 40
    while step <= last or engine.has_unfinished_requests():
        for request in coming.get(step, ()):
            engine.add_request(request)
        for request_id in aborted.get(step, ()):
            engine.abort(request_id)
        for output in engine.step():
            outputs[output.request_id].append(output)
        step += 1
        assert step < 100 * last, "the engine makes no progress"
    return outputs


def assert_solo_results(
    outputs: dict[str, list[StepOutput]],
    visitors: Sequence[Visitor],
    alone: Engine,
    *,
    max_ties: int,
) -> None:
    """Each request gave what it gives alone on ``alone``, as far as it came."""
    num_ties = 0
    for visitor in visitors:
        request, own = visitor.request, outputs[visitor.request.request_id]
        assert sum(output.request_finished for output in own) == 1, request
        expected = _solo(alone, request)
        for index in range(request.sampling.n):
            told, wanted = _told(own, index), _told(expected, index)
            _assert_same_end(told, wanted, visitor)
            num_ties += _assert_same_tokens(told, wanted, alone, request, index)
    assert num_ties <= max_ties, f"{num_ties} samples differ at a tie"


def _assert_same_end(told: Told, wanted: Told, visitor: Visitor) -> None:
    ends = {wanted.finish_reason}
    if visitor.abort_step is not None:
        ends.add("abort")
    if visitor.fails:
        ends.add("error")  # of a sibling, perhaps earlier than alone
    assert told.finish_reason in ends, f"{visitor}: {told.finish_reason}, alone {ends}"


def _assert_same_tokens(
    told: Told, wanted: Told, alone: Engine, request: Request, index: int
) -> bool:
    """Whether they part at a tie; raises when they part elsewhere."""
    is_whole = told.finish_reason == wanted.finish_reason and told.finish_reason != "error"
    length = min(len(told.tokens), len(wanted.tokens))
    place = next((i for i in range(length) if told.tokens[i] != wanted.tokens[i]), None)
    if place is not None:
        pair = told.tokens[place], wanted.tokens[place]
        scores = _told(_solo(alone, replace(request, output_scores=True)), index).scores[place]
        assert is_tie(scores, *pair, is_greedy=request.sampling.is_greedy), (
            f"request {request.request_id}, sample {index}, token {place}: {pair[0]}, alone "
            f"{pair[1]}; {request.sampling}"
        )
        return True
    assert not is_whole or told.tokens == wanted.tokens, f"{request.request_id}: {told}, {wanted}"
    if request.sampling.logprobs is not None:
        assert len(told.logprobs) == len(told.tokens)
    for own, other in zip(told.logprobs, wanted.logprobs, strict=False):
        assert math.isclose(own, other, abs_tol=LOGPROB_TOLERANCE), f"{own} alone {other}"
    return False


def is_tie(scores: Tensor, token: int, other: int, *, is_greedy: bool) -> bool:
    """Whether rounding could have made one token of the other. scores: [vocab_size]."""
    if is_greedy:
        return bool((scores[token] - scores[other]).abs() <= TIE)
    first, last = sorted((token, other))  # draws follow the order of ids
    between = scores.double().softmax(0)[first + 1 : last].sum()
    return bool(between <= TIE)


def _solo(alone: Engine, request: Request) -> list[StepOutput]:
    outputs = []
    alone.add_request(request)
    while alone.has_unfinished_requests():
        outputs += alone.step()
    return outputs


def _told(outputs: Sequence[StepOutput], index: int) -> Told:
    told = Told()
    for output in outputs:
        if output.index == index:
            told.tokens += tuple(output.token_ids)
            told.scores += output.scores
            if output.logprobs is not None:
                told.logprobs += tuple(
                    entry[token].logprob
                    for entry, token in zip(output.logprobs, output.token_ids, strict=True)
                )
            told.finish_reason = output.finish_reason or told.finish_reason
    return told


def _ids(rng: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_ID, vocab_size) for _ in range(length))
