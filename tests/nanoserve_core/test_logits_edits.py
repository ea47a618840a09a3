"""What changes logits before temperature: penalties, biases, bad words, lengths, processors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from nanoserve_core.errors import PluginError
from tests.nanoserve_core.filled_slots import EOS, VOCAB_SIZE, assignment, filled, sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanoserve_core.batch_state import BatchState
    from nanoserve_core.plan import SlotAssignment
    from nanoserve_core.request import Request

PROMPT = (4, 8, 15, 16, 23, 42)
OUTPUT = (8, 4, 8, 15)


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3


def edited(logits: torch.Tensor, *tenants: SlotAssignment, **options: Any) -> torch.Tensor:
    """The scores of greedy rows after all edits; each tenant asks for its scores."""
    scores = sample(logits, filled(*tenants, **options)).scores
    return torch.stack([scores[row] for row in range(len(tenants))])


def tenant(slot: int = 0, request: dict[str, Any] | None = None, **sampling: Any) -> SlotAssignment:
    return assignment(
        slot, PROMPT, OUTPUT, request={"output_scores": True, **(request or {})}, **sampling
    )


def transformers_scores(processor: LogitsProcessor, logits: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = processor(torch.tensor([[*PROMPT, *OUTPUT]]), logits)
    return result


def test_rows_without_an_edit_keep_their_logits() -> None:
    logits = random_logits(2)

    scores = edited(logits, tenant(0), tenant(1, repetition_penalty=2.0))

    assert torch.equal(scores[0], logits[0])
    assert not torch.equal(scores[1], logits[1])


@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0])
def test_repetition_penalty_sees_prompt_and_output_as_in_transformers(penalty: float) -> None:
    logits = random_logits(1)

    scores = edited(logits, tenant(repetition_penalty=penalty))

    expected = transformers_scores(RepetitionPenaltyLogitsProcessor(penalty), logits)
    assert torch.equal(scores, expected)


def test_presence_and_frequency_penalties_see_the_output_only() -> None:
    logits = random_logits(1)
    expected = logits.clone()
    for token, count in {8: 2, 4: 1, 15: 1}.items():
        expected[0, token] -= 0.5 * count
        expected[0, token] -= 1.25

    scores = edited(logits, tenant(presence_penalty=1.25, frequency_penalty=0.5))

    assert torch.equal(scores, expected)


def test_rows_with_different_penalties_and_lengths_share_a_step() -> None:
    logits = random_logits(3)
    tenants = [
        tenant(0, repetition_penalty=1.5),
        assignment(1, (3,), request={"output_scores": True}, presence_penalty=2.0),
        assignment(2, (5, 6), (7,), request={"output_scores": True}, frequency_penalty=1.0),
    ]

    scores = edited(logits, *tenants)

    for row, each in enumerate(tenants):
        alone = sample(logits[row : row + 1], filled(each), [each.slot]).scores[0]
        assert torch.equal(scores[row], alone)
    assert torch.equal(scores[1], logits[1])  # nothing in its output yet
    assert scores[2, 7] == logits[2, 7] - 1


def test_logit_bias_is_added_and_minus_infinity_bans() -> None:
    logits = random_logits(1)
    expected = logits.clone()
    expected[0, 3] += 2.5
    expected[0, 9] = -math.inf

    scores = edited(logits, tenant(logit_bias={3: 2.5, 9: -math.inf}))

    assert torch.equal(scores, expected)


@pytest.mark.parametrize(
    "words",
    [
        [[7]],
        [[7], [9], [EOS]],
        [[8, 15, 30]],  # its beginning stands at the end
        [[4, 15, 30], [8, 15, 30], [8, 15, 31]],
        [[15, 2], [4, 8, 15, 3], [8, 16]],
        [[*PROMPT, *OUTPUT, 5], [1, *PROMPT, *OUTPUT, 6]],  # the whole sequence; one token more
        [[7], [15, 7]],
    ],
    ids=str,
)
def test_bad_words_are_those_of_transformers(words: list[list[int]]) -> None:
    logits = random_logits(1)

    scores = edited(logits, tenant(bad_words_ids=words))

    assert torch.equal(scores, transformers_scores(NoBadWordsLogitsProcessor(words), logits))


@pytest.mark.parametrize("num_output", [0, 2, 3, 4])
def test_minimum_length_bans_ends_as_in_transformers(num_output: int) -> None:
    logits = random_logits(1)
    output = OUTPUT[:num_output]
    each = assignment(
        0, PROMPT, output, min_tokens=3, stop_token_ids=(11,), request={"output_scores": True}
    )

    scores = edited(logits, each)

    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, [EOS, 11])
    assert torch.equal(scores, processor(torch.tensor([[*PROMPT, *output]]), logits))


def test_processor_gets_its_own_rows_tokens_and_scores() -> None:
    logits = random_logits(2).to(torch.bfloat16)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append((input_ids, scores))
        return scores + 1

    scores = edited(
        logits, tenant(0), tenant(1, {"logits_processors": (processor,)}, logit_bias={0: 5.0})
    )

    ((input_ids, given),) = seen
    assert input_ids.tolist() == [[*PROMPT, *OUTPUT]]
    assert input_ids.dtype == torch.int64
    assert given.shape == (1, VOCAB_SIZE)
    assert given.dtype == torch.float32
    assert given[0, 0] == logits[1, 0].float() + 5  # after the bias
    assert torch.equal(scores[1], given[0] + 1)
    assert torch.equal(scores[0], logits[0].float())


def test_processors_run_in_order_and_transformers_own_fit() -> None:
    logits = random_logits(1)
    words, penalty = NoBadWordsLogitsProcessor([[7]]), RepetitionPenaltyLogitsProcessor(1.5)

    scores = edited(logits, tenant(request={"logits_processors": (penalty, words)}))

    expected = transformers_scores(words, transformers_scores(penalty, logits))
    assert torch.equal(scores, expected)


def test_processor_may_edit_in_place_and_keep_what_it_was_given() -> None:
    logits, kept = random_logits(1), []

    def processor(_input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[0, 3] = 99.0
        kept.append(scores)
        return scores

    each = tenant(request={"logits_processors": (processor,)}, temperature=0.5)
    token = sample(logits, filled(each)).token_ids

    assert token.item() == 3
    assert kept[0][0, 3] == 99.0  # not divided by the temperature


def test_processor_may_return_another_float_type() -> None:
    logits = random_logits(1)

    scores = edited(logits, tenant(request={"logits_processors": (lambda _ids, s: s.double(),)}))

    assert scores.dtype == torch.float32
    assert torch.equal(scores, logits)


def raises(_input_ids: torch.Tensor, _scores: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("processor is broken")


@pytest.mark.parametrize(
    ("processor", "error", "message"),
    [
        (raises, ZeroDivisionError, "processor is broken"),
        (lambda _ids, _scores: None, PluginError, r"returned None: expected floats of shape \[1"),
        (lambda _ids, scores: scores[0], PluginError, r"of shape \[50\]: expected floats of"),
        (lambda _ids, scores: scores[:, :-1], PluginError, r"of shape \[1, 49\]"),
        (lambda _ids, scores: scores.argsort(-1), PluginError, r"a torch.int64 tensor"),
    ],
)
def test_broken_processor_fails_its_own_request_only(
    processor: Callable[[torch.Tensor, torch.Tensor], Any], error: type[Exception], message: str
) -> None:
    logits = random_logits(3)
    tenants = [tenant(slot) for slot in range(3)]
    tenants[1] = tenant(1, {"logits_processors": (processor,)}, temperature=1.0)

    output = sample(logits, filled(*tenants))

    assert output.read_errors().keys() == {1}
    with pytest.raises(error, match=message):
        raise output.read_errors()[1]
    largest = logits.argmax(-1)
    assert output.token_ids[::2].tolist() == largest[::2].tolist()
    assert 0 <= output.token_ids[1] < VOCAB_SIZE


def test_processor_after_a_broken_one_is_not_called() -> None:
    called = []
    processors = (raises, lambda _ids, scores: called.append(1) or scores)

    sample(random_logits(1), filled(tenant(request={"logits_processors": processors})))

    assert not called


class Favourite:
    """A batch processor that gives each served request its favourite token, from its metadata."""

    def __init__(self, num_slots: int = 8) -> None:
        self.tokens = torch.zeros(num_slots, dtype=torch.int64)
        self.calls: list[list[int]] = []

    def assign(self, slot: int, request: Request) -> bool:
        self.tokens[slot] = request.metadata.get("favourite", -1)
        return "favourite" in request.metadata

    def release(self, slot: int) -> None:
        self.tokens[slot] = -1

    def apply(self, logits: torch.Tensor, slots: torch.Tensor, _state: BatchState) -> torch.Tensor:
        self.calls.append(slots.tolist())
        return logits.scatter(1, self.tokens[slots][:, None], 50.0)


def favours(slot: int, token: int, **sampling: Any) -> SlotAssignment:
    return tenant(slot, {"metadata": {"favourite": token}}, **sampling)


def test_batch_processor_gets_all_rows_that_it_serves_in_one_call() -> None:
    favourite, logits = Favourite(), random_logits(4)
    tenants = [favours(0, 30), tenant(1), favours(2, 31, repetition_penalty=2.0), tenant(3)]

    tokens = sample(logits, filled(*tenants, processors=[favourite])).token_ids

    largest = logits.argmax(-1).tolist()
    assert tokens.tolist() == [30, largest[1], 31, largest[3]]
    assert favourite.calls == [[0, 2]]


def test_batch_processor_is_not_called_when_no_row_is_served() -> None:
    favourite = Favourite()
    state = filled(favours(0, 30), tenant(1), processors=[favourite])

    sample(random_logits(1), state, [1])

    assert not favourite.calls


def test_batch_processor_runs_after_penalties_and_before_the_requests_own() -> None:
    favourite, logits = Favourite(), torch.zeros(1, VOCAB_SIZE)
    seen = []

    def own(_input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores[0, 30].item())
        return scores

    each = tenant(
        0, {"metadata": {"favourite": 30}, "logits_processors": (own,)}, logit_bias={30: -math.inf}
    )
    token = sample(logits, filled(each, processors=[favourite])).token_ids

    assert seen == [50.0]
    assert token.item() == 30


def test_batch_processor_may_read_the_tokens_so_far() -> None:
    class LastAgain(Favourite):
        def apply(
            self, logits: torch.Tensor, slots: torch.Tensor, state: BatchState
        ) -> torch.Tensor:
            last = torch.stack([state.token_history(slot)[-1] for slot in slots.tolist()])
            return logits.scatter(1, last[:, None], 50.0)

    state = filled(favours(0, 1), favours(1, 2), processors=[LastAgain()])
    state.advance(np.array([1]), torch.tensor([33]))

    tokens = sample(random_logits(2), state).token_ids

    assert tokens.tolist() == [OUTPUT[-1], 33]


@pytest.mark.parametrize("returns", [None, torch.zeros(2, 3)], ids=["raises", "wrong shape"])
def test_broken_batch_processor_fails_the_requests_it_serves(returns: torch.Tensor | None) -> None:
    class Broken(Favourite):
        def apply(
            self, _logits: torch.Tensor, _slots: torch.Tensor, _state: BatchState
        ) -> torch.Tensor:
            if returns is None:
                raise ZeroDivisionError("broken")
            return returns

    logits = random_logits(3)
    tenants = [favours(0, 30), tenant(1), favours(2, 31, temperature=1.0)]

    output = sample(logits, filled(*tenants, processors=[Broken()]))

    assert output.read_errors().keys() == {0, 2}
    assert output.token_ids[1] == logits[1].argmax()


def test_batch_processor_that_raises_in_assign_fails_that_request() -> None:
    class Picky(Favourite):
        def assign(self, slot: int, request: Request) -> bool:
            if slot == 1:
                raise LookupError(f"nothing known of {request.request_id}")
            return super().assign(slot, request)

    logits = random_logits(3)
    tenants = [favours(0, 30), favours(1, 31), tenant(2)]

    output = sample(logits, filled(*tenants, processors=[Picky()]))

    assert output.read_errors().keys() == {1}
    assert isinstance(output.read_errors()[1], LookupError)
    assert output.token_ids[[0, 2]].tolist() == [30, logits[2].argmax()]


def test_batch_processor_that_says_nothing_serves_every_request() -> None:
    class Silent(Favourite):
        def assign(self, slot: int, _request: Request) -> None:  # type: ignore[override]  # allowed
            self.tokens[slot] = 12

    tokens = sample(random_logits(2), filled(tenant(0), tenant(1), processors=[Silent()])).token_ids

    assert tokens.tolist() == [12, 12]
