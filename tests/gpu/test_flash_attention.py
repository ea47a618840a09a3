"""The flash-attn backend with the real package, for heads of 128 in bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanoserve_core import Engine, EngineConfig, Request, SamplingParams
from nanoserve_core.config import ModelSpec
from nanoserve_core.kernels import reference
from nanoserve_core.layers.attention import ForwardBatch
from nanoserve_core.layers.flash_attention import FlashAttention
from tests.tiny_qwen3_models import prompt_of

if TYPE_CHECKING:
    from collections.abc import Sequence

pytest.importorskip("flash_attn", reason="flash-attn is an optional package, built by hand")

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 16, 8, 128, 256
MAX_BLOCKS = 8


def small_model() -> Qwen3ForCausalLM:
    """Two layers with heads of 128."""
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        initializer_range=0.1,
        eos_token_id=7,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(1)
    return Qwen3ForCausalLM(config).to("cuda", torch.bfloat16).eval().requires_grad_(False)


class Case:
    """Rows with random K/V in shuffled blocks: decode rows first, then chunks."""

    def __init__(self, decode_lens: Sequence[int], chunks: Sequence[tuple[int, int]]) -> None:
        kv_lens = [*decode_lens, *(kv_len for _, kv_len in chunks)]
        query_lens = [*[1] * len(decode_lens), *(query_len for query_len, _ in chunks)]
        num_rows, num_blocks = len(kv_lens), len(kv_lens) * MAX_BLOCKS
        options = {"device": "cuda", "dtype": torch.bfloat16}
        cache = torch.randn(2, 2, num_blocks, BLOCK, KV_HEADS, HEAD_DIM, **options)
        self.key_cache, self.value_cache = cache[0, 1], cache[1, 1]
        self.query = torch.randn(sum(query_lens), HEADS + 2 * KV_HEADS, HEAD_DIM, **options)
        self.query = self.query[:, :HEADS]
        order = torch.randperm(num_blocks, device="cuda", dtype=torch.int32)
        starts = torch.tensor([0, *query_lens], device="cuda").cumsum(0, dtype=torch.int32)
        self.batch = ForwardBatch(
            token_ids=starts.new_zeros(sum(query_lens)),
            positions=starts,
            slot_mapping=starts,
            query_start=starts,
            kv_lens=torch.tensor(kv_lens, device="cuda", dtype=torch.int32),
            block_tables=order.view(num_rows, MAX_BLOCKS),
            logits_indices=starts,
            num_decode_seqs=len(decode_lens),
            host_query_start=starts[:0].cpu().numpy(),  # as in a captured step
            host_kv_lens=starts[:0].cpu().numpy(),
            host_block_tables=starts[:0].cpu().numpy(),
        )

    def expected(self) -> torch.Tensor:
        """By the book, in float64 on the CPU."""
        return reference.paged_attention(
            self.query.double().cpu(),
            key_cache=self.key_cache.double().cpu(),
            value_cache=self.value_cache.double().cpu(),
            block_tables=self.batch.block_tables.cpu(),
            query_start=self.batch.query_start.cpu(),
            kv_lens=self.batch.kv_lens.cpu(),
        )


def backend() -> FlashAttention:
    spec = ModelSpec.from_hf_config(
        Qwen3Config(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM),
        dtype=torch.bfloat16,
    )
    count = torch.cuda.get_device_properties("cuda").multi_processor_count
    return FlashAttention(spec, num_multiprocessors=count)


@pytest.mark.parametrize("decode_lens", [[513], [1, 300, 2048, 256, 257], [700] * 40])
def test_decode_rows_are_attention_by_the_book(decode_lens: list[int]) -> None:
    case = Case(decode_lens, [])
    attention, out = backend(), torch.empty_like(case.query)
    plan = attention.plan(case.batch, block_size=BLOCK)

    attention.decode(
        case.query, key_cache=case.key_cache, value_cache=case.value_cache, plan=plan, out=out
    )

    torch.testing.assert_close(out.double().cpu(), case.expected(), atol=2e-2, rtol=2e-2)


def test_ended_rows_get_zeros() -> None:
    case = Case([0, 5, 0], [])
    attention, out = backend(), torch.full_like(case.query, torch.nan)
    plan = attention.plan(case.batch, block_size=BLOCK)

    attention.decode(
        case.query, key_cache=case.key_cache, value_cache=case.value_cache, plan=plan, out=out
    )

    assert out[[0, 2]].eq(0).all()
    assert out[1].isfinite().all()


def test_chunks_behind_decode_rows_are_attention_by_the_book() -> None:
    case = Case([10, 600], [(300, 300), (1, 700), (64, 1000), (17, 17)])
    attention, out = backend(), torch.empty_like(case.query)
    plan = attention.plan(case.batch, block_size=BLOCK)

    attention.prefill(
        case.query[2:],
        key=case.query[2:],
        value=case.query[2:],
        key_cache=case.key_cache,
        value_cache=case.value_cache,
        plan=plan,
        out=out[2:],
    )

    torch.testing.assert_close(out[2:].double().cpu(), case.expected()[2:], atol=2e-2, rtol=2e-2)


def run(engine: Engine, num_requests: int) -> dict[str, tuple[int, ...]]:
    tokens: dict[str, tuple[int, ...]] = {str(i): () for i in range(num_requests)}
    for i in range(num_requests):
        sampling = SamplingParams(temperature=0.8 * (i % 2), max_tokens=24, ignore_eos=True, seed=i)
        prompt = prompt_of(5 + 37 * i, seed=i)
        engine.add_request(Request(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += tuple(output.token_ids)
    return tokens


def test_captured_steps_give_the_tokens_of_eager_ones() -> None:
    model = small_model()
    options = {"max_num_seqs": 16, "max_model_len": 1024, "num_kvcache_blocks": 64}
    results = []
    for enforce_eager in (True, False):
        config = EngineConfig(
            attention_backend="flash_attn", enforce_eager=enforce_eager, **options
        )
        with Engine(model, config) as engine:
            results.append([run(engine, n) for n in (1, 5, 16, 16)])
            backends = engine.stats().backends

    assert backends["attention"] == "flash_attn"
    assert backends["steps"] == "captured"
    assert results[0] == results[1]
