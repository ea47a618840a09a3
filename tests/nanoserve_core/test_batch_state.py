"""`BatchState`: slots come, go and advance; nobody sees another tenant's data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from nanoserve_core.batch_state import BatchState
from nanoserve_core.slot_rules import Feature
from nanoserve_core.slot_table import SlotTable
from tests.nanoserve_core.filled_slots import (
    assignment,
    filled,
    make_state,
    plan,
    sample,
    sample_and_advance,
)

if TYPE_CHECKING:
    from nanoserve_core.request import Request

PENALISED = {"presence_penalty": 0.5}


def advance(state: BatchState, slots: list[int], tokens: list[int]) -> None:
    state.advance(np.array(slots), torch.tensor(tokens))


def counts_of(state: BatchState, slot: int) -> dict[int, int]:
    """Output counts of every token that occurs."""
    counts = state.output_counts(np.array([slot]), torch.arange(state.vocab_size)[None])[0]
    return {token: count for token, count in enumerate(counts.tolist()) if count}


class Recorder:
    """A batch processor that notes what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def assign(self, slot: int, request: Request) -> bool:
        self.events.append(("assign", slot))
        return "serve" in request.metadata

    def release(self, slot: int) -> None:
        self.events.append(("release", slot))

    def apply(self, logits: torch.Tensor, _slots: torch.Tensor, _state: BatchState) -> torch.Tensor:
        return logits


def test_assigned_slot_holds_the_sequences_values() -> None:
    state = filled(
        assignment(2, prompt=(5, 6, 7), output=(8,), seed=9, temperature=0.5, top_k=4, top_p=0.9)
    )

    assert state.last_token[2] == 8
    assert state.position[2] == 3
    assert (state.seed[2], state.top_k[2]) == (9, 4)
    assert (state.temperature[2], state.top_p[2], state.min_p[2]) == (0.5, 0.9, 0.0)
    assert (state.num_tokens[2], state.num_prompt_tokens[2]) == (4, 3)


def test_largest_seed_keeps_its_bits() -> None:
    state = filled(assignment(0, seed=2**64 - 1), assignment(1, seed=2**63))

    assert state.seed.tolist() == [-1, -(2**63)]
    assert state.host_seed.tolist() == [2**64 - 1, 2**63]


def test_advance_moves_token_and_position_of_the_named_slots_only() -> None:
    state = filled(assignment(0), assignment(1), assignment(2))

    advance(state, [2, 0], [30, 31])

    assert state.last_token.tolist() == [31, 3, 30]
    assert state.position.tolist() == [3, 2, 3]
    assert state.num_tokens.tolist() == [4, 3, 4]


def test_history_and_counts_advance_on_the_device() -> None:
    state = filled(assignment(0, **PENALISED), assignment(1), assignment(2, repetition_penalty=2.0))

    advance(state, [0, 1, 2], [9, 9, 9])
    advance(state, [0, 2], [9, 4])

    assert state.token_history(0).tolist() == [1, 2, 3, 9, 9]
    assert state.token_history(2).tolist() == [1, 2, 3, 9, 4]
    assert counts_of(state, 0) == {9: 2}


def test_padded_history_repeats_tokens_of_the_same_row() -> None:
    state = filled(
        assignment(0, prompt=(1, 2, 3, 4), repetition_penalty=2.0),
        assignment(1, prompt=(7,), repetition_penalty=2.0),
    )

    history = state.padded_history(np.array([1, 0]))

    assert history.tolist() == [[7, 7, 7, 7], [1, 2, 3, 4]]


def test_history_is_a_copy_of_the_callers_own() -> None:
    state = filled(assignment(0, repetition_penalty=2.0))

    state.token_history(0).fill_(0)

    assert state.token_history(0).tolist() == [1, 2, 3]


def test_slot_without_need_keeps_no_history_and_says_so() -> None:
    state = filled(assignment(0))

    with pytest.raises(KeyError, match="slot 0 keeps no history"):
        state.token_history(0)


def test_preempted_sequence_gets_history_and_counts_back_in_another_slot() -> None:
    state = make_state()
    state.apply(plan(assignment(0, **PENALISED)))
    advance(state, [0], [9])
    state.apply(plan(released=[0]))

    state.apply(plan(assignment(5, output=(9, 9, 4), **PENALISED)))

    assert state.token_history(5).tolist() == [1, 2, 3, 9, 9, 4]
    assert counts_of(state, 5) == {9: 2, 4: 1}
    assert counts_of(state, 0) == {}


