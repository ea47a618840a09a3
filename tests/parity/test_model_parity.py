"""The model against transformers', driven by hand-made plans: same logits, same greedy tokens.

float32 must agree to rounding, whatever the way to a token was; bfloat16 must be no further from
float32 than transformers' own bfloat16 is.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import torch

from nanoserve_core.config import EngineConfig
from nanoserve_core.model_runner import ModelRunner
from nanoserve_core.plugins import PluginManager
from tests.nanoserve_core.hand_made_plans import Driven, Driver
from tests.nanoserve_core.random_qwen3 import (
    frozen,
    random_model,
    random_tokens,
    reference_logits,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn
    from transformers import Qwen3ForCausalLM


class DriverOf(Protocol):
    """What the fixture of this name gives."""

    def __call__(self, model: nn.Module | Path, *, block_size: int = 4) -> Driver:
        """A driver of a new runner of ``model``."""
        ...


RELATIVE_ERROR = 1e-5
BF16_FACTOR = 1.25

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}

SHAPES: dict[str, dict[str, Any]] = {  # Any: Qwen3Config's fields
    "one query head per kv head": {"num_key_value_heads": 4},
    "two": {},
    "four": {"num_key_value_heads": 1},
    "eight": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "head_dim 64": {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    "head_dim 128": {"head_dim": 128, "num_attention_heads": 2},
    "tied": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True, "num_hidden_layers": 3},
    "yarn": {"rope_parameters": YARN},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": LINEAR},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_and_decode_give_transformers_logits_and_tokens(
    shape: str, driver_of: DriverOf
) -> None:
    model = random_model(**SHAPES[shape])
    driver = driver_of(model)
    sequence = driver.add(random_tokens(37))

    driver.prefill(sequence)
    driver.decode([sequence], 12)

    assert_matches(sequence, model)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_fused_and_live_weights_give_transformers_logits(
    is_frozen: bool, driver_of: DriverOf
) -> None:
    model = random_model(attention_bias=True).requires_grad_(not is_frozen)
    driver = driver_of(model)
    sequence = driver.add(random_tokens(19))

    driver.prefill(sequence)
    driver.decode([sequence], 3)

    assert_matches(sequence, model)


def test_loaded_checkpoint_gives_transformers_logits(tmp_path: Path, driver_of: DriverOf) -> None:
    model = random_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    driver = driver_of(tmp_path)
    sequence = driver.add(random_tokens(19))

    driver.prefill(sequence)
    driver.decode([sequence], 3)

    assert_matches(sequence, model)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 16, 29])
def test_chunked_prefill_gives_the_logits_of_one_prefill(
    model: Qwen3ForCausalLM, chunk: int, driver_of: DriverOf
) -> None:
    driver = driver_of(model)
    sequence = driver.add(random_tokens(30))

    driver.prefill(sequence, chunk)
    driver.decode([sequence], 4)

    assert_matches(sequence, model)


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 16, 64])
def test_every_block_size_gives_the_same_logits(
    model: Qwen3ForCausalLM, block_size: int, driver_of: DriverOf
) -> None:
    driver = driver_of(model, block_size=block_size)
    sequence = driver.add(random_tokens(33))

    driver.prefill(sequence, 20)
    driver.decode([sequence], 35)

    assert_matches(sequence, model)


@pytest.mark.parametrize("num_shared_blocks", [1, 4])
def test_prefix_in_shared_blocks_gives_the_logits_of_computing_it(
    model: Qwen3ForCausalLM, num_shared_blocks: int, driver_of: DriverOf
) -> None:
    driver = driver_of(model)
    prefix = random_tokens(18)
    first = driver.add(prefix)
    driver.prefill(first)
    second = driver.add(
        prefix + random_tokens(5, seed=1), prefix_of=first, num_shared_blocks=num_shared_blocks
    )

    driver.prefill(second)
    driver.decode([first, second], 4)

    assert_matches(first, model)
    assert_matches(second, model)


def test_copied_block_continues_like_its_source(
    model: Qwen3ForCausalLM, driver_of: DriverOf
) -> None:
    driver = driver_of(model)
    prompt = random_tokens(8)
    first = driver.add(prompt)
    driver.prefill(first)
    twin = driver.add(prompt, prefix_of=first, num_shared_blocks=1)
    copy = driver.take_block()
    twin.block_ids.append(copy)
    twin.num_computed = len(prompt) - 1

    driver.step({twin: 1}, block_copies=[(first.block_ids[1], copy)])
    driver.decode([first, twin], 3)

    assert_matches(twin, model)
    assert twin.output[:4] == first.output[:4]


def test_decode_rows_chunks_and_new_prompts_share_a_step(
    model: Qwen3ForCausalLM, driver_of: DriverOf
) -> None:
    driver = driver_of(model)
    running = [driver.add(random_tokens(length, seed=length)) for length in (1, 9, 23)]
    for sequence in running:
        driver.prefill(sequence)
    long, short = driver.add(random_tokens(21, seed=50)), driver.add(random_tokens(6, seed=51))

    driver.step({**dict.fromkeys(running, 1), long: 8})
    driver.step({**dict.fromkeys(running, 1), long: 8, short: 6})
    driver.step({**dict.fromkeys([*running, short], 1), long: 5})
    driver.decode([*running, long, short], 4)

    for sequence in [*running, long, short]:
        assert_matches(sequence, model)


def test_slot_is_used_again_without_a_trace_of_its_first_tenant(
    model: Qwen3ForCausalLM, driver_of: DriverOf
) -> None:
    driver = driver_of(model)
    first = driver.add(random_tokens(22))
    driver.prefill(first)
    driver.decode([first], 2)
    driver.release(first)
    second = driver.add(random_tokens(5, seed=3))
    second.slot = first.slot

    driver.prefill(second)
    driver.decode([second], 3)

    assert_matches(second, model)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bfloat16_is_as_close_to_float32_as_transformers_bfloat16(
    seed: int, driver_of: DriverOf
) -> None:
    options: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 128, "seed": seed}
    exact, rounded = random_model(**options), random_model(**options).to(torch.bfloat16)
    driver = driver_of(rounded)
    sequence = driver.add(random_tokens(40))

    driver.prefill(sequence)
    driver.decode([sequence], 12)

    truth = wanted_rows(sequence, reference_logits(exact, sequence.tokens[:-1]))
    theirs = wanted_rows(sequence, reference_logits(rounded, sequence.tokens[:-1]))
    ours = torch.stack(sequence.logits)
    assert distance(ours, truth) <= BF16_FACTOR * distance(theirs, truth)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    """The default shape, its weights fused once for all tests."""
    return frozen(random_model())


@pytest.fixture
def driver_of() -> Iterator[DriverOf]:
    """Opens a runner of a model or folder, with small blocks, and closes it after the test."""
    with ExitStack() as stack:

        def open_driver(model: nn.Module | Path, *, block_size: int = 4) -> Driver:
            config = EngineConfig(
                max_num_seqs=8, max_model_len=256, num_kvcache_blocks=160, block_size=block_size
            )
            runner = ModelRunner.create(model, config, PluginManager(allowed=()))
            stack.callback(runner.close)
            return Driver(runner)

        yield open_driver


def wanted_rows(sequence: Driven, logits: torch.Tensor) -> torch.Tensor:
    """Of the logits at all positions, those from which the output was sampled."""
    return logits[sequence.num_prompt_tokens - 1 :]


def assert_matches(sequence: Driven, model: Qwen3ForCausalLM) -> None:
    """The logits of every generated token, and so the token, are transformers'."""
    expected = wanted_rows(sequence, reference_logits(model, sequence.tokens[:-1]))
    actual = torch.stack(sequence.logits)
    assert distance(actual, expected) < RELATIVE_ERROR
    atol = RELATIVE_ERROR * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=RELATIVE_ERROR, atol=atol)
    assert sequence.output == expected.argmax(-1).tolist()


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, relative to that of what is expected."""
    return float((actual - expected).norm() / expected.norm())
