"""`Sampler`: logits rows to tokens, with what requests want to know about them.

Rows are grouped by what they ask for: a greedy row costs an argmax whoever sits beside it. The
groups are cut so that a part's scratch stays in the cache and the peak is bounded. Each row's
result is that of the row alone, to the bit; randomness is a function of the slot's seed and the
position.

It writes nothing of the batch state, and knows no text.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from nanoserve_core.errors import RequestFailed
from nanoserve_core.kernels import reference_sampling as ops
from nanoserve_core.logits_edits import EDITS, edit_logits
from nanoserve_core.logprobs import LogprobRows, to_host, token_logprobs
from nanoserve_core.philox import uniform
from nanoserve_core.plugins import attempt
from nanoserve_core.slot_rules import Feature

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanoserve_core.batch_state import BatchState, HostInts
    from nanoserve_core.request import PositionLogprobs
    from nanoserve_core.request_group import RequestGroup

__all__ = ["Sampler", "SamplerOutput", "SamplerProtocol", "token_logprobs"]

# 4 MB of float32: the passes over a part find it in the cache. A GPU wants few large launches.
_PART_ELEMENTS_CPU = 2**20
_PART_ELEMENTS = 2**23
# Measured: 62 where no short list shows the cut and whole rows are sorted.
_PART_BYTES_PER_ELEMENT = 72
# Dividing by less overflows; the softmax is one-hot long before.
_LOWEST_TEMPERATURE = 1e-30


@dataclass(frozen=True, kw_only=True)
class SamplerOutput:
    """One step's tokens. ``token_ids`` stay on the device; the ``read_`` methods wait for it."""

    token_ids: Tensor
    """[rows] int64, on the logits' device; an id without meaning in a row that failed."""
    logits: dict[int, Tensor] = field(default_factory=dict)
    """Row -> the model's logits [vocab] float32, where the request asked for them."""
    scores: dict[int, Tensor] = field(default_factory=dict)
    """Row -> the scores [vocab] float32 that were sampled from, where the request asked for them.
    """
    errors: dict[int, Exception] = field(default_factory=dict)
    """Row -> why its request must fail, as far as the host knows it at once."""
    is_empty: Tensor | None = None
    """[rows] bool, on the device: there was no token to draw."""
    logprobs: tuple[LogprobRows, ...] = ()

    def on_its_way(self) -> SamplerOutput:
        """The same with what the ``read_`` methods read on its way to the host: it is there when
        the current stream has got so far, and reading then waits for nothing else.
        """
        return replace(
            self,
            token_ids=to_host(self.token_ids),
            is_empty=None if self.is_empty is None else to_host(self.is_empty),
            logprobs=tuple(part.on_its_way() for part in self.logprobs),
        )

    def read_logprobs(self) -> tuple[PositionLogprobs | None, ...]:
        """Logprobs of each row, None where none were asked for."""
        known: dict[int, PositionLogprobs] = {}
        for part in self.logprobs:
            known.update(part.read())
        return tuple(known.get(row) for row in range(len(self.token_ids)))

    def read_errors(self) -> dict[int, Exception]:
        """Row -> why its request must fail."""
        if self.is_empty is None:
            return self.errors
        empty: list[int] = self.is_empty.nonzero().squeeze(1).tolist()
        return {row: _no_token() for row in empty} | self.errors


class SamplerProtocol(Protocol):
    """What the engine needs of a sampler; hook ``nanoserve_sampler`` may bring another one."""

    def sample(
        self, logits: Tensor, slots: HostInts, positions: HostInts, state: BatchState
    ) -> SamplerOutput:
        """See `Sampler.sample`."""
        ...


class Sampler:
    """The sampler of the engine; has no state of its own."""

    def sample(
        self, logits: Tensor, slots: HostInts, positions: HostInts, state: BatchState
    ) -> SamplerOutput:
        """Sample one token per row, in the order of effects that `SamplingParams` documents.

        ``logits``: [rows, vocab], any float dtype, not changed. ``slots``: [rows] int64 on the
        host, the row's slot. ``positions``: [rows] int64 on the host, the absolute position of the
        new token (``ScheduledSeq.end``). Must run before `BatchState.advance`. A processor that
        raises or gives nonsense fails its own rows; nothing else does.
        """
        slots = np.asarray(slots, dtype=np.int64)
        positions = np.asarray(positions, dtype=np.int64)
        features = _features_now(slots, positions, state)
        if not features.any():
            return SamplerOutput(token_ids=ops.argmax(logits))
        return _Step(logits, slots, positions, features, state).run()

    @staticmethod
    def peak_nbytes(num_rows: int, vocab_size: int) -> int:
        """Most scratch bytes of one `sample`, for sizing the K/V pool.

        Two float32 copies of the logits (edited; a batch processor's result) and one part's
        scratch. Rows that are handed out (``output_logits``, ``output_scores``) are not in it.
        """
        part = max(vocab_size, min(num_rows * vocab_size, _PART_ELEMENTS))
        return 8 * num_rows * vocab_size + _PART_BYTES_PER_ELEMENT * part


