"""`Sampler`: any mix of rows in one batch, each sampled as if it were alone."""

from __future__ import annotations

import itertools
import math
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanoserve_core.errors import RequestFailed
from nanoserve_core.sampler import Sampler, token_logprobs
from tests.nanoserve_core.filled_slots import (
    EOS,
    VOCAB_SIZE,
    assignment,
    filled,
    sample,
    sample_and_advance,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanoserve_core.plan import SlotAssignment
    from nanoserve_core.request import PositionLogprobs

# One of everything; each is sampled alone and beside all others.
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.5},
    {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "logit_bias": {3: 2.0, 7: -math.inf}},
    {"bad_words_ids": ((4,), (2, 3, 9))},
    {"min_tokens": 5},
    {"logprobs": 3},
    {"temperature": 0.9, "top_k": 4, "logprobs": 2, "logprobs_mode": "processed_logprobs"},
    {"temperature": 0.9, "top_p": 0.8, "request": {"output_scores": True}},
    {"request": {"output_logits": True, "output_scores": True}},
    {"temperature": 1.0, "request": {"logits_processors": (lambda _ids, scores: scores * 0.5,)}},
]


def random_logits(rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def everything(output: tuple[int, ...] = (5, 6), **common: Any) -> list[SlotAssignment]:
    """One tenant of each kind, in slots 0, 1, ..."""
    return [
        assignment(slot, output=output, seed=100 + slot, **{**kind, **common})
        for slot, kind in enumerate(KINDS)
    ]


def test_greedy_batch_is_the_argmax() -> None:
    logits = random_logits(4)

    output = sample(logits, filled(*(assignment(slot) for slot in range(4))))

    assert output.token_ids.tolist() == logits.argmax(-1).tolist()
    assert output.read_logprobs() == (None,) * 4
    assert output.read_errors() == {}


def test_greedy_and_sampled_rows_mix_in_one_batch() -> None:
    logits = random_logits(200)
    params = [{}, {"temperature": 1.0}]
    state = filled(*(assignment(slot, seed=slot, **params[slot % 2]) for slot in range(200)))

    tokens = sample(logits, state).token_ids

    largest = logits.argmax(-1)
    assert torch.equal(tokens[::2], largest[::2])
    assert (tokens[1::2] != largest[1::2]).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 20_000])
def test_each_kind_of_row_is_the_same_alone_and_beside_all_others(
    dtype: torch.dtype, vocab_size: int
) -> None:
    logits = random_logits(len(KINDS), vocab_size).to(dtype)
    together = sample(logits, filled(*everything(), vocab_size=vocab_size))

    for slot, tenant in enumerate(everything()):
        alone = sample(logits[slot : slot + 1], filled(tenant, vocab_size=vocab_size), [slot])

        assert alone.token_ids.item() == together.token_ids[slot].item()
        assert alone.read_logprobs()[0] == together.read_logprobs()[slot]
        for one, many in ((alone.scores, together.scores), (alone.logits, together.logits)):
            assert (0 in one) == (slot in many)
            assert 0 not in one or torch.equal(one[0], many[slot])


def test_threads_do_not_change_a_bit() -> None:
    logits = random_logits(4, 70_000)
    params: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.01}]
    tenants = [
        assignment(slot, temperature=1.0, logprobs=2, **each) for slot, each in enumerate(params)
    ]
    before = torch.get_num_threads()

    outputs = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        outputs.append(sample(logits, filled(*tenants, vocab_size=70_000)))
    torch.set_num_threads(before)

    assert outputs[0].token_ids.tolist() == outputs[1].token_ids.tolist()
    assert outputs[0].read_logprobs() == outputs[1].read_logprobs()


def test_logits_of_the_caller_are_not_changed() -> None:
    logits = random_logits(len(KINDS))
    before = logits.clone()

    sample(logits, filled(*everything()))

    assert torch.equal(logits, before)


def test_seeded_request_ignores_its_neighbours() -> None:  # B10
    steps = [random_logits(8, seed=step) for step in range(12)]

    def tokens_of_a(slot: int, others: list[int]) -> list[int]:
        tenants = [assignment(slot, seed=42, temperature=1.0, top_p=0.9)]
        tenants += [assignment(other, seed=other * 7, temperature=2.0) for other in others]
        state = filled(*tenants)
        slots = sorted([slot, *others], reverse=bool(slot))
        row = slots.index(slot)
        result = []
        for logits in steps:
            mine = logits.roll(row, 0)[: len(slots)]  # A's logits are the same in every batch
            result.append(sample_and_advance(mine, state, slots)[row])
        return result

    alone = tokens_of_a(0, [])

    assert tokens_of_a(0, [1]) == alone
    assert tokens_of_a(5, [0, 1, 2, 3, 4, 6, 7]) == alone


