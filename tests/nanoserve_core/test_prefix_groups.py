"""Groups of rows that share blocks, against groups made by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanoserve_core.prefix_groups import RowGroups, group_rows

STALE = 7
"""What lies behind the blocks of every row, as if all of them shared it."""


def grouped(tables: list[list[int]], *, pack_size: int = 4) -> RowGroups | None:
    width = max(len(table) for table in tables) + 1
    padded = np.full((len(tables), width), STALE)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return group_rows(padded, np.array([len(t) for t in tables]), pack_size=pack_size)


def test_rows_without_common_blocks_need_no_order() -> None:
    assert grouped([[1, 2], [3, 2], [4]]) is None
    assert grouped([[1, 2]]) is None


def test_blocks_behind_the_ends_of_tables_are_not_shared() -> None:
    assert grouped([[], []]) is None
    assert grouped([[1], [1]]) == ([0, 1], [0, 0], [1, 1])


def test_tiles_of_one_row_share_nothing() -> None:
    assert grouped([[1, 2], [1, 3]], pack_size=1) is None


def test_rows_that_share_come_together_and_the_others_last() -> None:
    groups = grouped([[1, 2, 3], [9], [1, 2, 4], [8], [1, 2, 5]])

    assert groups is not None
    assert sorted(groups.order[:3]) == [0, 2, 4]
    assert groups.order[3:] == [1, 3]
    assert groups.leads == [0, 0, 0, 3, 4]
    assert groups.num_shared == [2, 2, 2, 0, 0]


def test_a_family_is_cut_into_full_tiles() -> None:
    groups = grouped([[1, 10 + row] for row in range(10)])

    assert groups is not None
    assert groups.leads == [0] * 4 + [4] * 4 + [8] * 2
    assert groups.num_shared == [1] * 10


def test_a_row_left_over_by_full_tiles_is_alone() -> None:
    groups = grouped([[1, 10 + row] for row in range(5)])

    assert groups is not None
    assert groups.leads == [0, 0, 0, 0, 4]
    assert groups.num_shared == [1, 1, 1, 1, 0]


def test_large_families_come_first() -> None:
    groups = grouped([[1, 5], [1, 6], *([2, 10 + row] for row in range(4))])

    assert groups is not None
    assert sorted(groups.order[:4]) == [2, 3, 4, 5]
    assert groups.leads == [0, 0, 0, 0, 4, 4]


def test_close_kin_are_not_torn_apart_for_distant_ones() -> None:
    # 0 and 3 alone save three reads; the three of them, which share one block, would save two.
    groups = grouped([[1, 2, 3], [1, 4], [5], [1, 2, 3]])

    assert groups is not None
    places = zip(groups.leads, groups.num_shared, strict=True)
    by_place = dict(zip(groups.order, places, strict=True))
    assert by_place[0] == by_place[3]
    assert by_place[0][1] == 3
    assert by_place[1][1] == by_place[2][1] == 0


def test_distant_kin_join_where_that_saves_more() -> None:
    # 0 and 2 alone save three reads; all three share two blocks and save four.
    groups = grouped([[1, 2, 3], [1, 2, 4], [1, 2, 3]])

    assert groups == ([0, 2, 1], [0, 0, 0], [2, 2, 2])


@given(
    tables=st.lists(st.lists(st.integers(1, 3), max_size=5), min_size=1, max_size=20),
    pack_size=st.sampled_from([2, 4, 8]),
)
def test_groups_share_what_they_say_inside_one_tile(
    tables: list[list[int]], pack_size: int
) -> None:
    groups = grouped(tables, pack_size=pack_size)

    if groups is None:
        firsts = [table[0] for table in tables if table]
        assert len(set(firsts)) == len(firsts)
        return
    assert sorted(groups.order) == list(range(len(tables)))
    for place, (lead, shared) in enumerate(zip(groups.leads, groups.num_shared, strict=True)):
        first, own = tables[groups.order[lead]], tables[groups.order[place]]
        assert lead // pack_size == place // pack_size
        assert groups.leads[lead] == lead
        assert groups.num_shared[lead] == shared <= min(len(first), len(own))
        assert first[:shared] == own[:shared]