class _Step:
    """One call of `Sampler.sample` with more to do than an argmax; collects the output."""

    def __init__(
        self,
        logits: Tensor,
        slots: HostInts,
        positions: HostInts,
        features: HostInts,
        state: BatchState,
    ) -> None:
        self.logits, self.slots, self.features, self.state = logits, slots, features, state
        self.slots_on_device = state.to_device(slots)
        self.token_ids = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
        self.is_empty: Tensor | None = None
        self.draws: Tensor | None = None
        if self._has(Feature.SAMPLED | Feature.GRAMMAR):
            self.is_empty = torch.zeros(len(slots), dtype=torch.bool, device=logits.device)
        if self._has(Feature.SAMPLED):
            draws = uniform(state.host_seed[slots], positions)
            self.draws = state.to_device(draws)
        self.scores: dict[int, Tensor] = {}
        self.errors: dict[int, Exception] = {}
        self.logprobs: list[LogprobRows] = []

    def run(self) -> SamplerOutput:
        edited = np.flatnonzero(self.features & EDITS)
        if len(edited):
            scores = _rows(self.logits, edited, self.state).to(torch.float32, copy=True)
            errors = edit_logits(scores, self.slots[edited], self.features[edited], self.state)
            self.errors = {int(edited[row]): error for row, error in errors.items()}
            self._note_empty(scores, edited)
            self._choose(scores, edited, np.arange(len(edited)))
        if len(edited) < len(self.features):
            plain = np.flatnonzero(self.features & EDITS == 0)
            self._choose(self.logits, plain, plain)
        self._gather_raw_logprobs()
        asked = np.flatnonzero(self.features & Feature.OUTPUT_LOGITS.value).tolist()
        return SamplerOutput(
            token_ids=self.token_ids,
            logits={row: self.logits[row].to(torch.float32, copy=True) for row in asked},
            scores=self.scores,
            errors=self.errors,
            is_empty=self.is_empty,
            logprobs=tuple(self.logprobs),
        )

    def _note_empty(self, scores: Tensor, edited: HostInts) -> None:
        """An argmax does not tell that a grammar has left no token."""
        at = np.flatnonzero(self.features[edited] & Feature.GRAMMAR.value)
        if self.is_empty is not None and len(at):
            largest = scores[self.state.to_device(at)].amax(-1)
            self.is_empty[self.state.to_device(edited[at])] = ~largest.isfinite()

    def _choose(self, source: Tensor, rows: HostInts, at: HostInts) -> None:
        """Tokens of ``rows``, whose scores are the rows ``at`` of ``source``."""
        features = self.features[rows]
        is_member = features & Feature.GROUP.value != 0
        if is_member.any():
            self._ask_groups(source, rows[is_member], at[is_member])
            rows, at, features = rows[~is_member], at[~is_member], features[~is_member]
        is_greedy = features & Feature.SAMPLED.value == 0
        has_top_k = features & Feature.TOP_K.value != 0
        has_top_p = features & Feature.TOP_P.value != 0
        for group in (~has_top_k & ~has_top_p, has_top_k, has_top_p & ~has_top_k):
            for part in _parts(np.flatnonzero(group & ~is_greedy), source):
                self._draw(_rows(source, at[part], self.state), rows[part])
        for part in _parts(np.flatnonzero(is_greedy), source):
            self._take_largest(_rows(source, at[part], self.state), rows[part])

    def _ask_groups(self, source: Tensor, rows: HostInts, at: HostInts) -> None:
        """Each group chooses for its members among ``rows``, in their order in the group."""
        groups: dict[RequestGroup, list[tuple[int, int, int]]] = {}
        for row, index in zip(rows.tolist(), at.tolist(), strict=True):
            rules = self.state.rules(int(self.slots[row]))
            assert rules.group is not None, "the row has the feature"
            groups.setdefault(rules.group, []).append((rules.member, row, index))
        for group, places in groups.items():
            members, its_rows, its_at = (
                np.array(part) for part in zip(*sorted(places), strict=True)
            )
            logits = source[self.state.to_device(its_at)]
            on_device = self.state.to_device(its_rows)
            _, error = attempt(self._ask, group, logits, members.tolist(), on_device)
            if error is not None:
                self.token_ids[on_device] = 0
                self.errors.update(dict.fromkeys(its_rows.tolist(), error))

    def _ask(self, group: RequestGroup, logits: Tensor, members: list[int], rows: Tensor) -> None:
        self.token_ids[rows] = group.sampler(logits, members)

    def _take_largest(self, scores: Tensor, rows: HostInts) -> None:
        self.token_ids[self.state.to_device(rows)] = ops.argmax(scores)
        self._report(scores, None, rows)

    def _draw(self, scores: Tensor, rows: HostInts) -> None:
        assert self.draws is not None, "made where a row is sampled"
        assert self.is_empty is not None, "made where a row is sampled"
        state, on_device = self.state, self.state.to_device(rows)
        slots = self.slots_on_device[on_device]
        temperature = state.temperature[slots].clamp(min=_LOWEST_TEMPERATURE).float()
        scaled = scores.float() / temperature[:, None]
        features = int(np.bitwise_or.reduce(self.features[rows]))
        sampled = ops.sample_tokens(
            scaled,
            self.draws[on_device],
            top_k=state.top_k[slots] if features & Feature.TOP_K else None,
            top_p=state.top_p[slots] if features & Feature.TOP_P else None,
            min_p=state.min_p[slots] if features & Feature.MIN_P else None,
            max_top_k=int(state.host_top_k[self.slots[rows]].max()),
        )
        self.token_ids[on_device] = sampled.token_ids
        self.is_empty[on_device] = sampled.is_empty
        self._report(scaled, sampled.cut, rows)

    def _report(self, scores: Tensor, cut: Tensor | None, rows: HostInts) -> None:
        """Keep the scores of rows that ask for them, -inf below the cut."""
        asked = Feature.OUTPUT_SCORES.value | Feature.PROCESSED_LOGPROBS.value
        wanted = np.flatnonzero(self.features[rows] & asked)
        if not len(wanted):
            return
        on_device = self.state.to_device(wanted)
        kept = scores[on_device].float()
        if cut is not None:
            ops.mask_below(kept, cut[on_device])
        rows = rows[wanted]
        for index in np.flatnonzero(self.features[rows] & Feature.OUTPUT_SCORES.value):
            self.scores[int(rows[index])] = kept[index].clone()
        has_logprobs = np.flatnonzero(self.features[rows] & Feature.PROCESSED_LOGPROBS.value)
        if len(has_logprobs):
            self._gather(kept[self.state.to_device(has_logprobs)], rows[has_logprobs])

    def _gather_raw_logprobs(self) -> None:
        rows = np.flatnonzero(self.features & Feature.RAW_LOGPROBS.value)
        for part in _parts(rows, self.logits):
            self._gather(_rows(self.logits, part, self.state).float(), part)

    def _gather(self, scores: Tensor, rows: HostInts) -> None:
        num_top = [self.state.rules(int(slot)).num_logprobs for slot in self.slots[rows]]
        token_ids = self.token_ids[self.state.to_device(rows)]
        gathered = ops.gather_logprobs(scores, token_ids, max(num_top))
        self.logprobs.append(LogprobRows(rows.tolist(), num_top, gathered))

    def _has(self, feature: Feature) -> bool:
        return bool((self.features & feature.value).any())