def test_draw_depends_on_the_position_and_not_on_the_step() -> None:
    logits = random_logits(1)
    first = filled(assignment(0, output=(5,), seed=3, temperature=1.0))
    resumed = filled(assignment(0, output=(5, 8), seed=3, temperature=1.0))
    sample(logits, first)
    first.advance(np.array([0]), torch.tensor([8]))

    tokens = sample(logits, first).token_ids, sample(logits, resumed).token_ids

    assert tokens[0].item() == tokens[1].item()


def test_temperature_divides_before_the_filters_as_in_transformers() -> None:
    logits = random_logits(1)
    warpers = LogitsProcessorList(
        [TemperatureLogitsWarper(0.6), TopKLogitsWarper(20), TopPLogitsWarper(0.8)]
    )
    state = filled(
        assignment(0, temperature=0.6, top_k=20, top_p=0.8, request={"output_scores": True})
    )

    scores = sample(logits, state).scores[0]

    assert torch.equal(scores, warpers(None, logits)[0])


@pytest.mark.parametrize("temperature", [1e-40, 1e-20, 1e-5])
def test_tiny_temperature_is_the_argmax_and_no_error(temperature: float) -> None:
    logits = random_logits(3)
    state = filled(*(assignment(slot, temperature=temperature) for slot in range(3)))

    output = sample(logits, state)

    assert output.token_ids.tolist() == logits.argmax(-1).tolist()
    assert output.read_errors() == {}


def probabilities_of(entry: PositionLogprobs | None) -> dict[int, float]:
    assert entry is not None
    return {token: math.exp(logprob.logprob) for token, logprob in entry.items()}


def test_raw_and_processed_logprobs_mean_what_they_say() -> None:  # B12
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(2, -1)
    tenants = [
        assignment(slot, temperature=0.5, top_k=2, logprobs=4, logprobs_mode=mode)
        for slot, mode in enumerate(("raw_logprobs", "processed_logprobs"))
    ]

    raw, processed = sample(logits, filled(*tenants, vocab_size=4)).read_logprobs()

    def softmax(values: list[float]) -> list[float]:
        total = sum(map(math.exp, values))
        return [math.exp(value) / total for value in values]

    expected = {
        "raw": dict(enumerate(softmax([2, 1, 0, -1]))),
        "processed": dict(enumerate([*softmax([4, 2]), 0.0, 0.0])),
    }
    assert probabilities_of(raw) == pytest.approx(expected["raw"], abs=1e-6)
    assert probabilities_of(processed) == pytest.approx(expected["processed"], abs=1e-6)
    assert sum(probabilities_of(raw).values()) == pytest.approx(1)
    assert sum(probabilities_of(processed).values()) == pytest.approx(1)
    assert processed is not None
    assert processed[3].logprob == -math.inf


def test_logprobs_hold_the_chosen_token_and_the_top_with_ranks() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).expand(3, -1)
    tenants = [
        assignment(0, logprobs=2),
        assignment(1, logprobs=0),
        assignment(2, logprobs=1, logit_bias={0: 9.0}),
    ]

    top_two, none, biased = sample(logits, filled(*tenants, vocab_size=4)).read_logprobs()

    assert top_two is not None
    assert none is not None
    assert biased is not None
    assert {token: entry.rank for token, entry in top_two.items()} == {1: 1, 3: 2}
    assert list(none) == [1]
    assert {token: entry.rank for token, entry in biased.items()} == {0: 4, 1: 1}


def test_processed_logprobs_of_a_greedy_row_are_not_divided_by_a_temperature() -> None:
    logits = random_logits(1)
    state = filled(assignment(0, logprobs=1, logprobs_mode="processed_logprobs"))

    (entry,) = sample(logits, state).read_logprobs()

    expected = logits.softmax(-1).max().item()
    assert list(probabilities_of(entry).values()) == pytest.approx([expected])


def test_logprobs_of_given_tokens_serve_prompts() -> None:
    logits = random_logits(300, 20_000).to(torch.bfloat16)
    tokens = torch.arange(300)

    entries = token_logprobs(logits, tokens, 1)

    exact = logits.double().log_softmax(-1)
    assert len(entries) == 300
    for row, entry in enumerate(entries):
        best = int(logits[row].argmax())
        assert set(entry) == {row, best}
        assert entry[best].rank == 1
        assert entry[row].logprob == pytest.approx(exact[row, row].item(), abs=1e-5)


