"""The forward pass by itself: what it writes, what it leaves alone, and whose state it uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from nanoserve_core.kernels import reference
from nanoserve_core.kv_cache import KVCache
from nanoserve_core.layers.attention import ForwardBatch, TorchAttention
from nanoserve_core.models.adopt import adopted_weights
from nanoserve_core.models.eligibility import spec_of
from nanoserve_core.models.qwen3 import Qwen3Model, scratch_nbytes
from tests.nanoserve_core.random_qwen3 import random_model, random_tokens, reference_logits

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")
MODEL = random_model()
SPEC = spec_of(MODEL)
BLOCK_SIZE = 4
SENTINEL = 9.0


def test_kv_outside_the_live_slots_is_not_touched() -> None:
    model, cache = new_model(), new_cache()
    slots = [9, 10, 11, 20, 21]
    before = cache.tensor.clone()

    model.forward(batch_of(random_tokens(5), slots), cache)

    untouched = torch.ones(cache.num_blocks * BLOCK_SIZE, dtype=torch.bool)
    untouched[slots] = False
    for layer, old in zip(cache.slots, before.flatten(2, 3).unbind(1), strict=True):
        assert torch.equal(layer[:, untouched], old[:, untouched])
        assert (layer[:, slots] != SENTINEL).all()


def test_padding_rows_change_neither_kv_nor_results() -> None:
    model, cache, padded_cache = new_model(), new_cache(), new_cache()
    tokens, slots = random_tokens(3), [4, 5, 6]
    expected = model.forward(batch_of(tokens, slots, wanted=[0, 1, 2]), cache)

    padded = batch_of([*tokens, 0, 0], [*slots, -1, -1], num_real=3)
    logits = model.forward(padded, padded_cache)

    torch.testing.assert_close(logits[:3], expected)
    torch.testing.assert_close(padded_cache.tensor, cache.tensor)


def test_only_the_wanted_rows_get_logits() -> None:
    model, tokens = new_model(), random_tokens(6)
    batch = batch_of(tokens, list(range(6)), wanted=[5, 2])

    logits = model.forward(batch, new_cache())

    expected = reference_logits(MODEL, tokens)[[5, 2]]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_logits_of_earlier_steps_stay_as_they_are() -> None:
    model, cache = new_model(), new_cache()
    first = model.forward(batch_of(random_tokens(4), [0, 1, 2, 3]), cache)
    kept = first.clone()

    model.forward(batch_of(random_tokens(4, seed=1), [4, 5, 6, 7]), cache)

    assert torch.equal(first, kept)


def test_two_models_in_one_process_do_not_see_each_other() -> None:
    tokens, slots = random_tokens(5), [0, 1, 2, 3, 4]
    first, second, cache = new_model(), new_model(), new_cache()
    first_hidden = first.hidden_states(batch_of(tokens, slots), cache)
    kept = first_hidden.clone()

    second.hidden_states(batch_of(random_tokens(5, seed=1), slots), new_cache())

    assert torch.equal(first_hidden, kept)


def test_scratch_is_what_it_is_said_to_be() -> None:
    # Three streams of hidden_size; and gate, up and their product, wider than what attention needs.
    assert scratch_nbytes(SPEC, 100) == 100 * (3 * 64 + 3 * 96) * 4


@pytest.mark.parametrize("num_tokens", [1, 2, 32])
def test_steps_of_any_size_fit_the_scratch(num_tokens: int) -> None:
    model, tokens = new_model(), random_tokens(num_tokens)
    batch = batch_of(tokens, list(range(num_tokens)))

    logits = model.forward(batch, new_cache())

    assert logits.argmax(-1).tolist() == reference_logits(MODEL, tokens)[-1:].argmax(-1).tolist()


def new_model() -> Qwen3Model:
    """A model over the weights of `MODEL`, for steps of at most 32 tokens."""
    return Qwen3Model(
        SPEC,
        adopted_weights(MODEL),
        backend=TorchAttention(SPEC, device=CPU),
        ops=reference,
        max_num_tokens=32,
        num_positions=64,
    )


def new_cache() -> KVCache:
    """Eight blocks full of `SENTINEL`."""
    cache = KVCache(SPEC, num_blocks=8, block_size=BLOCK_SIZE, device=CPU)
    cache.tensor.fill_(SENTINEL)
    return cache


def batch_of(
    token_ids: list[int],
    slots: list[int],
    *,
    wanted: list[int] | None = None,
    num_real: int | None = None,
) -> ForwardBatch:
    """A fresh prompt at these slots, of which ``num_real`` tokens count; the rest is padding."""
    num_tokens = len(token_ids)
    num_real = num_tokens if num_real is None else num_real
    starts, lens = [0, num_real], [num_real]
    if num_real < num_tokens:  # each padding token is a row that attends to itself
        starts += range(num_real + 1, num_tokens + 1)
        lens += [1] * (num_tokens - num_real)
    query_start = torch.tensor(starts, dtype=torch.int32)
    kv_lens = torch.tensor(lens, dtype=torch.int32)
    tables = torch.zeros(len(lens), 1, dtype=torch.int32)
    wanted = list(range(num_tokens)) if num_real < num_tokens else wanted or [num_tokens - 1]
    return ForwardBatch(
        token_ids=torch.tensor(token_ids),
        positions=torch.arange(num_tokens),
        slot_mapping=torch.tensor(slots),
        query_start=query_start,
        kv_lens=kv_lens,
        block_tables=tables,
        logits_indices=torch.tensor(wanted),
        num_decode_seqs=0,
        host_query_start=query_start.numpy(),
        host_kv_lens=kv_lens.numpy(),
        host_block_tables=tables.numpy(),
    )


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """Switched off by the runner, which is not here."""
    with torch.no_grad():
        yield
