"""A small storm over a stand-in device; that on a card is `tests/gpu/test_storm.py`."""

from __future__ import annotations

import os

import torch

from tests.nanoserve_core.test_cuda_runner import make_cpu_engine, make_engine
from tests.parity.test_engine_parity import assert_drained
from tests.storms import assert_solo_results, draw_storm, is_tie, serve_storm
from tests.tiny_qwen3_models import VOCAB_SIZE

NUM_REQUESTS = int(os.environ.get("NANOSERVE_STORM", "60"))
OPTIONS = {"max_model_len": 160, "block_size": 8}


def test_a_storm_in_a_small_pool_gives_each_request_its_solo_result() -> None:
    num_steps = NUM_REQUESTS
    visitors = draw_storm(
        NUM_REQUESTS, num_steps=num_steps, vocab_size=VOCAB_SIZE, max_tokens=12, seed=6
    )
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 40, "num_kvcache_blocks": 32}
    with make_engine(**OPTIONS, **small) as engine:
        outputs = serve_storm(engine, visitors, num_steps=num_steps)

        stats = engine.stats()
        assert stats.preemptions > 0, "the pool is not small"
        assert stats.peak_batch > 4, "the storm is no more than a breeze"
        assert {"stop", "length", "abort", "error"} >= set(stats.finished_requests)
        assert stats.finished_requests["abort"] > 0
        assert_drained(engine)
    with make_cpu_engine(**OPTIONS, enable_prefix_caching=False) as alone:
        assert_solo_results(outputs, visitors, alone, max_ties=0)


def test_only_neighbours_in_score_or_in_order_are_ties() -> None:
    scores = torch.log(torch.tensor([0.3, 0.2, 0.00001, 0.3, 0.19999]))

    assert is_tie(scores, 0, 3, is_greedy=True)
    assert not is_tie(scores, 0, 1, is_greedy=True)
    assert is_tie(scores, 3, 1, is_greedy=False), "next to nothing lies between them"
    assert not is_tie(scores, 0, 3, is_greedy=False)