def test_outputs_are_ordinary_float32_tensors_of_their_own() -> None:
    logits = random_logits(2).to(torch.bfloat16)
    wants = {"output_logits": True, "output_scores": True}
    state = filled(assignment(0, request=wants), assignment(1, temperature=1.0, request=wants))

    output = sample(logits, state)

    assert torch.equal(torch.stack([output.logits[0], output.logits[1]]), logits.float())
    assert torch.equal(torch.stack([output.scores[0], output.scores[1]]), logits.float())
    rows = [*output.logits.values(), *output.scores.values()]
    assert all(row.dtype == torch.float32 and not row.is_inference() for row in rows)
    assert len({row.untyped_storage().data_ptr() for row in rows}) == 4
    assert all(row.untyped_storage().nbytes() == 4 * VOCAB_SIZE for row in rows)


@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_sampled_row_without_a_distribution_fails_alone(
    value: float, filters: dict[str, float]
) -> None:
    logits = random_logits(3)
    logits[1, slice(None) if value == -math.inf else slice(3, 4)] = value
    state = filled(*(assignment(slot, temperature=1.0, **filters) for slot in range(3)))

    output = sample(logits, state)

    assert output.read_errors().keys() == {1}
    with pytest.raises(RequestFailed, match="no token can be drawn"):
        raise output.read_errors()[1]
    assert 0 <= output.token_ids[1] < VOCAB_SIZE


def test_greedy_row_without_a_distribution_gives_torchs_argmax() -> None:
    logits = random_logits(2)
    logits[0], logits[1, 7] = -math.inf, math.nan

    output = sample(logits, filled(assignment(0), assignment(1)))

    assert output.token_ids.tolist() == [0, 7]
    assert output.read_errors() == {}


def test_many_rows_are_sampled_in_parts_with_the_same_result() -> None:
    logits = random_logits(60, 40_000)  # more than one part
    state = filled(
        *(assignment(slot, seed=slot, temperature=1.0, top_k=9) for slot in range(60)),
        vocab_size=40_000,
    )

    tokens = sample(logits, state).token_ids.tolist()

    assert tokens == [
        int(sample(logits[slot : slot + 1], state, [slot]).token_ids) for slot in range(60)
    ]


def test_no_rows_give_no_tokens() -> None:
    state = filled(assignment(0))

    output = sample(torch.zeros(0, VOCAB_SIZE), state, [])

    assert output.token_ids.tolist() == []
    assert output.read_logprobs() == ()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made inside, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        _types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage.data_ptr(), storage.nbytes()
        if key in self.seen or not nbytes:
            return
        self.seen.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.forget, key, nbytes)

    def forget(self, key: int, nbytes: int) -> None:
        self.seen.discard(key)
        self.live -= nbytes


@pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS if not kind.get("request")]
    + [{"temperature": 1.0, "top_p": 0.9999999}],
    ids=str,
)
def test_scratch_stays_below_the_declared_peak(kind: dict[str, Any]) -> None:  # B14
    rows, vocab_size = 12, 30_000
    logits = random_logits(rows, vocab_size) * 0.01  # flat: the longest way to every cut
    tenants = [assignment(slot, **kind) for slot in range(rows)]
    state = filled(*tenants, vocab_size=vocab_size)

    with LiveBytes() as memory:
        sample(logits, state)

    assert 0 < memory.peak <= Sampler.peak_nbytes(rows, vocab_size)


def test_every_pair_of_kinds_shares_a_batch() -> None:
    tenants = everything()
    logits = random_logits(len(KINDS))
    expected = sample(logits, filled(*tenants)).token_ids
    state = filled(*tenants)

    for pair in itertools.combinations(range(len(KINDS)), 2):
        tokens = sample(logits[list(pair)], state, list(pair)).token_ids

        assert tokens.tolist() == expected[list(pair)].tolist()


def test_end_of_sequence_is_held_back_until_enough_tokens() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, EOS], logits[0, 8], logits[0, 20] = 9.0, 8.0, 1.0
    state = filled(assignment(0, min_tokens=2, stop_token_ids=(8,)))

    tokens = [sample_and_advance(logits, state)[0] for _ in range(3)]

    assert tokens == [20, 20, EOS]
