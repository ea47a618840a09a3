"""How many blocks a pool gets, by hand-made arithmetic; and that memory is not touched."""

from __future__ import annotations

import pytest
import torch

from nanoserve_core import kv_cache
from nanoserve_core.config import EngineConfig, ModelSpec
from nanoserve_core.errors import ConfigError
from nanoserve_core.kv_cache import (
    KVCache,
    available_memory_nbytes,
    num_cpu_blocks,
    num_device_blocks,
)
from nanoserve_core.sampler import Sampler
from tests.nanoserve_core.random_qwen3 import random_config

GIB = 2**30
SPEC = ModelSpec.from_hf_config(random_config(), dtype=torch.float32)
TOKEN_NBYTES = 2 * 2 * 2 * 16 * 4  # K and V, layers, kv heads, head_dim, itemsize


class FakeMemory:
    """A device of so many bytes."""

    def __init__(self, *, total: int, available: int) -> None:
        self.total = total
        self.available = available

    def total_nbytes(self) -> int:
        """All of it."""
        return self.total

    def available_nbytes(self) -> int:
        """What is left."""
        return self.available


def test_views_by_block_and_by_slot_are_the_same_memory() -> None:
    cache = KVCache(SPEC, num_blocks=5, block_size=3, device=torch.device("cpu"))

    cache.slots[1][0, 7] = 4.0
    cache.slots[1][1, 8] = 5.0

    keys, values = cache.blocks[1]
    assert keys.shape == (5, 3, 2, 16)
    assert (keys[2, 1] == 4.0).all()
    assert (values[2, 2] == 5.0).all()
    assert cache.tensor.shape == (2, 2, 5, 3, 2, 16)
    assert keys.data_ptr() == cache.tensor[0, 1].data_ptr()


def test_pool_larger_than_the_memory_in_use_is_not_touched() -> None:
    before = resident_nbytes()

    cache = KVCache(SPEC, num_blocks=2**15, block_size=16, device=torch.device("cpu"))

    assert cache.tensor.nbytes == 2**28
    assert resident_nbytes() - before < 2**26


def test_given_number_of_blocks_wins_over_everything() -> None:
    config = EngineConfig(num_kvcache_blocks=3, kv_cache_memory_bytes=10**9)

    assert num_cpu_blocks(config, SPEC, block_size=16, max_model_len=4096) == 3


def test_given_bytes_are_divided_by_a_blocks() -> None:
    config = EngineConfig(kv_cache_memory_bytes=10 * 16 * TOKEN_NBYTES + 100)

    assert num_cpu_blocks(config, SPEC, block_size=16, max_model_len=160) == 10


def test_cpu_pool_is_a_share_of_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_memory_nbytes", lambda: 1000 * 16 * TOKEN_NBYTES)
    config = EngineConfig(max_num_seqs=512)

    assert num_cpu_blocks(config, SPEC, block_size=16, max_model_len=256) == 400


def test_cpu_pool_is_never_more_than_all_sequences_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_memory_nbytes", lambda: 2**40)
    config = EngineConfig(max_num_seqs=4)

    assert num_cpu_blocks(config, SPEC, block_size=16, max_model_len=100) == 4 * 7


def test_pool_too_small_for_one_sequence_is_refused_with_the_numbers() -> None:
    config = EngineConfig(kv_cache_memory_bytes=9 * 16 * TOKEN_NBYTES)

    with pytest.raises(
        ConfigError, match=r"9 blocks .*at least 10 of 8192 bytes.*max_model_len=160"
    ):
        num_cpu_blocks(config, SPEC, block_size=16, max_model_len=160)


def test_device_pool_is_what_utilisation_use_and_the_largest_step_leave() -> None:
    config = EngineConfig(gpu_memory_utilization=0.9)
    memory = FakeMemory(total=100 * GIB, available=70 * GIB)  # 30 in use: weights and others

    num_blocks = num_device_blocks(
        config, SPEC, block_size=16, max_model_len=512, step_nbytes=5 * GIB, memory=memory
    )

    assert num_blocks == 55 * GIB // (16 * TOKEN_NBYTES)


def test_device_pool_shrinks_by_the_samplers_declared_peak() -> None:
    config = EngineConfig(gpu_memory_utilization=1.0)
    memory = FakeMemory(total=80 * GIB, available=2 * GIB)
    peak = Sampler.peak_nbytes(512, 151_936)

    without, with_sampler = (
        num_device_blocks(
            config, SPEC, block_size=64, max_model_len=512, step_nbytes=nbytes, memory=memory
        )
        for nbytes in (0, peak)
    )

    block_nbytes = 64 * TOKEN_NBYTES
    assert peak >= 512 * 151_936 * 4  # at least one float32 copy of the logits at max_num_seqs rows
    assert without == 2 * GIB // block_nbytes
    assert with_sampler == (2 * GIB - peak) // block_nbytes


def test_device_without_room_for_one_sequence_is_refused_at_the_start() -> None:
    config = EngineConfig(gpu_memory_utilization=0.9)
    memory = FakeMemory(total=80 * GIB, available=2 * GIB)

    with pytest.raises(ConfigError, match=r"would have 0 blocks \(-\d+\.\d+ GiB\)"):
        num_device_blocks(
            config, SPEC, block_size=64, max_model_len=512, step_nbytes=GIB, memory=memory
        )


@pytest.mark.parametrize(
    "options", [{"kv_cache_memory_bytes": 3 * GIB}, {"num_kvcache_blocks": 3 * GIB // 32_768}]
)
def test_a_pool_of_given_size_that_is_more_than_there_is_is_refused_with_the_numbers(
    options: dict[str, int],
) -> None:
    memory = FakeMemory(total=80 * GIB, available=2 * GIB)

    with pytest.raises(ConfigError, match=r"\(3\.000 GiB\).*at most 2\.000 GiB.*device's 80\.000"):
        num_device_blocks(
            EngineConfig(**options),
            SPEC,
            block_size=64,
            max_model_len=512,
            step_nbytes=GIB,
            memory=memory,
        )


def test_available_memory_is_a_positive_number() -> None:
    assert 2**20 < available_memory_nbytes() < 2**50


def test_limit_of_the_control_group_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    group = tmp_path_factory.mktemp("cgroup")
    (group / "memory.max").write_text("3000000\n")
    (group / "memory.current").write_text("1000000\n")
    monkeypatch.setattr(kv_cache, "CGROUP", group)

    assert available_memory_nbytes() == 2_000_000


def resident_nbytes() -> int:
    """Memory of this process that is backed by pages."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096
