"""Training between two calls: nothing computed with other weights is served.

The prompts fill several blocks, and a repeated call takes them from the prefix cache; after a
change of the weights that cache would give other tokens than the model does.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch

from tests.hf_generate_shim.calls import Options, batch, prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle

CALL: Options = {**batch(prompt(60), prompt(80)), "max_new_tokens": 16}


def with_optimizer(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
) -> Callable[[Qwen3ForCausalLM], None]:
    """A training step of this optimizer."""

    def step(model: Qwen3ForCausalLM) -> None:
        optimizer = make(list(model.parameters()))
        model(input_ids=CALL["input_ids"], labels=CALL["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def through_data(model: Qwen3ForCausalLM) -> None:
    """Write past autograd's version counter, as sharded optimizers copy back."""
    for parameter in model.model.layers[0].self_attn.parameters():
        parameter.data.mul_(1.5)


def load_other_weights(model: Qwen3ForCausalLM) -> None:
    """A checkpoint of other weights, in place."""
    state = {name: tensor * 1.2 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)


def assign_other_weights(model: Qwen3ForCausalLM) -> None:
    """New parameters in the place of the old ones."""
    state = {name: tensor * 1.2 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


CHANGES: dict[str, Callable[[Qwen3ForCausalLM], None]] = {
    "fused AdamW": with_optimizer(lambda p: torch.optim.AdamW(p, lr=0.05, fused=True)),
    "AdamW": with_optimizer(lambda p: torch.optim.AdamW(p, lr=0.05)),
    "SGD": with_optimizer(lambda p: torch.optim.SGD(p, lr=0.5)),
    "fused SGD": with_optimizer(lambda p: torch.optim.SGD(p, lr=0.5, fused=True)),
    "p.data": through_data,
    "load_state_dict": load_other_weights,
    "load_state_dict(assign=True)": assign_other_weights,
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_weights_are_used_at_once(
    model: Qwen3ForCausalLM, handle: Handle, name: str
) -> None:
    before = [model.generate(**CALL).tolist() for _ in range(2)]
    cached = handle.stats().prompt_tokens_cached

    CHANGES[name](model)
    after = model.generate(**CALL).tolist()
    again = model.generate(**CALL).tolist()

    expected = copy.deepcopy(model).generate(**CALL).tolist()
    assert before[0] == before[1] != expected
    assert after == again == expected
    assert cached >= 48 + 64  # the repeated calls did hit
    assert handle.counters.fast == 4


def test_half_precision_from_now_on(model: Qwen3ForCausalLM, handle: Handle) -> None:
    model.generate(**CALL)

    model.bfloat16()
    output = model.generate(**CALL, return_dict_in_generate=True, output_logits=True)

    expected = copy.deepcopy(model).generate(
        **CALL, return_dict_in_generate=True, output_logits=True
    )
    torch.testing.assert_close(output.logits[0], expected.logits[0], atol=0.1, rtol=0.1)
    assert handle.counters.fast + handle.counters.fallback == 2


def test_training_goes_on_as_if_nothing_were_installed(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    twin = copy.deepcopy(model)
    for trained in (model, twin):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01, fused=True)
        for _ in range(3):
            trained.generate(**CALL)
            trained(input_ids=CALL["input_ids"], labels=CALL["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
    assert handle.counters.fast == 3
