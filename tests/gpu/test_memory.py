"""Device memory: told by name while an engine is open, and given back when it is closed."""

from __future__ import annotations

import copy
import gc
from typing import TYPE_CHECKING

import pytest
import torch

from nanoserve_core import Engine, EngineConfig, Request, SamplingParams
from nanoserve_core.errors import ConfigError
from tests.tiny_qwen3_models import prompt_of, tiny_qwen3

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

POOL_NBYTES = 256 << 20
SLACK_NBYTES = 2 << 20
"""Rounding of the allocator."""
LIBRARY_NBYTES = 80 << 20
"""Workspaces that cuBLAS keeps, of 32 MiB for each stream and handle it has seen."""


def held() -> tuple[int, int]:
    """Bytes that tensors hold, and bytes that torch has taken of the device."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def serve(engine: Engine) -> None:
    """Steps of many kinds: long and short prompts, filters, the host's sampler."""
    wishes = [{}, {"top_k": 5}, {"repetition_penalty": 1.2}, {"logprobs": 3}]
    for number in range(24):
        engine.add_request(
            Request(
                request_id=str(number),
                prompt_token_ids=prompt_of(20 + 11 * number, seed=number),
                sampling=SamplingParams(max_tokens=12, ignore_eos=True, **wishes[number % 4]),
            )
        )
    while engine.has_unfinished_requests():
        assert not [output.error for output in engine.step() if output.error]


def config_of(**options: object) -> EngineConfig:
    base = {"device": "cuda", "kv_cache_memory_bytes": POOL_NBYTES, "max_model_len": 512}
    return EngineConfig(**{**base, "max_num_seqs": 32, "max_num_batched_tokens": 1024, **options})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_closed_engines_give_all_their_memory_back(tiny_checkpoint: Path, dtype: str) -> None:
    before = held()
    after = []
    for _ in range(3):
        with Engine(tiny_checkpoint, config_of(dtype=dtype)) as engine:
            engine.warmup(max_num_seqs=8, max_prompt_tokens=64)
            serve(engine)
            assert torch.cuda.memory_allocated() > POOL_NBYTES
        del engine
        after.append(held())

    for kind in (0, 1):
        assert after[0][kind] <= before[kind] + LIBRARY_NBYTES
        assert after[1][kind] <= after[0][kind] + SLACK_NBYTES
        assert after[2][kind] <= after[1][kind] + SLACK_NBYTES


def test_close_alone_gives_the_device_its_memory(tiny_checkpoint: Path) -> None:
    for _ in range(2):  # the first sets libraries up
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        engine = Engine(tiny_checkpoint, config_of())
        serve(engine)

        engine.close()

        after = torch.cuda.memory_reserved()
    assert after <= before + SLACK_NBYTES


def test_the_parts_add_up_to_what_tensors_hold(tiny_checkpoint: Path) -> None:
    with Engine(tiny_checkpoint, config_of(dtype="bfloat16")) as first:
        serve(first)
    before, _ = held()
    with Engine(tiny_checkpoint, config_of(dtype="bfloat16")) as engine:
        serve(engine)
        memory = dict(engine.stats().memory)

        graphs = memory.pop("graphs")
        assert graphs > 0
        assert memory["kv_cache"] <= POOL_NBYTES < memory["kv_cache"] + (2 << 20)
        told, taken = sum(memory.values()), held()[0] - before
        assert told <= taken + SLACK_NBYTES
        assert taken <= told + graphs + LIBRARY_NBYTES, f"{taken - told} bytes are not told of"


def test_a_shared_model_keeps_its_weights_and_nothing_is_copied() -> None:
    model = copy.deepcopy(tiny_qwen3("gqa")).to("cuda").requires_grad_(False)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    before, _ = held()
    with Engine(model, config_of()) as engine:
        serve(engine)
        assert engine.stats().memory["weights"] <= weights + SLACK_NBYTES
    del engine

    assert held()[0] <= before + LIBRARY_NBYTES
    with Engine(model, config_of()) as engine:
        serve(engine)
    del engine
    base = held()[0]
    with Engine(model, config_of()) as engine:
        serve(engine)
    del engine
    assert abs(held()[0] - base) <= SLACK_NBYTES


def test_a_pool_that_the_device_cannot_hold_is_refused_with_the_numbers(
    tiny_checkpoint: Path,
) -> None:
    total = torch.cuda.mem_get_info()[1]
    before = held()

    with pytest.raises(ConfigError, match=r"K/V pool of \d+ blocks \(\d+\.\d+ GiB\)"):
        Engine(tiny_checkpoint, config_of(kv_cache_memory_bytes=2 * total))

    assert held()[0] <= before[0] + SLACK_NBYTES
