"""decode_plan and the table it is configured by: who lists which chunk, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanoserve_core.kernels.decode_config import DecodeConfig, decode_config, max_items
from nanoserve_core.kernels.decode_plan import DecodePlan, decode_plan, pack_size

CONFIG = DecodeConfig(
    min_chunk=32,
    max_chunk=32,
    target_items=1,
    num_programs=2,
    block_n=16,
    num_warps=2,
    num_stages=2,
)


def planned(
    kv_lens: list[int],
    *,
    lead: list[int] | None = None,
    shared: list[int] | None = None,
    config: DecodeConfig = CONFIG,
    group: int = 4,
) -> tuple[list[tuple[list[int], int]], DecodePlan]:
    """The items as (rows, chunk), and the plan. One kv head, so 16 // group rows to a pack."""
    plan = DecodePlan.allocate(
        config,
        max_rows=len(kv_lens),
        max_kv_len=max(kv_lens, default=1),
        num_heads=group,
        num_kv_heads=1,
        head_dim=16,
        device=torch.device("cpu"),
    )
    int32 = torch.int32
    decode_plan(
        torch.tensor(kv_lens, dtype=int32),
        plan=plan,
        config=config,
        lead=None if lead is None else torch.tensor(lead, dtype=int32),
        shared=None if shared is None else torch.tensor(shared, dtype=int32),
    )
    items = plan.items[: plan.header[0]].tolist()
    return [(rows_of(word), chunk) for word, chunk in items], plan


def rows_of(word: int) -> list[int]:
    """The rows of an item: a first row, and a bit for each row from it on."""
    first, row_set = word >> 16, word & 0xFFFF
    return [first + place for place in range(16) if row_set >> place & 1]


def test_rows_list_their_chunks_in_order() -> None:
    items, plan = planned([33, 32, 1, 100])

    assert items == [
        ([0], 0), ([0], 1),
        ([1], 0),
        ([2], 0),
        ([3], 0), ([3], 1), ([3], 2), ([3], 3),
    ]  # fmt: skip
    assert plan.first_partials.tolist() == [0, 2, 3, 4]
    assert plan.header.tolist() == [8, 32]


def test_a_row_of_length_zero_lists_one_chunk_so_that_its_output_is_written() -> None:
    items, _ = planned([0, 40, 0])

    assert items == [([0], 0), ([1], 0), ([1], 1), ([2], 0)]


def test_rows_of_a_group_share_their_whole_common_chunks() -> None:
    items, plan = planned([100, 70, 90, 80], lead=[0] * 4, shared=[64] * 4)

    assert items == [
        ([0, 1, 2, 3], 0), ([0, 1, 2, 3], 1), ([0], 2), ([0], 3),
        ([1], 2), ([2], 2), ([3], 2),
    ]  # fmt: skip
    assert plan.first_partials.tolist() == [0, 4, 7, 10]


def test_a_pack_shares_what_its_least_sharing_row_shares() -> None:
    items, _ = planned([100, 100, 40], lead=[0] * 3, shared=[96, 64, 63])

    shared = [item for item in items if len(item[0]) > 1]
    assert shared == [([0, 1, 2], 0)]
    assert len(items) == 1 + 3 + 3 + 1


def test_a_shared_prefix_that_reaches_beyond_a_row_is_cut_to_the_row() -> None:
    items, _ = planned([100, 40], lead=[0, 0], shared=[96, 96])

    assert items == [([0, 1], 0), ([0], 1), ([0], 2), ([0], 3), ([1], 1)]


def test_groups_are_packed_inside_aligned_runs_only() -> None:
    items, _ = planned([40] * 6, lead=[0] * 6, shared=[32] * 6)

    assert [rows for rows, chunk in items if chunk == 0] == [[0, 1, 2, 3], [4, 5]]
    assert sorted(rows[0] for rows, chunk in items if chunk == 1) == list(range(6))


