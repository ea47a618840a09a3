"""`torch.compile` around an installed model. No compiler runs: what is wrapped decides the path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.hf_generate_shim.calls import Options, ragged

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle

CALL: Options = {**ragged(), "max_new_tokens": 6}


def test_generate_of_a_compiled_model_is_that_of_the_model_inside(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    expected = model.generate(**CALL).tolist()

    output = torch.compile(model, backend="eager").generate(**CALL).tolist()

    assert output == expected
    assert handle.counters.fast == 2


def test_model_compiled_in_place_is_served(model: Qwen3ForCausalLM, handle: Handle) -> None:
    expected = model.generate(**CALL).tolist()

    model.compile(backend="eager")
    output = model.generate(**CALL).tolist()

    assert output == expected
    assert handle.counters.fast == 2


def test_compiled_forward_on_the_instance_is_served(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    expected = model.generate(**CALL).tolist()

    model.forward = torch.compile(model.forward, backend="eager")
    output = model.generate(**CALL).tolist()

    assert output == expected
    assert handle.counters.fast == 2