def _features_now(slots: HostInts, positions: HostInts, state: BatchState) -> HostInts:
    """Features of the rows; the minimum length only while it is not reached, and a grammar only
    while it constrains.
    """
    features = state.features[slots]
    is_held_back = features & Feature.MIN_TOKENS.value != 0
    if is_held_back.any():
        num_output = positions - state.num_prompt_tokens[slots]
        features[
            is_held_back & (num_output >= state.min_tokens[slots])
        ] &= ~Feature.MIN_TOKENS.value
    for row in np.flatnonzero(features & Feature.GRAMMAR.value).tolist():
        if not state.grammars.is_active(int(slots[row]), int(positions[row])):
            features[row] &= ~Feature.GRAMMAR.value
    return features


def _parts(rows: HostInts, source: Tensor) -> Iterator[HostInts]:
    elements = _PART_ELEMENTS_CPU if source.device.type == "cpu" else _PART_ELEMENTS
    step = max(1, elements // source.shape[1])
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _rows(source: Tensor, rows: HostInts, state: BatchState) -> Tensor:
    """Those rows of ``source``: a view where they follow each other, else a copy."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:  # they are always in rising order
        return source[rows[0] : rows[-1] + 1]
    return source.index_select(0, state.to_device(rows))


def _no_token() -> RequestFailed:
    return RequestFailed(
        "no token can be drawn: the scores are all -inf, or contain NaN or +inf. Expected at least "
        "one finite score. Look at the logits processors, logit_bias, bad_words, min_tokens and "
        "grammar of the request: together they forbid every token."
    )
