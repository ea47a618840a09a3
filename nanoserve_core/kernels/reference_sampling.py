"""Sampling in plain torch: the CPU's path, and the oracle of the Triton kernels of the same names.

Every row is computed by itself: its result has the same bits alone and in any batch, with any
number of threads. Hence no sum over a whole row (torch splits those by thread count), but sums over
tiles and running sums; and where a short list of candidates is padded, the padding has weight zero.

Filters follow transformers' order and definitions (top-k, top-p, min-p), brought into one form: a
row keeps the scores that are at least its *cut*. All scores equal to the cut are kept; transformers
does the same in top-k, and keeps an arbitrary part of them in top-p.

These ops belong to the sampler as those of `reference` belong to the model, and `for_device` is the
place where a device will bring its own. They run on a GPU too, but `sample_tokens` asks the device
whether a list was long enough, and so waits for it; a kernel finds the cut without lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

_SUM_TILE = 512
# argmax and top-k look at the maxima of tiles first: at 151,936 columns on one core argmax takes
# 0.04 ms a row instead of 0.27, top-50 0.09 instead of 0.47. No gain for few columns or large k.
_MAX_TILE = 64
_MIN_TILED_ELEMENTS = 16_384
_MAX_TILED_LIST = 300
# Lengths of the list in which a row's cut is looked for, before the whole row is sorted (12 ms at
# 151,936 columns): most nuclei of trained models end in the first one.
_LIST_LENGTHS = (64, 512, 4096)
# A row that keeps more is drawn from as a whole; a property of the row, not of its batch.
_MAX_CANDIDATES = 1024


class Sampled(NamedTuple):
    """What `sample_tokens` gives."""

    token_ids: Tensor
    """[rows] int64."""
    cut: Tensor | None
    """[rows] float32: scores below it had no chance; None when no filter was asked for."""
    is_empty: Tensor
    """[rows] bool: no token could be drawn (NaN, +inf, or all -inf); the row's id means nothing."""


class GatheredLogprobs(NamedTuple):
    """What `gather_logprobs` gives; column 0 is the given token, the others the most likely
    ones."""

    token_ids: Tensor
    """[rows, 1 + num_top] int64."""
    logprobs: Tensor
    """[rows, 1 + num_top] float32."""
    ranks: Tensor
    """[rows, 1 + num_top] int64: 1 + the number of more likely tokens."""


def argmax(logits: Tensor) -> Tensor:
    """The first index of each row's largest value: [rows, vocab] -> [rows] int64.

    As `torch.argmax`: NaN counts as the largest, a row of -inf gives 0.
    """
    num_columns = logits.shape[1]
    if logits.numel() < _MIN_TILED_ELEMENTS:
        return logits.argmax(-1)
    tile = _tile_maxima(logits).argmax(-1, keepdim=True)
    columns = tile * _MAX_TILE + torch.arange(_MAX_TILE, device=logits.device)
    # Beyond the end the last column repeats, which the first index of the maximum never is.
    columns.clamp_(max=num_columns - 1)
    return columns.gather(1, logits.gather(1, columns).argmax(-1, keepdim=True)).squeeze(1)


