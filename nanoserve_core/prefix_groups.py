"""Which decode rows read the same K/V blocks, and in what order they stand next to each other.

Attention reads what the rows of a group share once for all, if they are few enough for one tile and
stand side by side in it. A tile takes ``pack_size`` rows, beginning at a multiple of that::

    tables      a b c | a d | e | a b c     the blocks of rows 0, 1, 2, 3
    order       0, 3, 1, 2
    groups      0 and 3 share a b c: three reads saved. Together with 1 they would share a: two

Blocks are compared by their ids alone, so a group is right as long as its rows keep their tables:
these only grow. No torch, no request and no policy here.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanoserve_core.layers.attention import IntArray


class RowGroups(NamedTuple):
    """An order of the rows, and per row of that order its group."""

    order: list[int]
    """The row, as given, that comes at each place."""
    leads: list[int]
    """By place: the first place of its group; its own where it is alone."""
    num_shared: list[int]
    """By place: leading blocks that its whole group has in common; 0 where it is alone."""


def group_rows(tables: IntArray, num_blocks: IntArray, *, pack_size: int) -> RowGroups | None:
    """Groups of at most ``pack_size`` rows that share leading blocks; None when no row shares any.

    tables: [rows, max_blocks] block ids, of which row r has the first ``num_blocks[r]``; what is
    behind them means nothing.
    """
    firsts = np.where(num_blocks > 0, tables[:, 0], -1 - np.arange(len(tables))).tolist()
    if pack_size < 2 or len(set(firsts)) == len(firsts):
        return None
    counts: dict[int, int] = {}
    for first in firsts:
        counts[first] = counts.get(first, 0) + 1
    mates = np.array([row for row, first in enumerate(firsts) if counts[first] > 1])
    alone = [row for row, first in enumerate(firsts) if counts[first] == 1]
    lengths = num_blocks[mates]
    known = np.arange(int(lengths.max())) < lengths[:, None]
    mate_tables = np.where(known, tables[mates, : known.shape[1]], -1)
    # Any order will do in which equal beginnings are neighbours: that of the bytes is fast. Large
    # families come first, so that their tiles are full.
    keys = [(-counts[firsts[r]], t.tobytes()) for r, t in zip(mates, mate_tables, strict=True)]
    places = sorted(range(len(mates)), key=keys.__getitem__)
    shared = _shared_with_next(mate_tables[places], lengths[places])
    groups = RowGroups(mates[places].tolist() + alone, [], [])
    for start in range(0, len(places), pack_size):
        end = min(start + pack_size, len(places))
        _add_groups(groups, shared[start : end - 1])
    groups.leads.extend(range(len(places), len(firsts)))
    groups.num_shared.extend([0] * len(alone))
    return groups


def _shared_with_next(tables: IntArray, num_blocks: IntArray) -> list[int]:
    """How many leading blocks each row has in common with the next one."""
    is_same = tables[1:] == tables[:-1]
    num_same = np.where(is_same.all(1), tables.shape[1], is_same.argmin(1))
    same: list[int] = np.minimum(num_same, np.minimum(num_blocks[1:], num_blocks[:-1])).tolist()
    return same


def _add_groups(groups: RowGroups, shared: Sequence[int]) -> None:
    """Cut the rows of one tile into groups so that the most block reads are saved.

    shared: of `_shared_with_next`, between the tile's rows.
    """
    num_rows = len(shared) + 1
    saved = [0] * (num_rows + 1)
    begins = list(range(-1, num_rows))
    """By end of a group: where it begins, if the rows before that end are to save the most."""
    for end in range(2, num_rows + 1):
        saved[end] = saved[end - 1]
        common = shared[end - 2]
        for begin in range(end - 2, -1, -1):
            common = min(common, shared[begin])
            if saved[begin] + (end - 1 - begin) * common > saved[end]:
                saved[end] = saved[begin] + (end - 1 - begin) * common
                begins[end] = begin
    cuts = [num_rows]
    while cuts[-1] > 0:
        cuts.append(begins[cuts[-1]])
    cuts.reverse()
    for begin, end in pairwise(cuts):
        size = end - begin
        groups.leads.extend([len(groups.leads)] * size)
        groups.num_shared.extend([min(shared[begin : end - 1], default=0)] * size)
