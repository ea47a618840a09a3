"""SlotDeltas: changes of slot tables as pairs of offset and value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanoserve_core.kernels import reference_state
from nanoserve_core.kernels.slot_deltas import SlotDeltas
from nanoserve_core.kernels.slot_tables import SlotField, SlotLayout, SlotTables, StepRows

LAYOUT = SlotLayout(num_slots=3, max_num_blocks=4, block_size=16)


def applied(deltas: SlotDeltas, tables: SlotTables | None = None) -> SlotTables:
    """The tables, new ones if none are given, after the changes."""
    tables = tables or SlotTables.allocate(LAYOUT, "cpu")
    out = np.zeros((len(deltas) + 1, 2), dtype=np.int32)
    deltas.take(out)
    reference_state.apply_deltas(tables, torch.from_numpy(out))
    return tables


def test_tables_without_a_tenant_hold_no_slot_and_no_stop_id() -> None:
    tables = SlotTables.allocate(LAYOUT, "cpu")

    assert tables.row_slots.tolist() == [-1, -1, -1]
    assert tables.stop_ids.unique().tolist() == [-1]
    assert tables.fields.unique().tolist() == [0]
    assert tables.storage.shape == (LAYOUT.size,)


def test_fields_arrive_as_numbers_of_their_kind() -> None:
    deltas = SlotDeltas(LAYOUT)
    deltas.set_fields(1, {SlotField.TEMPERATURE: 0.6, SlotField.TOP_K: 20, SlotField.MIN_P: 0.125})

    tables = applied(deltas)

    floats = tables.fields.view(torch.float32)
    assert floats[SlotField.TEMPERATURE].tolist() == [0, np.float32(0.6), 0]
    assert floats[SlotField.MIN_P].tolist() == [0, 0.125, 0]
    assert tables.fields[SlotField.TOP_K].tolist() == [0, 20, 0]


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**63 + 5, 2**64 - 1])
def test_all_bits_of_a_seed_arrive(seed: int) -> None:
    deltas = SlotDeltas(LAYOUT)
    deltas.set_seed(2, seed)

    tables = applied(deltas)

    low, high = (
        int(tables.fields[field, 2]) & 0xFFFFFFFF
        for field in (SlotField.SEED_LOW, SlotField.SEED_HIGH)
    )
    assert low | high << 32 == seed


def test_stop_ids_are_filled_up_and_cut_off() -> None:
    deltas = SlotDeltas(LAYOUT)
    deltas.set_stop_ids(0, [5, 6])
    deltas.set_stop_ids(2, range(10))

    tables = applied(deltas)

    assert tables.stop_ids.tolist() == [[5, 6, *[-1] * 6], [-1] * 8, list(range(8))]


def test_blocks_are_appended_and_counted() -> None:
    deltas = SlotDeltas(LAYOUT)
    deltas.set_blocks(1, 0, [7, 9])
    tables = applied(deltas)
    deltas.set_blocks(1, 2, [4])

    applied(deltas, tables)

    assert tables.block_tables[1, :3].tolist() == [7, 9, 4]
    assert tables.fields[SlotField.NUM_BLOCKS].tolist() == [0, 3, 0]


def test_rows_are_set_from_the_first_on() -> None:
    deltas = SlotDeltas(LAYOUT)
    deltas.set_rows([2, -1])

    tables = applied(deltas)

    assert tables.row_slots.tolist() == [2, -1, -1]


def test_a_later_change_replaces_an_earlier_one() -> None:
    deltas = SlotDeltas(LAYOUT)
    deltas.deactivate(0)
    deltas.set_fields(0, {SlotField.IS_ACTIVE: 1})

    out = np.zeros((5, 2), dtype=np.int32)
    num_pairs = deltas.take(out)

    assert num_pairs == 2
    assert out[0].tolist() == [1, 0]
    assert out[1].tolist() == [SlotField.IS_ACTIVE * LAYOUT.num_slots, 1]
    assert len(deltas) == 0


def test_a_buffer_that_is_too_short_takes_nothing() -> None:
    deltas = SlotDeltas(LAYOUT)
    deltas.set_seed(0, 1)

    with pytest.raises(ValueError, match=r"2 changes of slot tables, expected at most 1"):
        deltas.take(np.zeros((2, 2), dtype=np.int32))

    assert len(deltas) == 2


def test_rows_share_memory_with_the_first_of_them() -> None:
    tables = SlotTables.allocate(LAYOUT, "cpu")
    rows = StepRows.allocate(LAYOUT, "cpu", slots=tables.row_slots)

    first = rows.first(2)
    first.kv_lens.fill_(5)
    first.parameter(SlotField.TOP_P).fill_(0.5)
    tables.row_slots.fill_(1)

    assert first.num_rows == 2
    assert rows.kv_lens.tolist() == [5, 5, 0]
    assert rows.parameter(SlotField.TOP_P).tolist() == [0.5, 0.5, 0]
    assert first.slots.tolist() == [1, 1]