def apply_token_bitmask(scores: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """-inf, in place, for the tokens that a row's mask does not allow.

    ``scores``: [rows, vocab], any float dtype. ``bitmask``: [n, ceil(vocab / 32)] int32; token
    ``t`` is allowed where bit ``t % 32`` of word ``t // 32`` is set. ``rows``: [n] int64 without
    repetition, the row of ``scores`` that a mask is for.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=scores.device)
    allowed = (bitmask[:, :, None] >> shifts & 1).bool().flatten(1)[:, : scores.shape[1]]
    masked = scores.index_select(0, rows).masked_fill_(~allowed, -torch.inf)
    scores.index_copy_(0, rows, masked)


def sample_tokens(
    scores: Tensor,
    draws: Tensor,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    max_top_k: int = 0,
) -> Sampled:
    """Draw one token per row by the inverse of its cumulative distribution, in vocabulary order.

    ``scores``: [rows, vocab] float32, already divided by the temperature. ``draws``: [rows] float64
    in (0, 1), of `philox.uniform`. ``top_k``: [rows] int64, 0 keeps all; ``top_p``, ``min_p``:
    [rows] float64, 1 and 0 keep all; None when no row filters by it. ``max_top_k``: the largest
    ``top_k``, known to the host. A token of probability zero is never drawn.
    """
    largest = scores.amax(-1, keepdim=True)
    is_empty = ~largest.isfinite().squeeze(1)
    min_cut = None if min_p is None else largest.squeeze(1) + min_p.log().float()
    if top_k is None and top_p is None:
        return Sampled(_pick_from_row(scores, largest, min_cut, draws), min_cut, is_empty)
    is_unlimited = top_k is None or bool((top_k == 0).any())
    total = _weights(scores, largest, None)[1].sum(-1) if is_unlimited else draws
    filters = _Filters(
        top_k=torch.zeros_like(draws, dtype=torch.int64) if top_k is None else top_k,
        top_p=torch.ones_like(draws) if top_p is None else top_p,
        min_cut=torch.full_like(scores[:, 0], -torch.inf) if min_cut is None else min_cut,
        total=total,
    )
    first = max(max_top_k + 1, _LIST_LENGTHS[0] if is_unlimited else 0)
    longer = (length for length in _LIST_LENGTHS if length > first)
    lengths = [length for length in (first, *longer) if length < scores.shape[1]]
    tokens, cut = _sample_filtered(scores, draws, filters, [*lengths, scores.shape[1]])
    return Sampled(tokens, cut, is_empty)


def apply_penalties(
    scores: Tensor,
    tokens: Tensor,
    *,
    counts: Tensor | None,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Penalise, in place, the tokens that a row's sequence has seen.

    ``scores``: [rows, vocab] float32. ``tokens``: [rows, n] int64, prompt and output; a shorter
    sequence is padded with tokens of its own. ``counts``: [rows, n] how often each of them is in
    the output, or None where presence and frequency are 0. The penalties are [rows] float32:
    repetition as in transformers (Keskar et al., 2019), presence and frequency as in vLLM, over the
    output.
    """
    seen = scores.gather(1, tokens)
    factor = repetition[:, None]
    seen = torch.where(seen < 0, seen * factor, seen / factor)
    if counts is not None:
        seen -= frequency[:, None] * counts
        seen -= presence[:, None] * (counts > 0)
    scores.scatter_(1, tokens, seen)


def gather_logprobs(scores: Tensor, token_ids: Tensor, num_top: int) -> GatheredLogprobs:
    """Log-probabilities of one given token per row and of the ``num_top`` most likely ones.

    ``scores``: [rows, vocab] float32, not normalised; ``token_ids``: [rows] int64.
    """
    own = scores.gather(1, token_ids[:, None])
    own_rank = 1 + (scores > own).sum(-1, keepdim=True)
    top, top_ids = scores.topk(num_top, dim=-1)
    # Equal scores share the rank of the first of them.
    order = torch.arange(1, num_top + 1, device=scores.device).expand_as(top_ids).clone()
    order[:, 1:] *= top[:, 1:] < top[:, :-1]
    ids = torch.cat([token_ids[:, None], top_ids], 1)
    ranks = torch.cat([own_rank, order.cummax(-1).values if num_top else order], 1)
    return GatheredLogprobs(ids, scores.log_softmax(-1).gather(1, ids), ranks)


def mask_below(scores: Tensor, cut: Tensor) -> None:
    """Set to -inf, in place, what is below its row's cut: [rows, vocab] float32, [rows] float32."""
    # log(0) and log(1) of a comparison into floats: vectorised on a CPU, which masked_fill_ is not.
    scores += torch.ge(scores, cut[:, None], out=torch.empty_like(scores)).log_()


class _Filters(NamedTuple):
    """Filters of some rows, all [rows]."""

    top_k: Tensor
    top_p: Tensor
    min_cut: Tensor
    total: Tensor
    """float64: sum of the weights of the whole row; read where top_k is 0."""

    def of(self, rows: Tensor) -> _Filters:
        return _Filters(*(each[rows] for each in self))


def _sample_filtered(
    scores: Tensor, draws: Tensor, filters: _Filters, lengths: list[int]
) -> tuple[Tensor, Tensor]:
    """Tokens and cuts of rows whose cut is looked for among the ``lengths[0]`` largest scores."""
    values, ids = _largest(scores, lengths[0])
    cut, is_final = _find_cut(values, filters, is_whole_row=len(lengths) == 1)
    tokens = _pick_from_list(values, ids, cut, draws)
    is_short = (values >= cut[:, None]).sum(-1) <= _MAX_CANDIDATES
    if bool((is_final & is_short).all()):
        return tokens, cut
    rows = (is_final & ~is_short).nonzero().squeeze(1)
    if len(rows):
        wide = scores[rows]
        largest = wide.amax(-1, keepdim=True)
        tokens[rows] = _pick_from_row(wide, largest, cut[rows], draws[rows])
    rows = (~is_final).nonzero().squeeze(1)
    if len(rows):
        tokens[rows], cut[rows] = _sample_filtered(
            scores[rows], draws[rows], filters.of(rows), lengths[1:]
        )
    return tokens, cut


def _find_cut(values: Tensor, filters: _Filters, *, is_whole_row: bool) -> tuple[Tensor, Tensor]:
    """The rows' cuts, and whether each is known for certain from the list.

    ``values``: [rows, length], the largest scores in falling order. ::

        values   9  8  8  7  5  5 | 5 ...        top_k 5: all three 5 belong to it, one is not in
                 [-- kept --]                    the list, so the mass below top_p is not known yet
    """
    first, last = values[:, :1], values[:, -1]
    kth = values.gather(1, (filters.top_k[:, None] - 1).clamp(0, values.shape[1] - 1))
    is_unlimited = filters.top_k == 0
    kept = (values >= kth) | is_unlimited[:, None]
    weights = (values.double() - first.double()).exp() * kept
    sums = weights.cumsum(-1)
    mass = torch.where(is_unlimited, filters.total, sums[:, -1])
    # A token stays in the nucleus while the mass of the likelier ones is below top_p.
    likelier = torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1]], 1)
    top_p = filters.top_p[:, None]
    kept &= (likelier < top_p * mass[:, None]) | (top_p >= 1)
    kept &= (values >= filters.min_cut[:, None]) & (values > -torch.inf)
    kept[:, 0] = True
    cut = values.gather(1, kept.sum(-1, keepdim=True) - 1).squeeze(1)
    if is_whole_row:
        return cut, torch.ones_like(is_unlimited)
    is_final = torch.where(is_unlimited, last < cut, last < kth.squeeze(1))
    return cut, is_final | (last == -torch.inf) | ~first.squeeze(1).isfinite()