def test_two_groups_in_one_run_are_kept_apart() -> None:
    items, _ = planned([40] * 4, lead=[0, 1, 0, 1], shared=[32] * 4)

    assert [rows for rows, chunk in items if chunk == 0] == [[0, 2], [1, 3]]


def test_rows_that_ended_leave_their_group() -> None:
    items, _ = planned([0, 70, 0, 70], lead=[0] * 4, shared=[64] * 4)

    assert items == [
        ([0], 0),
        ([1, 3], 0), ([1, 3], 1), ([1], 2),
        ([2], 0),
        ([3], 2),
    ]  # fmt: skip


def test_a_lone_row_shares_with_nobody() -> None:
    items, _ = planned([70, 70], lead=[0, 1], shared=[64, 64])

    assert items == [([row], chunk) for row in (0, 1) for chunk in (0, 1, 2)]


def test_long_rows_are_listed_whole() -> None:
    items, _ = planned([5000, 3])

    assert items == [*(([0], chunk) for chunk in range(157)), ([1], 0)]


@pytest.mark.parametrize(
    ("kv_lens", "chunk"), [([256], 32), ([257], 64), ([300, 200], 64), ([3000], 256)]
)
def test_the_chunk_grows_until_the_items_are_few_enough(kv_lens: list[int], chunk: int) -> None:
    config = replace(CONFIG, max_chunk=256, target_items=8)

    _, plan = planned(kv_lens, config=config)

    assert plan.header[1] == chunk


def test_no_row_is_fine() -> None:
    plan = DecodePlan.allocate(
        CONFIG,
        max_rows=4,
        max_kv_len=64,
        num_heads=4,
        num_kv_heads=1,
        head_dim=16,
        device=torch.device("cpu"),
    )

    decode_plan(torch.zeros(0, dtype=torch.int32), plan=plan, config=CONFIG)

    assert plan.header.tolist() == [0, 0]


def test_it_names_the_argument_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="shared=None, expected lead and shared together"):
        planned([1, 2], lead=[0, 0])
    with pytest.raises(ValueError, match=r"lead has shape \[1\], expected \[2\]"):
        planned([1, 2], lead=[0], shared=[0, 0])
    _, plan = planned([1, 2])
    with pytest.raises(ValueError, match="rows=3, expected at most 2"):
        decode_plan(torch.ones(3, dtype=torch.int32), plan=plan, config=CONFIG)
    finer = replace(CONFIG, min_chunk=1, max_chunk=1)
    with pytest.raises(ValueError, match="plan=2 items, expected room for 4"):
        decode_plan(torch.ones(2, dtype=torch.int32), plan=plan, config=finer)


@pytest.mark.parametrize(
    ("group", "rows"), [(1, 16), (2, 8), (4, 4), (5, 2), (8, 2), (16, 1), (32, 1)]
)
def test_a_pack_fills_the_tile_with_a_power_of_two_of_rows(group: int, rows: int) -> None:
    assert pack_size(group) == rows


@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 128, 512])
def test_the_table_gives_chunks_that_tiles_divide(num_rows: int) -> None:
    config = decode_config(num_rows, num_multiprocessors=132)

    assert config.min_chunk % config.block_n == 0
    assert config.max_chunk % config.min_chunk == 0


def test_the_batch_invariant_table_cuts_every_batch_alike() -> None:
    configs = [
        decode_config(num_rows, num_multiprocessors=132, batch_invariant=True)
        for num_rows in (1, 40, 512)
    ]

    assert all(config.is_batch_invariant for config in configs)
    assert len({config.max_chunk for config in configs}) == 1


@pytest.mark.parametrize("kv_len", [1, 32, 33, 500, 2000])
def test_partial_results_have_room_in_every_step(kv_len: int) -> None:
    config = replace(CONFIG, max_chunk=128, target_items=12)
    room = max_items(config, num_rows=5, max_kv_len=2000, num_kv_heads=1)

    items, _ = planned([kv_len, 2000 - kv_len, 1, 0, kv_len], config=config)

    assert len(items) <= room
