"""Options of nanoserve's own travel in a `GenerationConfig`, and are never lost."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import GenerationConfig

import hf_generate_shim
from hf_generate_shim import NanoserveFallbackWarning
from nanoserve_core import hookimpl
from nanoserve_core.errors import ConfigError, UnsupportedOption
from tests.hf_generate_shim.calls import EOS, PAD, Options, batch, new_tokens, prompt

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle
    from nanoserve_core.request import Request

A, B, C = prompt(5), prompt(8), prompt(6)
DICT: Options = {"return_dict_in_generate": True}


def generate(model: Qwen3ForCausalLM, options: Options, **config: Any) -> Any:  # noqa: ANN401 - both outputs
    """The call, with everything else in a config. Any: fields, and either form of output."""
    given = {"max_new_tokens": 8, "do_sample": True, "top_k": 0, "pad_token_id": PAD, **config}
    return model.generate(**options, generation_config=GenerationConfig(**given))


def rows_of(model: Qwen3ForCausalLM, options: Options, **config: Any) -> list[list[int]]:
    """The new tokens of such a call."""
    return new_tokens(generate(model, options, **config), options)


def test_seed_of_a_call_takes_the_place_of_torch_s_generator(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    state = torch.get_rng_state()

    first, again, other = (rows_of(model, batch(A, B), nanoserve_seed=s) for s in (3, 3, 4))

    assert first == again != other
    assert torch.equal(torch.get_rng_state(), state)
    assert handle.counters.fast == 3


def test_row_depends_on_its_prompt_and_its_own_seed_alone(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    together = rows_of(model, batch(A, B, A, A), nanoserve_seed=[7, 8, 9, 7])

    alone = [
        rows_of(model, batch(row), nanoserve_seed=torch.tensor([seed]))[0]
        for row, seed in ((A, 7), (B, 8), (A, 9))
    ]

    assert together == [*alone, alone[0]]
    assert alone[0] != alone[2]
    assert handle.counters.fast == 4


def test_seed_of_a_prompt_makes_several_sequences(model: Qwen3ForCausalLM, handle: Handle) -> None:
    several = rows_of(model, batch(A, B), nanoserve_seed=(7, 8), num_return_sequences=3)
    alone = [rows_of(model, batch(row), nanoserve_seed=[s])[0] for row, s in ((A, 7), (B, 8))]

    assert [several[0], several[3]] == alone
    assert len({tuple(row) for row in several}) == 6
    assert handle.counters.fast == 3


def test_seed_for_each_sequence_is_that_sequence_s(model: Qwen3ForCausalLM, handle: Handle) -> None:
    several = rows_of(model, batch(A, B), nanoserve_seed=[1, 2, 3, 4], num_return_sequences=2)
    alone = [
        rows_of(model, batch(row), nanoserve_seed=[seed])[0]
        for row, seed in ((A, 1), (A, 2), (B, 3), (B, 4))
    ]

    assert several == alone
    assert handle.counters.fast == 5


def test_rows_have_limits_of_their_own(model: Qwen3ForCausalLM, handle: Handle) -> None:
    options = {**batch(A, B, A), "do_sample": False}
    whole = rows_of(model, batch(A, B, A), do_sample=False)

    cut = rows_of(model, batch(A, B, A), do_sample=False, nanoserve_max_new_tokens=[2, 99, 5])

    assert options["input_ids"].shape[0] == len(cut)
    assert cut == [
        [*whole[0][:2], *[PAD] * 6],
        whole[1],
        [*whole[2][:5], *[PAD] * 3],
    ]
    assert handle.counters.fast == 2


def test_limits_count_against_minimum_and_width(model: Qwen3ForCausalLM, handle: Handle) -> None:
    rows = rows_of(
        model, batch(A, B), do_sample=False, nanoserve_max_new_tokens=[1, 3],
        eos_token_id=EOS, min_new_tokens=8,
    )  # fmt: skip

    assert [len(row) for row in rows] == [3, 3]
    assert rows[0][1:] == [PAD, PAD]
    assert handle.counters.fast == 1


@pytest.mark.parametrize(("mode", "temperature"), [(True, 1.0), ("processed_logprobs", 2.0)])
def test_logprobs_are_those_of_the_chosen_tokens(
    model: Qwen3ForCausalLM, handle: Handle, mode: bool | str, temperature: float
) -> None:
    eos = list(range(60))
    output = generate(
        model, batch(A, B, C), **DICT, output_logits=True, nanoserve_logprobs=mode,
        nanoserve_seed=1, temperature=2.0, eos_token_id=eos, max_new_tokens=12,
    )  # fmt: skip

    columns = output.sequences[:, 8:]
    num_steps = columns.shape[1]
    ended = torch.isin(columns, torch.tensor(eos)).cumsum(1).roll(1, dims=1)
    ended[:, 0] = 0
    logits = torch.stack(output.logits, dim=1) / temperature
    expected = logits.log_softmax(-1).gather(2, columns[:, :, None])[:, :, 0]
    expected[ended.bool()] = 0.0
    assert output.logprobs.shape == (3, num_steps)
    assert ended.any()
    torch.testing.assert_close(output.logprobs, expected, atol=1e-5, rtol=1e-5)
    assert handle.counters.fast == 1


def test_output_with_logprobs_is_transformers_output_otherwise(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    plain = generate(model, batch(A), **DICT, do_sample=False)
    logged = generate(model, batch(A), **DICT, do_sample=False, nanoserve_logprobs=True)

    assert isinstance(logged, type(plain))
    assert list(logged) == [*plain, "logprobs"]
    assert "logprobs" not in plain
    assert logged.sequences.tolist() == plain.sequences.tolist()
    assert handle.counters.fast == 2


def test_priority_reaches_the_request(model: Qwen3ForCausalLM) -> None:
    class Priorities:
        def __init__(self) -> None:
            self.seen: list[int] = []

        @hookimpl
        def nanoserve_request_added(self, request: Request) -> None:
            self.seen.append(request.priority)

    plugin = Priorities()
    with hf_generate_shim.installed(model, plugins=[plugin], num_kvcache_blocks=64):
        generate(model, batch(A, B), nanoserve_priority=-3)
        generate(model, batch(A))

    assert plugin.seen == [-3, -3, 0]


def test_options_of_the_model_s_own_config_count_too(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    model.generation_config.nanoserve_seed = 5
    call: Options = {**batch(A), "max_new_tokens": 8, "do_sample": True, "top_k": 0}

    first, second = model.generate(**call).tolist(), model.generate(**call).tolist()

    assert first == second
    assert handle.counters.fast == 2


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"nanoserve_sead": 3}, "nanoserve_seed"),
        ({"nanoserve_seed": [1, 2, 3]}, r"nanoserve_seed=\[1, 2, 3\]"),
        ({"nanoserve_seed": -1}, "nanoserve_seed=-1"),
        ({"nanoserve_seed": [1, 2.5]}, "nanoserve_seed=2.5"),
        ({"nanoserve_seed": True}, "nanoserve_seed=True"),
        ({"nanoserve_max_new_tokens": 5}, "nanoserve_max_new_tokens=5"),
        ({"nanoserve_max_new_tokens": [0, 5]}, "nanoserve_max_new_tokens=0"),
        ({"nanoserve_max_new_tokens": [1, 5], "pad_token_id": None}, "pad_token_id"),
        ({"nanoserve_priority": "high"}, "nanoserve_priority='high'"),
        ({"nanoserve_logprobs": True}, "return_dict_in_generate=True"),
        ({"nanoserve_logprobs": 5, **DICT}, "nanoserve_logprobs=5"),
    ],
)
def test_wrong_options_are_refused_by_name(
    model: Qwen3ForCausalLM, handle: Handle, config: Options, text: str
) -> None:
    model.generation_config.pad_token_id = None

    with pytest.raises(ConfigError, match=text):
        generate(model, batch(A, B), **config)

    assert handle.counters.fast == 0


@pytest.mark.parametrize(
    "why", [{"num_beams": 2, "do_sample": False}, {"output_hidden_states": True, **DICT}]
)
def test_option_on_a_call_for_transformers_loop_is_refused(
    model: Qwen3ForCausalLM, handle: Handle, why: Options
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NanoserveFallbackWarning)
        with pytest.raises(UnsupportedOption, match="nanoserve_seed=3 .*" + next(iter(why))):
            generate(model, batch(A), nanoserve_seed=3, **why)

    assert handle.counters.fallback == 1
