"""Every way to change the weights of a live module is seen, and nothing is seen without one."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from nanoserve_core.kernels import reference
from nanoserve_core.models.adopt import Adoption
from nanoserve_core.models.weights_epoch import WeightsChange, WeightsEpoch
from tests.nanoserve_core.random_qwen3 import frozen, random_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import Qwen3ForCausalLM

    Change = Callable[[Qwen3ForCausalLM], None]
    Watched = Callable[[nn.Module], WeightsEpoch]


def train_step(
    model: nn.Module, make: Callable[..., torch.optim.Optimizer], **options: object
) -> None:
    """One backward pass and one step of an optimizer."""
    optimizer = make([each for each in model.parameters() if each.requires_grad], **options)
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def sgd(model: Qwen3ForCausalLM) -> None:
    train_step(model, torch.optim.SGD, lr=0.1)


def adamw(model: Qwen3ForCausalLM) -> None:
    train_step(model, torch.optim.AdamW, lr=0.01, foreach=True)


def fused_adamw(model: Qwen3ForCausalLM) -> None:
    train_step(model, torch.optim.AdamW, lr=0.01, fused=True)


def fused_sgd(model: Qwen3ForCausalLM) -> None:
    train_step(model, torch.optim.SGD, lr=0.1, fused=True)


def fused_adamw_on_another_thread(model: Qwen3ForCausalLM) -> None:
    thread = threading.Thread(target=fused_adamw, args=(model,))
    thread.start()
    thread.join()


def backward_alone(model: Qwen3ForCausalLM) -> None:
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()


def write_under_no_grad(model: Qwen3ForCausalLM) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(0.5)


def write_under_inference_mode(model: Qwen3ForCausalLM) -> None:
    with torch.inference_mode():
        model.lm_head.weight.add_(1.0)


def write_through_data(model: Qwen3ForCausalLM) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data.add_(0.01)


def write_a_small_tensor_through_data(model: Qwen3ForCausalLM) -> None:
    model.model.layers[0].self_attn.q_norm.weight.data[5] += 0.01


def copy_into_data(model: Qwen3ForCausalLM) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 0.5)


def load_state_dict(model: Qwen3ForCausalLM) -> None:
    model.load_state_dict(random_model(seed=5).state_dict())


VALUES = [
    sgd,
    adamw,
    fused_adamw,
    fused_sgd,
    fused_adamw_on_another_thread,
    backward_alone,
    write_under_no_grad,
    write_under_inference_mode,
    write_through_data,
    write_a_small_tensor_through_data,
    copy_into_data,
    load_state_dict,
]


def load_by_assignment(model: Qwen3ForCausalLM) -> None:
    model.load_state_dict(random_model(seed=5).state_dict(), assign=True)


def new_parameter(model: Qwen3ForCausalLM) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data)


def new_module(model: Qwen3ForCausalLM) -> None:
    mlp = model.model.layers[0].mlp
    mlp.up_proj = copy.deepcopy(mlp.up_proj)


def other_dtype(model: Qwen3ForCausalLM) -> None:
    model.to(torch.bfloat16)


def there_and_back(model: Qwen3ForCausalLM) -> None:
    model.to(torch.bfloat16).to(torch.float32)


def repointed_data(model: Qwen3ForCausalLM) -> None:
    weight = model.model.norm.weight
    weight.data = weight.data.clone()


def vector_round_trip(model: Qwen3ForCausalLM) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()), model.parameters())


def hook(model: Qwen3ForCausalLM) -> None:
    model.model.layers[0].register_forward_hook(lambda *_: None)


def forward_on_an_instance(model: Qwen3ForCausalLM) -> None:
    model.model.layers[0].forward = model.model.layers[0].forward


STRUCTURE = [
    load_by_assignment,
    new_parameter,
    new_module,
    other_dtype,
    there_and_back,
    repointed_data,
    vector_round_trip,
    hook,
    forward_on_an_instance,
]


@pytest.mark.parametrize("change", VALUES)
def test_changed_values_are_seen_once(change: Change, watched: Watched) -> None:
    model = random_model()
    epoch = watched(model)

    change(model)
    found = epoch.check()

    assert found is WeightsChange.VALUES
    assert epoch.number == 1
    assert epoch.check() is WeightsChange.NONE
    assert epoch.number == 1


@pytest.mark.parametrize("change", STRUCTURE)
def test_moved_or_rewired_weights_are_seen(change: Change, watched: Watched) -> None:
    model = random_model()
    epoch = watched(model)

    change(model)
    found = epoch.check()

    assert found is WeightsChange.STRUCTURE
    assert epoch.number == 1
    epoch.rebase(model)
    assert epoch.check() is WeightsChange.NONE


@pytest.mark.parametrize(
    "change", [sgd, fused_adamw, write_through_data, load_state_dict, load_by_assignment]
)
def test_changes_of_fused_weights_are_seen_too(change: Change) -> None:
    model = frozen(random_model())
    adoption = Adoption(model)
    model.requires_grad_(True)
    adoption.refresh()
    before = adoption.epoch

    change(model)
    adoption.refresh()

    assert adoption.epoch == before + 1
    attention = model.model.layers[0].self_attn
    expected = torch.cat([getattr(attention, f"{name}_proj").weight.data for name in "qkv"])
    out = torch.empty(64, 128)
    adoption.weights.layers[0].qkv(torch.eye(64), ops=reference, out=out)
    torch.testing.assert_close(out, expected.t())
    adoption.close()


def test_nothing_is_seen_when_the_module_only_runs(watched: Watched) -> None:
    model = random_model()
    epoch = watched(model)

    model.train()
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    model.eval()
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, pad_token_id=0)
    copy.deepcopy(model)
    model.state_dict()

    assert epoch.check() is WeightsChange.NONE


def test_nan_equals_itself(watched: Watched) -> None:
    model = random_model()
    model.model.norm.weight.data[3] = torch.nan

    epoch = watched(model)

    assert epoch.check() is WeightsChange.NONE


@pytest.mark.parametrize("write", [write_through_data, write_under_no_grad])
def test_writes_into_frozen_weights_are_seen_on_a_cpu(write: Change, watched: Watched) -> None:
    model = frozen(random_model())
    epoch = watched(model)

    write(model)

    assert epoch.check() is WeightsChange.VALUES
    assert epoch.check() is WeightsChange.NONE


def test_frozen_weights_elsewhere_are_not_read(watched: Watched) -> None:
    epoch = watched(frozen(random_model()).to("meta"))  # which has no values

    assert epoch.check() is WeightsChange.NONE


@pytest.mark.parametrize("is_frozen", [False, True])
def test_write_behind_a_change_of_requires_grad_is_seen(is_frozen: bool, watched: Watched) -> None:
    model = random_model().requires_grad_(not is_frozen)
    epoch = watched(model)

    model.requires_grad_(is_frozen)  # as PEFT does when it wraps a model
    write_through_data(model)

    assert epoch.check() is WeightsChange.VALUES


def test_step_of_any_optimizer_counts_because_copies_follow(watched: Watched) -> None:
    average = frozen(random_model())
    epoch = watched(average)
    trained = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    trained(torch.ones(1, 2)).sum().backward()

    optimizer.step()
    average.lm_head.weight.data.mul_(0.9)

    assert epoch.check() is WeightsChange.VALUES


def test_module_made_under_inference_mode_can_be_watched(watched: Watched) -> None:
    with torch.inference_mode():
        model = random_model()

    epoch = watched(model)

    assert epoch.check() is WeightsChange.NONE


def test_bfloat16_weights_are_sampled(watched: Watched) -> None:
    model = random_model().to(torch.bfloat16)
    epoch = watched(model)

    write_through_data(model)

    assert epoch.check() is WeightsChange.VALUES


def test_samples_of_a_matrix_visit_many_columns(watched: Watched) -> None:
    matrix = nn.Linear(1024, 1024, bias=False)
    epoch = watched(matrix)
    num_seen = 0

    for column in range(0, 1024, 16):
        matrix.weight.data[:, column] += 1.0
        num_seen += epoch.check() is WeightsChange.VALUES

    assert num_seen >= 3


def test_closed_epoch_counts_no_steps_and_is_forgotten() -> None:
    epoch = WeightsEpoch(random_model())
    reference = weakref.ref(epoch)
    epoch.close()
    epoch.close()

    train_step(random_model(seed=1), torch.optim.SGD, lr=0.1)
    found = epoch.check()
    del epoch
    gc.collect()

    assert found is WeightsChange.NONE
    assert reference() is None


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Makes epochs that are closed after the test."""
    with ExitStack() as stack:

        def watch(module: nn.Module) -> WeightsEpoch:
            epoch = WeightsEpoch(module)
            stack.callback(epoch.close)
            return epoch

        yield watch
