"""A model is looked at once, and again as soon as something that matters has changed."""

from __future__ import annotations

import gc
import weakref
from types import MethodType
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from nanoserve_adapters.testing import tiny_model as new_model
from nanoserve_core.models import eligibility
from nanoserve_core.models.eligibility import Eligibility, ineligible_reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import Qwen3ForCausalLM


class OwnLinear(nn.Linear):
    """A class that nobody knows."""


def mlp_of(model: Qwen3ForCausalLM) -> nn.Module:
    """Of the first layer."""
    return model.model.layers[0].mlp


def add_module(model: Qwen3ForCausalLM) -> None:
    """A module of a foreign class."""
    mlp_of(model).extra = OwnLinear(2, 2)


def replace_module(model: Qwen3ForCausalLM) -> None:
    """A module of a foreign class in the place of one."""
    mlp_of(model).up_proj = OwnLinear(64, 96, bias=False)


def swap_class(model: Qwen3ForCausalLM) -> None:
    """As FSDP does."""
    mlp_of(model).up_proj.__class__ = OwnLinear


def replace_forward(model: Qwen3ForCausalLM) -> None:
    """As accelerate's hooks do."""
    mlp_of(model).forward = torch.nn.functional.relu


def add_hook(model: Qwen3ForCausalLM) -> None:
    """A forward hook of the user's."""
    mlp_of(model).register_forward_pre_hook(lambda *_: None)


def move_to_meta(model: Qwen3ForCausalLM) -> None:
    """As offloading does."""
    mlp_of(model).up_proj.weight = nn.Parameter(torch.empty(96, 64, device="meta"))


def turn_around(model: Qwen3ForCausalLM) -> None:
    """The same memory, read otherwise."""
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.T


def change_type(model: Qwen3ForCausalLM) -> None:
    """One parameter of another type than the rest."""
    weight = model.model.norm.weight
    weight.data = weight.data.double()


def cut_layers(model: Qwen3ForCausalLM) -> None:
    """Fewer layers than the config says."""
    model.model.layers = model.model.layers[:1]


def change_config(model: Qwen3ForCausalLM) -> None:
    """Another vocabulary than the weights have."""
    model.config.vocab_size += 1


def quantise(model: Qwen3ForCausalLM) -> None:
    """What transformers sets."""
    model.is_quantized = True


def load_adapter(model: Qwen3ForCausalLM) -> None:
    """What transformers sets."""
    model._hf_peft_config_loaded = True  # noqa: SLF001 - it has no other name


CHANGES = [
    add_module, replace_module, swap_class, replace_forward, add_hook, move_to_meta, turn_around,
    change_type, cut_layers, change_config, quantise, load_adapter,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_change_is_seen_after_a_look_that_found_nothing(
    change: Callable[[Qwen3ForCausalLM], None],
) -> None:
    model = new_model()
    memory = Eligibility(model)
    before = [memory.reason(), memory.reason()]

    change(model)

    expected = ineligible_reason(model)
    assert expected is not None
    assert [*before, memory.reason()] == [None, None, expected]


def test_dropout_counts_in_train_mode_only() -> None:
    model = new_model(attention_dropout=0.1)
    memory = Eligibility(model)

    reasons = []
    for mode in (False, True, False):
        model.train(mode)
        reasons.append(memory.reason())

    assert [reason is None for reason in reasons] == [True, False, True]


def test_model_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    memory = Eligibility(model)
    looks: list[nn.Module] = []

    def look(model: nn.Module) -> str | None:
        looks.append(model)
        return ineligible_reason(model)

    monkeypatch.setattr(eligibility, "ineligible_reason", look)
    for _ in range(3):
        memory.reason()
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    memory.reason()

    assert len(looks) == 1


def test_forward_is_looked_at_anew_where_a_harmless_one_stood() -> None:
    model = new_model()
    model.forward = MethodType(type(model).forward, model)
    eligibility = Eligibility(model)
    first = eligibility.reason()

    model.forward = lambda **_: None

    assert first is None
    assert "forward of the model is replaced" in (eligibility.reason() or "")


def test_undone_change_makes_it_eligible_again() -> None:
    model = new_model()
    memory = Eligibility(model)
    memory.reason()

    handle = model.register_forward_hook(lambda *_: None)
    with_hook = memory.reason()
    handle.remove()

    assert with_hook is not None
    assert memory.reason() is None


def test_memory_does_not_keep_the_model_alive() -> None:
    model = new_model()
    memory = Eligibility(model)
    memory.reason()
    reference = weakref.ref(model)

    del model
    gc.collect()

    assert reference() is None
    assert memory is not None
