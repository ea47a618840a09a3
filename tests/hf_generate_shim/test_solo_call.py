"""One prompt's blocking call: its rows without pads, its tokens while it runs, its end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hf_generate_shim.solo_call import Cancelled, SoloCall
from tests.hf_generate_shim.calls import PAD, batch, prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Qwen3ForCausalLM


def call(
    model: Qwen3ForCausalLM,
    arguments: dict[str, Any],
    steps: list[Sequence[int]] | None = None,
    **options: Any,
) -> SoloCall:
    """A call of the model's own `generate`."""
    fields: dict[str, Any] = {
        "eos_token_ids": frozenset(),
        "can_stream": True,
        "cancelled": threading.Event(),
        **options,
    }
    return SoloCall(
        model=model,
        generate=type(model).generate,
        arguments=arguments,
        on_tokens=(steps if steps is not None else []).append,
        **fields,
    )


def test_tokens_come_while_it_runs_and_at_the_end(model: Qwen3ForCausalLM) -> None:
    arguments = {**batch(prompt(5)), "max_new_tokens": 4}
    expected = model.generate(**arguments)[0, 5:].tolist()
    steps: list[Sequence[int]] = []

    result = call(model, arguments, steps).run()

    assert result.rows == [expected]
    assert steps == [[token] for token in expected]
    assert result.logprobs is None


def test_rows_end_with_their_own_last_token(model: Qwen3ForCausalLM) -> None:
    ends = frozenset(range(60))
    arguments = {
        **batch(prompt(5)),
        "max_new_tokens": 24,
        "do_sample": True,
        "num_return_sequences": 4,
        "eos_token_id": list(ends),
        "pad_token_id": PAD,
    }

    result = call(model, arguments, eos_token_ids=ends, seed=3).run()

    assert len({len(row) for row in result.rows}) > 1
    assert all(not ends & set(row[:-1]) and PAD not in row for row in result.rows)


def test_seed_reproduces_and_leaves_the_generator_alone(model: Qwen3ForCausalLM) -> None:
    arguments = {**batch(prompt(5)), "max_new_tokens": 8, "do_sample": True}
    state = torch.random.get_rng_state()

    rows = [call(model, arguments, seed=seed).run().rows for seed in (1, 1, 2)]

    assert rows[0] == rows[1] != rows[2]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_logprobs_are_those_of_the_scores(model: Qwen3ForCausalLM) -> None:
    arguments = {**batch(prompt(5)), "max_new_tokens": 4}
    output = model.generate(**arguments, return_dict_in_generate=True, output_scores=True)
    tokens = output.sequences[0, 5:].tolist()
    scores = [step.log_softmax(dim=-1)[0] for step in output.scores]

    result = call(model, arguments, return_logprobs=True).run()

    expected = [float(row[token]) for row, token in zip(scores, tokens, strict=True)]
    assert result.logprobs == [pytest.approx(expected, abs=1e-5)]


def test_cancelled_call_ends_at_its_next_token(model: Qwen3ForCausalLM) -> None:
    cancelled = threading.Event()
    steps: list[Sequence[int]] = []
    running = call(model, {**batch(prompt(5)), "max_new_tokens": 50}, steps, cancelled=cancelled)
    object.__setattr__(
        running, "on_tokens", lambda token_ids: (steps.append(token_ids), cancelled.set())
    )

    with pytest.raises(Cancelled):
        running.run()

    assert len(steps) == 1


def test_call_cancelled_before_its_turn_does_not_begin(model: Qwen3ForCausalLM) -> None:
    cancelled = threading.Event()
    cancelled.set()

    with pytest.raises(Cancelled):
        call(model, {}, cancelled=cancelled).run()
