"""`edit_logits`: everything that changes a row's logits before temperature and filters, in order:

penalties, biases, bad words, minimum length, plugins' batch processors, the request's processors,
and last its grammar, which no processor can overrule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanoserve_core.errors import PluginError
from nanoserve_core.kernels import reference_sampling as ops
from nanoserve_core.plugins import attempt
from nanoserve_core.slot_rules import Feature

if TYPE_CHECKING:
    from nanoserve_core.batch_state import BatchState, HostInts

EDITS = (
    Feature.PENALTIES
    | Feature.TOKEN_RULES
    | Feature.MIN_TOKENS
    | Feature.PROCESSORS
    | Feature.BATCH_PROCESSORS
    | Feature.GROUP
    | Feature.FAILED
    | Feature.GRAMMAR
).value
"""Features of the rows that `edit_logits` has something to do for, or that others may edit."""


def edit_logits(
    scores: Tensor, slots: HostInts, features: HostInts, state: BatchState
) -> dict[int, Exception]:
    """Edit ``scores`` [rows, vocab] float32 in place; returns row -> why its request must fail.

    ``slots`` and ``features``, [rows] on the host, belong to the rows. A row that fails holds
    numbers without meaning.
    """
    errors = {row: state.failures[slots[row]] for row in _rows_with(Feature.FAILED, features)}
    _penalise(scores, slots, _rows_with(Feature.PENALTIES, features), state)
    for row in _rows_with(Feature.TOKEN_RULES, features):
        _apply_token_rules(scores[row], int(slots[row]), state)
    for row in _rows_with(Feature.MIN_TOKENS, features):
        scores[row].index_fill_(0, state.rules(slots[row]).stop_ids, -torch.inf)
    if len(_rows_with(Feature.BATCH_PROCESSORS, features)):
        _run_batch_processors(scores, slots, state, errors)
    for row in _rows_with(Feature.PROCESSORS, features):
        error = _run_processors(scores[row : row + 1], int(slots[row]), state)
        if error is not None:
            errors.setdefault(row, error)
    rows = _rows_with(Feature.GRAMMAR, features)
    if rows:
        _apply_grammars(scores, slots[rows], rows, state, errors)
    return errors


def _rows_with(feature: Feature, features: HostInts) -> list[int]:
    rows: list[int] = np.flatnonzero(features & feature.value).tolist()
    return rows


def _penalise(scores: Tensor, slots: HostInts, rows: list[int], state: BatchState) -> None:
    if not rows:
        return
    slots = slots[rows]
    tokens = state.padded_history(slots)
    has_counts = (state.features[slots] & Feature.COUNTS.value).any()
    penalised = scores if len(rows) == len(scores) else scores[rows]
    on_device = state.to_device(slots)
    ops.apply_penalties(
        penalised,
        tokens,
        counts=state.output_counts(slots, tokens) if has_counts else None,
        repetition=state.repetition_penalty[on_device].float(),
        presence=state.presence_penalty[on_device].float(),
        frequency=state.frequency_penalty[on_device].float(),
    )
    if penalised is not scores:
        scores[rows] = penalised


def _apply_token_rules(scores: Tensor, slot: int, state: BatchState) -> None:
    """``scores``: [vocab], one row."""
    rules = state.rules(slot)
    scores.index_add_(0, rules.bias_ids, rules.bias_values)
    scores.index_fill_(0, rules.banned_ids, -torch.inf)
    if not rules.phrases:
        return
    history = state.token_history(slot)
    for prefixes, last in rules.phrases:
        if prefixes.shape[1] <= len(history):
            is_next = (prefixes == history[-prefixes.shape[1] :]).all(-1)
            scores.index_add_(0, last, torch.where(is_next, -torch.inf, 0.0))


def _run_batch_processors(
    scores: Tensor, slots: HostInts, state: BatchState, errors: dict[int, Exception]
) -> None:
    for processor, served in zip(state.processors, state.served, strict=True):
        rows = np.flatnonzero(served[slots])
        if not len(rows):
            continue
        on_device = state.to_device(rows)
        given = scores if len(rows) == len(scores) else scores[on_device]
        result, error = attempt(processor.apply, given, state.to_device(slots[rows]), state)
        error = error or _mismatch(processor, result, given)
        if error is not None:
            errors.update({row: error for row in rows.tolist() if row not in errors})
        elif result is not scores:
            scores[on_device] = _float32(result, scores)


def _run_processors(scores: Tensor, slot: int, state: BatchState) -> Exception | None:
    """``scores``: [1, vocab], one row."""
    input_ids = state.token_history(slot)[None]
    # A processor may keep what it is given, as some of transformers' do: it gets its own tensor.
    current = scores.clone()
    for processor in state.rules(slot).processors:
        result, error = attempt(processor, input_ids, current)
        error = error or _mismatch(processor, result, current)
        if error is not None:
            return error
        current = _float32(result, scores)
    scores.copy_(current)
    return None


def _apply_grammars(
    scores: Tensor,
    slots: HostInts,
    rows: list[int],
    state: BatchState,
    errors: dict[int, Exception],
) -> None:
    """``slots``: those of ``rows``."""
    num_tokens = state.num_tokens[slots].tolist()
    bitmask, failed = state.grammars.take(slots.tolist(), num_tokens)
    for row, error in failed.items():
        errors.setdefault(rows[row], error)
    state.grammars.apply(scores, bitmask, state.to_device(np.array(rows)))


def _mismatch(processor: object, result: Tensor | None, given: Tensor) -> PluginError | None:
    """The error for a result that is no tensor of the given shape, else None."""
    if not isinstance(result, Tensor):
        found = f"{result!r}"
    elif result.shape != given.shape or not result.is_floating_point():
        found = f"a {result.dtype} tensor of shape {list(result.shape)}"
    else:
        return None
    return PluginError(
        f"logits processor {processor!r} returned {found}: expected floats of shape "
        f"{list(given.shape)}, as it was given. Return the edited scores."
    )


def _float32(result: Tensor | None, like: Tensor) -> Tensor:
    assert result is not None, "results are checked before they are used"
    return result.to(device=like.device, dtype=like.dtype)
