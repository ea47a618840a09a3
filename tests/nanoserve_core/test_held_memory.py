"""Who holds how much memory, and that a closed engine holds none."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from nanoserve_core.held_memory import held_nbytes
from nanoserve_core.layers.linear import Linear
from tests.nanoserve_core.test_cuda_runner import make_cpu_engine, make_engine, request_of, run
from tests.tiny_qwen3_models import tiny_qwen3

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanoserve_core import Engine


@dataclass
class Foreign:
    """An object that is not ours."""

    tensor: torch.Tensor


def test_memory_counts_once_and_for_the_first_who_holds_it() -> None:
    weight = torch.zeros(4, 8)
    parts = {
        "linear": Linear(weight),  # the weight and its transpose: one storage
        "view": [weight[1:], {"own": torch.zeros(3, dtype=torch.int64)}],
        "nothing": (None, "text", Foreign(torch.zeros(100))),
    }

    found = held_nbytes(parts, "cpu")

    assert found == {"linear": 4 * 8 * 4, "view": 3 * 8, "nothing": 0}


def test_memory_elsewhere_does_not_count() -> None:
    assert held_nbytes({"meta": torch.zeros(5, device="meta")}, "cpu") == {"meta": 0}


@pytest.mark.parametrize("make", [make_engine, make_cpu_engine])
def test_an_engine_tells_what_its_memory_is_for(make: Callable[[], Engine]) -> None:
    with make() as engine:
        run(engine, [request_of(0)])

        memory = engine.stats().memory

        spec, blocks = engine.spec, engine.stats().num_blocks
        assert memory["kv_cache"] == blocks * spec.block_nbytes(4)
        weights = sum(p.nbytes for p in tiny_qwen3("gqa").parameters())
        assert weights <= memory["weights"] <= weights + 1024  # and the rotation's frequencies
        assert all(memory[name] > 0 for name in ("activations", "batch_state"))


def test_a_runner_of_a_device_tells_more() -> None:
    with make_engine() as engine:
        memory = engine.stats().memory

    assert all(memory[name] > 0 for name in ("slots", "sampling", "decode_step", "inputs"))
    assert memory["graphs"] == 0  # nothing is captured here


@pytest.mark.parametrize("make", [make_engine, make_cpu_engine])
def test_a_closed_engine_holds_no_memory_even_before_a_collection(
    make: Callable[[], Engine],
) -> None:
    gc.collect()
    engine = make()
    run(engine, [request_of(0)])
    runner = engine._runner  # noqa: SLF001  # whose memory this is about
    tensors = [runner._kv_cache.tensor, runner._model._scratch]  # noqa: SLF001  # as above
    kept = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    gc.disable()
    try:
        engine.close()

        assert [reference() for reference in kept] == [None, None]
    finally:
        gc.enable()
    assert engine.stats().memory == {}
    assert sum(held_nbytes({"engine": engine}, "cpu").values()) < 10_000, "tables on the host"
