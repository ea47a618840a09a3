"""`SlotStateContract`: what the slot state ops do, worked out by hand, for every set of ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from nanoserve_core.kernels.slot_deltas import SlotDeltas
from nanoserve_core.kernels.slot_tables import (
    FAILED,
    NO_TOKEN,
    SlotField,
)
from tests.kernels.slot_cases import RING_LENGTH, Slot, SlotCase, slot_case

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


class SlotStateContract:
    """Subclass it in a test module and say which ops, on which device."""

    ops: ModuleType
    device = "cpu"

    def case(self, slots: Sequence[Slot], rows: Sequence[int]) -> SlotCase:
        """A case on the ops under test."""
        return slot_case(self.ops, slots, rows, device=self.device)

    def test_deltas_are_written_and_nothing_else_is(self) -> None:
        case = self.case([Slot(num_tokens=1)], [0])
        storage = case.tables.storage.clone()
        offsets = torch.randperm(len(storage))[:30].tolist()
        pairs = [(60, 0), *(pair for o in offsets for pair in ((o, -o), (-1, 5))), (1, 77)]
        storage[offsets] = -torch.tensor(offsets, dtype=torch.int32, device=self.device)

        deltas = torch.tensor(pairs, dtype=torch.int32, device=self.device)
        self.ops.apply_deltas(case.tables, deltas)

        assert torch.equal(case.tables.storage, storage)

    @pytest.mark.parametrize("num_deltas", [0, 1, 1023, 1024, 1025, 2500])
    def test_any_number_of_deltas_is_written(self, num_deltas: int) -> None:
        tables = self.case([Slot(num_tokens=1)] * 100, [0]).tables
        expected = tables.storage.clone()
        expected[:num_deltas] = torch.arange(num_deltas, dtype=torch.int32)
        pairs = torch.arange(-1, num_deltas, dtype=torch.int32)[:, None].repeat(1, 2)
        pairs[0, 0] = num_deltas

        self.ops.apply_deltas(tables, pairs.to(self.device))

        assert torch.equal(tables.storage, expected)

    def test_deltas_that_were_applied_are_not_applied_again(self) -> None:
        tables = self.case([Slot(num_tokens=1)], [0]).tables
        deltas = torch.tensor([[1, 0], [3, 9]], dtype=torch.int32, device=self.device)
        self.ops.apply_deltas(tables, deltas)
        tables.storage[3] = 4

        self.ops.apply_deltas(tables, deltas)

        assert int(tables.storage[3]) == 4
        assert deltas[0].tolist() == [0, 0]

    def test_rows_get_the_inputs_of_their_slots(self) -> None:
        slots = [Slot(num_tokens=1), Slot(num_tokens=8, last_token=5), Slot(num_tokens=9)]

        rows = self.case(slots, [2, -1, 1, 0]).gather()

        assert rows.token_ids.tolist() == [11, 0, 5, 11]
        assert rows.positions.tolist() == [8, 0, 7, 0]
        assert rows.kv_lens.tolist() == [9, 0, 8, 1]
        assert rows.slot_mapping.tolist() == [2 * 4 + 0, -1, 1 * 4 + 3, 3 * 4 + 0]
        assert rows.block_tables[[0, 2, 3], :3].tolist() == [[3, 1, 2]] * 3

    def test_rows_get_the_parameters_of_their_slots(self) -> None:
        rows = self.case([Slot(num_tokens=1)] * 3, [2, -1, 0]).gather()

        assert rows.parameter(SlotField.TEMPERATURE).tolist() == [2.5, 0, 0.5]
        assert rows.parameter(SlotField.TOP_P).tolist() == [0.5, 0, 0.5]
        assert rows.parameter(SlotField.SEED_LOW).tolist() == [2, 0, 0]
        assert rows.parameter(SlotField.SEED_HIGH).tolist() == [2**8, 0, 2**8]

    def test_a_row_of_an_ended_slot_does_not_run(self) -> None:
        rows = self.case([Slot(num_tokens=5, is_active=False)], [0]).gather()

        assert rows.kv_lens.tolist() == [0]
        assert rows.slot_mapping.tolist() == [-1]
        assert rows.token_ids.tolist() == [0]

    def test_a_row_is_parked_until_its_block_is_there(self) -> None:
        case = self.case([Slot(num_tokens=5, block_ids=[3]), Slot(num_tokens=5)], [0, 1])
        parked = case.gather().kv_lens.tolist()
        case.advance([7, 7])
        deltas = SlotDeltas(case.tables.layout)
        deltas.set_blocks(0, 1, [6])

        case.change(deltas)
        rows = case.gather()

        assert parked == [0, 5]
        assert case.ring.token_ids[0].tolist() == [NO_TOKEN, 7]
        assert rows.kv_lens.tolist() == [5, 6]
        assert rows.slot_mapping.tolist() == [6 * 4, 1 * 4 + 1]
        assert rows.token_ids.tolist() == [11, 7]

    def test_a_block_with_a_negative_id_is_missing(self) -> None:
        rows = self.case([Slot(num_tokens=5, block_ids=[3, -1])], [0]).gather()

        assert rows.kv_lens.tolist() == [0]
        assert rows.slot_mapping.tolist() == [-1]

    def test_long_block_tables_are_copied_whole(self) -> None:
        case = self.case([Slot(num_tokens=3, block_ids=[5, 4, 3, 2, 1, 0])], [0])

        rows = case.gather()

        assert rows.block_tables.tolist() == [[5, 4, 3, 2, 1, 0]]

    def test_a_token_becomes_the_next_input(self) -> None:
        case = self.case([Slot(num_tokens=4), Slot(num_tokens=7)], [1, 0, -1])
        case.gather()

        case.advance([21, 22, 23])

        assert case.ring.token_ids[0].tolist() == [21, 22, NO_TOKEN]
        assert case.ring.logprobs[0, :2].tolist() == [-21, -22]
        assert case.ring.step.tolist() == [1]
        assert case.of_slots(SlotField.LAST_TOKEN)[:2] == [22, 21]
        assert case.of_slots(SlotField.POSITION)[:2] == [4, 7]
        assert case.rows.token_ids.tolist() == [21, 22, 0]
        assert case.rows.positions.tolist() == [7, 4, 0]
        assert case.rows.kv_lens.tolist() == [8, 5, 0]
        assert case.rows.slot_mapping.tolist() == [1 * 4 + 3, 1 * 4 + 0, -1]

    def test_a_token_without_a_block_for_it_parks_the_row_but_counts(self) -> None:
        case = self.case([Slot(num_tokens=4, block_ids=[3])], [0])
        case.gather()

        case.advance([21])

        assert case.ring.token_ids[0].tolist() == [21]
        assert case.of_slots(SlotField.LAST_TOKEN) == [21]
        assert case.of_slots(SlotField.IS_ACTIVE) == [1]
        assert case.rows.kv_lens.tolist() == [0]
        assert case.rows.slot_mapping.tolist() == [-1]

    @pytest.mark.parametrize("place", range(8))
    def test_a_stop_id_ends_the_row_after_its_token(self, place: int) -> None:
        stop_ids = [100 + i for i in range(8)]
        case = self.case([Slot(num_tokens=4, stop_ids=stop_ids)] * 2, [0, 1])
        case.gather()

        case.advance([100 + place, 8])

        assert case.ring.token_ids[0].tolist() == [100 + place, 8]
        assert case.of_slots(SlotField.IS_ACTIVE) == [0, 1]
        assert case.rows.kv_lens.tolist() == [0, 5]
        assert case.rows.slot_mapping.tolist() == [-1, 4]

    @pytest.mark.parametrize(("first_stop_position", "is_active"), [(3, 0), (4, 0), (5, 1)])
    def test_a_stop_id_counts_after_the_minimum_length(
        self, first_stop_position: int, is_active: int
    ) -> None:
        slot = Slot(num_tokens=4, stop_ids=[9], first_stop_position=first_stop_position)
        case = self.case([slot], [0])
        case.gather()

        case.advance([9])  # the token at position 4

        assert case.of_slots(SlotField.IS_ACTIVE) == [is_active]

    @pytest.mark.parametrize(("max_total_tokens", "is_active"), [(4, 0), (5, 0), (6, 1)])
    def test_a_sequence_ends_with_its_last_token(
        self, max_total_tokens: int, is_active: int
    ) -> None:
        case = self.case([Slot(num_tokens=4, max_total_tokens=max_total_tokens)], [0])
        case.gather()

        case.advance([9])  # the fifth token

        assert case.ring.token_ids[0].tolist() == [9]
        assert case.of_slots(SlotField.IS_ACTIVE) == [is_active]

    def test_an_ended_row_does_nothing_in_later_steps(self) -> None:
        case = self.case([Slot(num_tokens=4, stop_ids=[9])], [0])
        case.gather()
        case.advance([9])

        case.advance([7])

        assert case.ring.token_ids[:2].tolist() == [[9], [NO_TOKEN]]
        assert case.of_slots(SlotField.LAST_TOKEN) == [9]
        assert case.of_slots(SlotField.POSITION) == [4]

    def test_a_deactivated_row_does_nothing(self) -> None:
        case = self.case([Slot(num_tokens=4), Slot(num_tokens=4)], [0, 1])
        case.gather()
        case.advance([7, 7])
        deltas = SlotDeltas(case.tables.layout)
        deltas.deactivate(0)
        case.change(deltas)

        case.gather()
        case.advance([8, 8])

        assert case.ring.token_ids[1].tolist() == [NO_TOKEN, 8]
        assert case.of_slots(SlotField.LAST_TOKEN) == [7, 8]

    def test_a_row_without_a_token_to_draw_ends(self) -> None:
        case = self.case([Slot(num_tokens=4), Slot(num_tokens=4)], [0, 1])
        case.gather()

        case.advance([FAILED, 7])

        assert case.ring.token_ids[0].tolist() == [FAILED, 7]
        assert case.of_slots(SlotField.LAST_TOKEN) == [11, 7]
        assert case.of_slots(SlotField.IS_ACTIVE) == [0, 1]
        assert case.rows.kv_lens.tolist() == [0, 5]

    def test_the_ring_keeps_the_newest_steps(self) -> None:
        case = self.case([Slot(num_tokens=1)], [0])
        case.gather()

        for token in (20, 21, 22, 23):
            case.advance([token])

        assert RING_LENGTH == 3
        assert case.ring.token_ids[:, 0].tolist() == [23, 21, 22]
        assert case.ring.logprobs[:, 0].tolist() == [-23, -21, -22]
        assert case.ring.step.tolist() == [4]

    def test_advanced_rows_are_what_a_gather_makes_of_them(self) -> None:
        slots = [
            Slot(num_tokens=num_tokens, stop_ids=[6], max_total_tokens=11, block_ids=[4, 2, 5][:n])
            for num_tokens, n in ((3, 1), (4, 1), (4, 2), (7, 2), (8, 3), (10, 3))
        ]
        case = self.case(slots, [4, 0, -1, 3, 5, 2, 1])
        case.gather()

        case.advance([1, 2, 3, 6, 5, 6, 7])
        advanced = {name: getattr(case.rows, name).tolist() for name in INPUTS}

        rows = case.gather()
        assert advanced == {name: getattr(rows, name).tolist() for name in INPUTS}
        assert advanced["kv_lens"] == [9, 4, 0, 0, 0, 0, 0]

    def test_many_rows_advance(self) -> None:
        num_rows = 300
        case = self.case([Slot(num_tokens=2)] * num_rows, range(num_rows))
        case.rows.kv_lens.fill_(2)

        case.advance(range(num_rows))

        assert case.ring.token_ids[0].tolist() == list(range(num_rows))
        assert case.of_slots(SlotField.LAST_TOKEN) == list(range(num_rows))
        assert case.ring.step.tolist() == [1]


INPUTS = ("token_ids", "positions", "kv_lens", "slot_mapping")
