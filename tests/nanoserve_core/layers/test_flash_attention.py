"""The flash-attn backend over a package that does by the book what the real one does."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nanoserve_core import Engine, EngineConfig, Request, SamplingParams
from nanoserve_core.config import ModelSpec
from nanoserve_core.errors import ConfigError
from nanoserve_core.layers.flash_attention import FlashAttention
from nanoserve_core.plugins import PluginManager
from tests.nanoserve_core.host_device import cuda_runner_on_host
from tests.nanoserve_core.layers.fake_flash_attn import fake_package
from tests.nanoserve_core.random_qwen3 import random_config
from tests.tiny_qwen3_models import greedy_tokens, prompt_of, tiny_qwen3

if TYPE_CHECKING:
    from collections.abc import Sequence

SPEC = ModelSpec.from_hf_config(random_config(), dtype=torch.bfloat16)
OPTIONS: dict[str, Any] = {
    "attention_backend": "flash_attn",
    "num_kvcache_blocks": 12,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FlashAttention:
    """The backend of the tiny models, over the fake package."""
    monkeypatch.setitem(sys.modules, "flash_attn", fake_package())
    spec = ModelSpec.from_hf_config(tiny_qwen3().config, dtype=torch.float32)
    return FlashAttention(spec, num_multiprocessors=132)


def make_engine(backend: FlashAttention, **options: Any) -> Engine:
    config = EngineConfig(**{**OPTIONS, **options})
    runner = cuda_runner_on_host(tiny_qwen3(), config, backend=backend)
    return Engine.from_runner(runner, config, PluginManager())


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
    tokens: dict[str, tuple[int, ...]] = {request.request_id: () for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += tuple(output.token_ids)
    return tokens


def request_of(number: int, length: int, **sampling: Any) -> Request:
    options = {"temperature": 0.0, "max_tokens": 8, **sampling}
    return Request(
        request_id=str(number),
        prompt_token_ids=prompt_of(length, seed=number),
        sampling=SamplingParams(**options),
    )


def test_the_engine_gives_the_tokens_of_transformers(backend: FlashAttention) -> None:
    lengths = [1, 60, 253, 300, 9, 20]
    with make_engine(backend) as engine:
        backends = engine.stats().backends

        tokens = run(engine, [request_of(i, n) for i, n in enumerate(lengths)])

    assert (backends["attention"], backends["steps"]) == ("flash_attn", "captured")
    assert backends["attention_reason"] == "asked for by attention_backend"
    for i, length in enumerate(lengths):
        assert tokens[str(i)] == greedy_tokens("gqa", prompt_of(length, seed=i), 8)


def test_eager_steps_with_decode_rows_and_chunks_give_them_too(backend: FlashAttention) -> None:
    lengths = [40, 130, 70]
    with make_engine(backend) as engine:
        requests = [request_of(i, n, prompt_logprobs=0) for i, n in enumerate(lengths)]

        tokens = run(engine, requests)

    for i, length in enumerate(lengths):
        assert tokens[str(i)] == greedy_tokens("gqa", prompt_of(length, seed=i), 8)


def test_a_warmup_of_padding_alone_runs(backend: FlashAttention) -> None:
    with make_engine(backend) as engine:
        assert engine.warmup(max_prompt_tokens=64) > 0
        assert run(engine, [request_of(0, 9)])["0"] == greedy_tokens("gqa", prompt_of(9, seed=0), 8)


@pytest.mark.parametrize(
    ("size", "is_served"), [(256, True), (512, True), (128, False), (768, False)]
)
def test_blocks_are_powers_of_two_from_256_on(
    backend: FlashAttention, size: int, is_served: bool
) -> None:
    assert backend.supports_block_size(size) is is_served


def test_other_blocks_are_refused_with_the_default(backend: FlashAttention) -> None:
    with pytest.raises(ConfigError, match=r"block_size=64 .*'flash_attn'.*256"):
        make_engine(backend, block_size=64)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not installed

    with pytest.raises(ConfigError, match=r"'flash_attn' is not available.*extra 'flash'"):
        FlashAttention(SPEC, num_multiprocessors=132)


@pytest.mark.parametrize(
    "changes", [{"dtype": torch.float32}, {"head_dim": 264}, {"head_dim": 100}], ids=str
)
def test_models_that_the_package_does_not_serve_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"cannot serve heads of"):
        FlashAttention.check(replace(SPEC, **changes))


def test_a_cpu_has_no_such_backend(tiny_checkpoint: object) -> None:
    config = EngineConfig(device="cpu", attention_backend="flash_attn", max_model_len=64)

    with pytest.raises(ConfigError, match=r"'flash_attn' is not available: expected 'torch'"):
        Engine(str(tiny_checkpoint), config)


def test_results_that_depend_on_no_neighbour_are_not_promised(backend: FlashAttention) -> None:
    with pytest.raises(ConfigError, match=r"batch_invariant=True .*'flash_attn'"):
        make_engine(backend, batch_invariant=True)