def test_next_tenant_sees_nothing_of_the_one_before() -> None:
    state = make_state()
    state.apply(
        plan(assignment(0, prompt=(1,) * 20, output=(9,) * 9, logit_bias={3: 50}, **PENALISED))
    )

    state.apply(plan(assignment(0, prompt=(7, 8), **PENALISED), released=[0]))

    assert state.token_history(0).tolist() == [7, 8]
    assert counts_of(state, 0) == {}
    assert sample(torch.zeros(1, 50).index_fill_(1, torch.tensor([5]), 1.0), state).token_ids == 5


def test_slot_may_change_hands_in_one_plan_without_being_named_as_released() -> None:
    state = filled(assignment(0, **PENALISED))

    state.apply(plan(assignment(0, prompt=(4, 5))))

    assert state.features[0] == 0
    assert state.last_token[0] == 5


def test_tables_shrink_to_nothing_with_their_last_row() -> None:
    state = make_state(num_slots=4)
    for slot in range(4):
        state.apply(plan(assignment(slot, **PENALISED)))

    state.apply(plan(released=[0, 1, 2, 3]))
    state.apply(plan(assignment(3, prompt=(4,), **PENALISED)))

    assert state.token_history(3).tolist() == [4]
    assert counts_of(state, 3) == {}


def test_release_of_a_free_slot_does_nothing() -> None:
    state = make_state()

    state.apply(plan(released=[3]))

    assert state.features[3] == 0


def test_greedy_request_has_no_feature_and_others_have_theirs() -> None:
    state = filled(
        assignment(0),
        assignment(1, temperature=1.0, top_k=3),
        assignment(2, temperature=1.0, top_k=50),
        assignment(3, logprobs=0),
    )

    assert state.features.tolist() == [
        0,
        Feature.SAMPLED | Feature.TOP_K,
        Feature.SAMPLED,  # top_k as large as the vocabulary keeps everything
        Feature.RAW_LOGPROBS,
    ]


def test_processor_is_told_of_every_tenant_and_of_the_end_of_those_it_serves() -> None:
    recorder = Recorder()
    state = make_state(processors=[recorder])

    state.apply(plan(assignment(0, request={"metadata": {"serve": 1}}), assignment(1)))
    state.apply(plan(released=[0, 1]))

    assert recorder.events == [("assign", 0), ("assign", 1), ("release", 0)]
    assert not state.served.any()


def test_served_slot_keeps_history_for_the_processor() -> None:
    state = make_state(processors=[Recorder()])

    state.apply(plan(assignment(0, request={"metadata": {"serve": 1}})))

    assert state.token_history(0).tolist() == [1, 2, 3]


def test_processor_that_raises_in_release_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Recorder):
        def release(self, slot: int) -> None:
            raise RuntimeError(f"cannot leave {slot}")

    state = make_state(processors=[Broken()])
    state.apply(plan(assignment(0, request={"metadata": {"serve": 1}})))

    state.apply(plan(released=[0]))

    assert "release(0)" in caplog.text
    assert state.features[0] == 0


def test_state_is_never_larger_than_declared() -> None:
    num_slots, vocab_size, max_model_len = 6, 50, 64
    state = make_state(num_slots, vocab_size)

    state.apply(plan(*(assignment(slot, **PENALISED) for slot in range(num_slots))))

    owners = [state, *(each for each in vars(state).values() if isinstance(each, SlotTable))]
    tensors = [tensor for owner in owners for tensor in vars(owner).values()]
    storages = [each.untyped_storage() for each in tensors if isinstance(each, torch.Tensor)]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert sum(sizes.values()) == BatchState.nbytes(num_slots, vocab_size, max_model_len)


def test_tokens_advance_without_the_host_knowing_them() -> None:
    state = filled(assignment(0, repetition_penalty=1e6))
    logits = torch.linspace(0, 1, 50)[None]

    tokens = [sample_and_advance(logits, state) for _ in range(3)]

    assert tokens == [[49], [48], [47]]  # each is penalised once it has been sampled
