"""`Task`: one call of `generate` in the engine's terms; the one place that makes its `Request`s."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from hf_generate_shim.call_options import CallOptions
from hf_generate_shim.step_rules import StepRules
from nanoserve_core.philox import derive_seed
from nanoserve_core.request import Request
from nanoserve_core.request_group import RequestGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hf_generate_shim.criteria import TimeLimit
    from hf_generate_shim.lockstep import LockstepSampler
    from hf_generate_shim.step_rules import StepRule
    from hf_generate_shim.stop_strings import StopStrings
    from nanoserve_core.request import LogitsProcessor, StopCheck
    from nanoserve_core.sampling_params import SamplingParams

_METADATA = {"source": "hf_generate_shim"}
_REQUESTS = 2**32
"""Requests count from here when their seeds are derived from the call's; samples count from 0."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the rows of a call have in common, and their prompts."""

    rows: tuple[tuple[int, ...], ...]
    """The real tokens of each row's prompt, in the order of the output's rows."""
    sampling: SamplingParams
    """For every row; ``n`` and ``seed`` are set when requests are made."""
    pad_token_id: int | None
    """What fills a row after its end."""
    is_lockstep: bool = False
    """transformers' processors and criteria choose the tokens of all rows, step by step."""
    draws_one_block: bool = False
    """In lockstep: from torch's default generator, for all rows at once."""
    time_limit: TimeLimit | None = None
    stop_strings: StopStrings | None = None
    options: CallOptions = field(default_factory=CallOptions)
    step_rules: tuple[StepRule, ...] = ()
    renormalizes_scores: bool = False
    output_logits: bool = False
    output_scores: bool = False

    @property
    def num_output_rows(self) -> int:
        """Rows of the vocabulary's size that the call may keep, for all tokens of all its rows."""
        per_token = int(self.output_logits) + int(self.output_scores)
        return per_token * len(self.rows) * (self.sampling.max_tokens or 0)


@dataclass(frozen=True, kw_only=True)
class CallRequests:
    """The requests of a call, and for each output row the request and sample that fills it."""

    requests: tuple[Request, ...]
    sources: tuple[tuple[str, int], ...]
    """(request id, sample index) of each row; greedy rows with the same prompt share a sample."""


def make_requests(task: Task, *, seed: int | None) -> CallRequests:
    """One request for each distinct prompt, so that rows of equal prompts compute it once.

    ``seed`` is the call's, None for a greedy call: the stream of a row is derived from it and from
    the row's place in the call, never from other rows.
    """
    call_id = uuid4().hex
    places: dict[_Row, list[int]] = {}
    for place in range(len(task.rows)):
        places.setdefault(_Row.of(task, place), []).append(place)
    requests = []
    sources: dict[int, tuple[str, int]] = {}
    for row, rows in places.items():
        request_id = f"generate-{call_id}-{rows[0]}"
        n = 1 if task.sampling.is_greedy or row.seed is not None else len(rows)
        own_seed = row.seed if row.seed is not None else _derive(seed, rows[0])
        requests.append(_request(task, request_id, row, n=n, seed=own_seed))
        sources.update({place: (request_id, i if n > 1 else 0) for i, place in enumerate(rows)})
    ordered = tuple(sources[place] for place in range(len(task.rows)))
    return CallRequests(requests=tuple(requests), sources=ordered)


class _Row(NamedTuple):
    """What tells a row from others of its call; equal greedy rows have equal tokens."""

    prompt: tuple[int, ...]
    max_tokens: int | None
    seed: int | None = None
    """Its own, if the caller gave one: then equal rows have equal tokens too."""

    @classmethod
    def of(cls, task: Task, place: int) -> _Row:
        max_tokens, limits = task.sampling.max_tokens, task.options.row_max_tokens
        if limits is not None and max_tokens is not None:
            max_tokens = min(max_tokens, limits[place])
        seeds = None if task.sampling.is_greedy else task.options.row_seeds
        return cls(task.rows[place], max_tokens, seeds[place] if seeds is not None else None)


def make_group(task: Task, sampler: LockstepSampler) -> CallRequests:
    """One request for each row, all of one group that ``sampler`` chooses for."""
    call_id = uuid4().hex
    requests = [
        Request(
            request_id=f"generate-{call_id}-{row}",
            prompt_token_ids=prompt,
            sampling=task.sampling,
            priority=task.options.priority,
            should_stop=_end_of_row(sampler, row),
            metadata=_METADATA,
        )
        for row, prompt in enumerate(task.rows)
    ]
    return CallRequests(
        requests=tuple(RequestGroup.join(requests, sampler)),
        sources=tuple((request.request_id, 0) for request in requests),
    )


def row_seeds(task: Task, seed: int | None) -> list[int]:
    """The seed of each row's stream in lockstep; ``seed``: the call's, where rows have no own."""
    if seed is None:
        return list(task.options.row_seeds or ())
    return [derive_seed(seed, _REQUESTS + row) for row in range(len(task.rows))]


def longest_request(task: Task) -> Request:
    """A request like the longest one of the call, to ask an engine whether it fits; in lockstep as
    a member of the group of all.
    """
    row = _Row(max(task.rows, key=len), task.sampling.max_tokens)
    request = _request(task, "generate-longest", row, n=1, seed=None)
    if not task.is_lockstep:
        return request
    rows = [replace(request, prompt_token_ids=prompt) for prompt in task.rows]
    return replace(request, group=RequestGroup.join(rows, _choose_nothing)[0].group)


def _request(task: Task, request_id: str, row: _Row, *, n: int, seed: int | None) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=row.prompt,
        sampling=_sampling(task.sampling, row, n=n, seed=seed),
        priority=task.options.priority,
        should_stop=_stop_check(task, row.prompt),
        logits_processors=_processors(task, row.prompt),
        output_logits=task.output_logits,
        output_scores=task.output_scores,
        metadata=_METADATA,
    )


def _sampling(given: SamplingParams, row: _Row, *, n: int, seed: int | None) -> SamplingParams:
    min_tokens = min(given.min_tokens, row.max_tokens or 0)
    own = {"n": n, "seed": seed, "max_tokens": row.max_tokens, "min_tokens": min_tokens}
    if all(getattr(given, name) == value for name, value in own.items()):
        return given  # as for most greedy rows: a copy is validated again, for 20 us
    return given.replace(**own)


def _end_of_row(sampler: LockstepSampler, row: int) -> StopCheck:
    return lambda _, token_ids: sampler.has_ended(row, len(token_ids))


def _choose_nothing(logits: torch.Tensor, members: Sequence[int]) -> torch.Tensor:
    raise AssertionError(f"a request that only asks was run: {members} {logits.shape}")


def _processors(task: Task, prompt: tuple[int, ...]) -> tuple[LogitsProcessor, ...]:
    rules = task.step_rules
    return (StepRules(rules, num_prompt_tokens=len(prompt)),) if rules else ()


def _stop_check(task: Task, prompt: tuple[int, ...]) -> StopCheck | None:
    time_limit, strings = task.time_limit, task.stop_strings
    if strings is None:
        return time_limit
    is_stopped = strings.after(prompt)
    if time_limit is None:
        return is_stopped
    # The time first: it also notes how far the row had come when it was up.
    return lambda index, token_ids: time_limit(index, token_ids) or is_stopped(index, token_ids)


def _derive(seed: int | None, place: int) -> int | None:
    """The seed of the request whose first row is ``place``, apart from those of its own samples."""
    return None if seed is None else derive_seed(seed, _REQUESTS + place)
