"""Steps on the card in which the host has its part (wishes, grammars, lockstep), and prompts of
every shape. The oracle is the CPU engine, or transformers' own loop.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hf_generate_shim
from nanoserve_core import Engine, EngineConfig
from nanoserve_core.kernels import reference_sampling, triton_ops
from nanoserve_core.prompt_inputs import FEW_TOKENS
from tests.gpu.test_cuda_engine import ROOMY, make_engine, request_of, run
from tests.nanoserve_core.automaton import Automaton, constrained, masked_greedy
from tests.parity.test_engine_parity import assert_drained
from tests.tiny_qwen3_models import greedy_tokens, prompt_of, tiny_qwen3

if TYPE_CHECKING:
    from pathlib import Path

    from nanoserve_core import Request

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_prompts_at_every_edge_of_the_captured_shapes_give_the_tokens_of_eager_ones() -> None:
    lengths = sorted({n + d for n in FEW_TOKENS for d in (-1, 0, 1) if n + d <= 300})
    options = {"max_model_len": 320, "num_kvcache_blocks": 2000}
    with make_engine(**options) as captured, make_engine(enforce_eager=True, **options) as eager:
        for repeat in range(2):  # the second time everything is replayed
            for length in lengths:
                one = [request_of(repeat, length=length)]
                assert run(captured, one) == run(eager, one), f"{length} tokens"
            for num_rows in (2, 7, 8, 9, 40):
                some = [
                    request_of(100 * repeat + i, length=1 + (7 * i + num_rows) % 90)
                    for i in range(num_rows)
                ]
                assert run(captured, some) == run(eager, some), f"{num_rows} prompts"
        assert_drained(captured)


def test_wishes_in_a_batch_that_shares_its_prefix_get_the_tokens_of_the_cpu(
    tiny_checkpoint: Path,
) -> None:
    prefix = prompt_of(200, seed=77)
    wishes: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"logprobs": 3},
        {"logit_bias": {9: 4.0}, "min_tokens": 6},
        {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.3},
        {"temperature": 0.8, "top_k": 12},
    ]
    requests: list[Request] = []
    for number in range(18):
        own = request_of(
            number, length=3 + number, max_tokens=24, seed=number, **wishes[number % 6]
        )
        requests.append(replace(own, prompt_token_ids=prefix + own.prompt_token_ids))
    options = {**ROOMY, "max_model_len": 320, "num_kvcache_blocks": 2000, "dtype": "float32"}
    results = []
    for device in ("cpu", "cuda"):
        with Engine(tiny_checkpoint, EngineConfig(device=device, **options)) as engine:
            first = run(engine, requests[:1])  # its prompt is in the cache for the others
            results.append((first, run(engine, requests[1:])))
            assert_drained(engine)

    assert results[1] == results[0]


def test_grammars_hold_on_the_card_and_leave_neighbours_alone() -> None:
    pairs = Automaton({0: {20: 1, 21: 1, 90: 1}, 1: {30: 0, 40: 0}}, ends=frozenset({0}))
    requests = [request_of(i, max_tokens=12) for i in range(5)]
    prompt = prompt_of(9, seed=50)
    sampling = requests[0].sampling.replace(max_tokens=9)
    with make_engine() as engine:
        tokens = run(engine, [constrained("g", pairs, sampling, prompt), *requests])

        assert_drained(engine)
    assert tokens["g"] == masked_greedy(pairs, prompt, 9)
    for i in range(5):
        assert tokens[str(i)] == greedy_tokens("gqa", prompt_of(9, seed=i), 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [31, 1000, 151_936])
def test_masked_scores_are_those_of_plain_torch(dtype: torch.dtype, vocab_size: int) -> None:
    scores = torch.randn(7, vocab_size, device="cuda", dtype=dtype)
    masks = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), device="cuda").int()
    rows = torch.tensor([5, 0, 3], device="cuda")
    expected = scores.clone()
    reference_sampling.apply_token_bitmask(expected, masks, rows)

    triton_ops.apply_token_bitmask(scores, masks, rows)

    assert torch.equal(scores, expected)


def test_generate_with_processors_of_the_user_equals_transformers_on_the_card() -> None:
    model = copy.deepcopy(tiny_qwen3()).to("cuda")
    ids = torch.tensor([prompt_of(9, seed=i) for i in range(4)], device="cuda")

    def push(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 4
        scores[:, input_ids[:, -1] % scores.shape[1]] -= 5.0
        return scores

    def stop(input_ids: torch.Tensor, _scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] % 7 == 0

    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "logits_processor": [push],
        "stopping_criteria": [stop],
        "max_new_tokens": 20,
        "do_sample": False,
        "pad_token_id": 0,
    }
    expected = model.generate(ids, **options)

    with hf_generate_shim.installed(model, num_kvcache_blocks=200, max_model_len=128) as handle:
        found = model.generate(ids, **options)
        counters = handle.counters

    assert torch.equal(found, expected)
    assert counters.lockstep == 1
