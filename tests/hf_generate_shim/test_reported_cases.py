"""Cases that users of transformers have reported, each with the expected end.

The issue of huggingface/transformers, or of the named repository, stands with each test. Others are
tested where their subject is: padding, threads, streamers, stop strings, end-of-sequence lists.
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

import pytest

import hf_generate_shim
from nanoserve_core import hookimpl
from tests.hf_generate_shim.calls import EOS, Options, batch, prompt, ragged

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle
    from nanoserve_core.request import Request
    from nanoserve_core.sampling_params import SamplingParams

CALL: Options = {**ragged(), "max_new_tokens": 12}


def test_gradient_checkpointing_in_train_mode_changes_no_token(model: Qwen3ForCausalLM) -> None:
    """#36051, trl#3683: there the cache is switched off, and generation crawls."""
    expected = model.generate(**CALL).tolist()
    new_name = getattr(model, "activation_checkpointing_enable", None)  # since 5.24
    (new_name or model.gradient_checkpointing_enable)()
    model.enable_input_require_grads()
    model.train()

    with (
        hf_generate_shim.installed(model, num_kvcache_blocks=64) as handle,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        outputs = [model.generate(**CALL, use_cache=use_cache) for use_cache in (True, False)]

    assert [output.tolist() for output in outputs] == [expected, expected]
    assert handle.counters.fast == 2
    assert model.training


def test_left_pads_that_are_the_end_of_sequence_bring_no_warning(
    model: Qwen3ForCausalLM, handle: Handle, caplog: pytest.LogCaptureFixture
) -> None:
    """#38071."""
    options = batch(prompt(3), prompt(9), pad=EOS)

    with caplog.at_level(logging.WARNING):
        model.generate(**options, max_new_tokens=4, eos_token_id=EOS, pad_token_id=EOS)

    assert not [record for record in caplog.records if "padding" in record.getMessage()]
    assert handle.counters.fast == 1


class Recorder:
    """Keeps the sampling options of each request."""

    def __init__(self) -> None:
        self.seen: list[SamplingParams] = []

    @hookimpl
    def nanoserve_request_added(self, request: Request) -> None:
        """At submit."""
        self.seen.append(request.sampling)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 1.0, "top_k": 50}, (1.0, 50, 0.95)),
        ({"temperature": 1.0}, (1.0, 20, 0.95)),
        ({"top_p": 1.0}, (0.6, 20, 1.0)),
        ({}, (0.6, 20, 0.95)),
    ],
)
def test_explicit_values_win_over_those_of_the_checkpoint(
    model: Qwen3ForCausalLM, given: Options, expected: tuple[float, int, float]
) -> None:
    """#42762, trl#5888: also when they are transformers' defaults."""
    model.generation_config.update(temperature=0.6, top_k=20, top_p=0.95, do_sample=True)
    recorder = Recorder()

    with hf_generate_shim.installed(model, plugins=[recorder], num_kvcache_blocks=64):
        model.generate(**batch(prompt(4)), max_new_tokens=2, **given)

    (sampling,) = recorder.seen
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == expected


def test_fifty_lengths_of_prompts_are_served_alike(model: Qwen3ForCausalLM, handle: Handle) -> None:
    """#29151, #37908: nothing is prepared for each new length; 50 calls take 50 prefills."""
    lengths = range(1, 51)
    before = handle.stats().steps

    outputs = [model.generate(**batch(prompt(length)), max_new_tokens=2) for length in lengths]

    assert [output.shape[1] for output in outputs] == [length + 2 for length in lengths]
    assert handle.stats().steps - before == 50 * 2
    assert handle.counters.fast == 50
