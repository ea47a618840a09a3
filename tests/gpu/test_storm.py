"""A storm of a thousand requests on the card: each gives what it gives alone on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nanoserve_core import Engine, EngineConfig
from tests.parity.test_engine_parity import assert_drained
from tests.storms import assert_solo_results, draw_storm, serve_storm

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

NUM_REQUESTS, NUM_STEPS = 1000, 250
OPTIONS = {"dtype": "float32", "block_size": 16, "max_model_len": 192}


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["captured", "eager"])
def test_a_storm_in_a_small_pool_gives_each_request_its_solo_result(
    tiny_checkpoint: Path, enforce_eager: bool
) -> None:
    num_requests = NUM_REQUESTS // 10 if enforce_eager else NUM_REQUESTS
    num_steps = NUM_STEPS // 10 if enforce_eager else NUM_STEPS
    small = EngineConfig(
        device="cuda",
        max_num_seqs=40,
        max_num_batched_tokens=256,
        num_kvcache_blocks=64,
        enforce_eager=enforce_eager,
        **OPTIONS,
    )
    with Engine(tiny_checkpoint, small) as engine:
        visitors = draw_storm(
            num_requests, num_steps=num_steps, vocab_size=engine.spec.vocab_size, max_tokens=24
        )
        outputs = serve_storm(engine, visitors, num_steps=num_steps)

        stats = engine.stats()
        assert stats.backends["attention"] == "triton"
        assert stats.preemptions > 0, "the pool is not small"
        assert stats.peak_batch > 16, "the storm is no more than a breeze"
        assert sum(stats.finished_requests.values()) == num_requests
        assert_drained(engine)
    solo = EngineConfig(device="cpu", enable_prefix_caching=False, max_num_seqs=4, **OPTIONS)
    with Engine(tiny_checkpoint, solo) as alone:
        assert_solo_results(outputs, visitors, alone, max_ties=3)