def _pick_from_list(values: Tensor, ids: Tensor, cut: Tensor, draws: Tensor) -> Tensor:
    """Draw among the candidates of a list that are not below the cut; [rows, length] -> [rows]."""
    values, ids = values[:, :_MAX_CANDIDATES], ids[:, :_MAX_CANDIDATES]
    ids, order = ids.sort(-1)
    weights = (values.double() - values[:, :1].double()).exp() * (values >= cut[:, None])
    index = _invert(weights.gather(1, order).cumsum(-1), draws)
    return ids.gather(1, index[:, None]).squeeze(1)


def _pick_from_row(scores: Tensor, largest: Tensor, cut: Tensor | None, draws: Tensor) -> Tensor:
    """Draw among all scores that are not below the cut: first the tile, then the token in it."""
    weights, tile_sums = _weights(scores, largest, cut)
    sums = tile_sums.cumsum(-1)
    tile = _invert(sums, draws)[:, None]
    # The sum before the tile as it was added up: a subtraction could leave a target below 0.
    before = torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1]], 1).gather(1, tile)
    columns = tile * _SUM_TILE + torch.arange(_SUM_TILE, device=scores.device)
    in_row = columns < scores.shape[1]
    columns.clamp_(max=scores.shape[1] - 1)
    inside = weights.gather(1, columns).double() * in_row
    target = draws[:, None] * sums[:, -1:] - before
    index = (inside.cumsum(-1) <= target).sum(-1, keepdim=True)
    # The tile's own sum is rounded: stay at its last token that has a chance.
    last = ((inside > 0) * torch.arange(_SUM_TILE, device=scores.device)).amax(-1, keepdim=True)
    return columns.gather(1, index.minimum(last)).squeeze(1)


def _invert(sums: Tensor, draws: Tensor) -> Tensor:
    """First index whose running sum exceeds draw * total: [rows, n], [rows] float64 -> [rows]."""
    target = draws[:, None] * sums[:, -1:]
    return (sums <= target).sum(-1).clamp_(max=sums.shape[1] - 1)


def _weights(scores: Tensor, largest: Tensor, cut: Tensor | None) -> tuple[Tensor, Tensor]:
    """exp(score - largest), 0 below the cut: [rows, vocab] float32; the tiles' sums, float64."""
    weights = (scores - largest).exp_()
    if cut is not None:
        # A comparison into floats is vectorised on a CPU; masked_fill_ takes 20 times as long.
        weights *= torch.ge(scores, cut[:, None], out=torch.empty_like(scores))
    whole, rest = _tiles(weights, _SUM_TILE)
    return weights, torch.cat([whole.sum(-1), rest.sum(-1, keepdim=True)], 1).double()


def _largest(scores: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The ``length`` largest scores of each row in falling order, and their ids; as
    `torch.topk`."""
    rows, num_columns = scores.shape
    if length == num_columns:
        values, ids = scores.sort(-1, descending=True)
        return values, ids
    # Pays while the tiles hold less than a quarter of the row.
    if length > min(_MAX_TILED_LIST, num_columns // (4 * _MAX_TILE)):
        values, ids = scores.topk(length, dim=-1)
        return values, ids
    # Tiles other than the `length` ones with the largest maxima hold at most ties of what is in
    # those.
    tiles = _tile_maxima(scores).topk(length, dim=-1, sorted=False).indices
    inside = torch.arange(_MAX_TILE, device=scores.device)
    columns = (tiles[:, :, None] * _MAX_TILE + inside).view(rows, -1)
    candidates = scores.gather(1, columns.clamp(max=num_columns - 1))
    candidates.masked_fill_(columns >= num_columns, -torch.inf)
    values, index = candidates.topk(length, dim=-1)
    return values, columns.gather(1, index)


def _tile_maxima(scores: Tensor) -> Tensor:
    """[rows, ceil(vocab / tile)]: the maximum of each tile of `_MAX_TILE` columns."""
    whole, rest = _tiles(scores, _MAX_TILE)
    maxima = whole.amax(-1)
    return torch.cat([maxima, rest.amax(-1, keepdim=True)], 1) if rest.shape[1] else maxima


def _tiles(scores: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Views of the whole tiles [rows, tiles, size] and of the columns after them."""
    whole = scores.shape[1] // size * size
    return scores[:, :whole].unflatten(1, (-1, size)), scores[:, whole:]
