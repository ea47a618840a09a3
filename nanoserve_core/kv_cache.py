"""The K/V tensor, and how many blocks of it fit. Who uses which block is the block manager's
business.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from nanoserve_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.config import EngineConfig, ModelSpec

CPU_MEMORY_SHARE = 0.4
"""Share of the memory now available to the process that K/V may take on a CPU, unless told
otherwise.
"""
CGROUP = Path("/sys/fs/cgroup")
_GIB = 2**30


class KVCache:
    """K and V of all layers in one tensor, and a view of it per layer. Uninitialised: a block that
    nobody has written to costs no memory on a CPU, and must not be read.
    """

    def __init__(
        self, spec: ModelSpec, *, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        shape = (
            2,
            spec.num_hidden_layers,
            num_blocks,
            block_size,
            spec.num_key_value_heads,
            spec.head_dim,
        )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tensor: Tensor = torch.empty(shape, dtype=spec.dtype, device=device)
        """[2 (K, V), layers, blocks, block_size, kv_heads, head_dim]."""
        keys, values = self.tensor.unbind(0)
        self.blocks = tuple(zip(keys.unbind(0), values.unbind(0), strict=True))
        """Per layer (key_cache, value_cache), each [blocks, block_size, kv_heads, head_dim]."""
        self.slots = self.tensor.flatten(2, 3).unbind(1)
        """Per layer [2, blocks * block_size, kv_heads, head_dim]: K and V by slot."""


class DeviceMemory(Protocol):
    """The memory of an accelerator, in bytes; asked after the weights are there. Tests pass their
    own.
    """

    def total_nbytes(self) -> int:
        """All memory of the device."""
        ...

    def available_nbytes(self) -> int:
        """What this process could still get: free on the device, or cached by its allocator and
        unused.
        """
        ...


class CudaMemory:
    """`DeviceMemory` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_nbytes(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.mem_get_info(self._device)[1]

    def available_nbytes(self) -> int:
        """See `DeviceMemory`."""
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return torch.cuda.mem_get_info(self._device)[0] + cached


def num_cpu_blocks(
    config: EngineConfig, spec: ModelSpec, *, block_size: int, max_model_len: int
) -> int:
    """How many blocks a CPU's pool gets: what the config says, else a share of the available
    memory, and never more than ``max_num_seqs`` sequences of ``max_model_len`` need.

    Raises `ConfigError` with the numbers when a computed pool could not hold one such sequence.
    """
    needed = config.max_num_seqs * -(-max_model_len // block_size)
    nbytes = config.kv_cache_memory_bytes
    if nbytes is None:
        nbytes = min(
            int(available_memory_nbytes() * CPU_MEMORY_SHARE),
            needed * spec.block_nbytes(block_size),
        )
    return _num_blocks_in(nbytes, config, spec, block_size=block_size, max_model_len=max_model_len)


def num_device_blocks(
    config: EngineConfig,
    spec: ModelSpec,
    *,
    block_size: int,
    max_model_len: int,
    step_nbytes: int,
    memory: DeviceMemory,
) -> int:
    """How many blocks an accelerator's pool gets, once the weights are there.

    ::

        total                  |############################################|
        gpu_memory_utilization |######################################|        left to others
        in use already         |=============|                                 weights, others
        step_nbytes                          |xxxxxxxxxx|                      largest step
        pool                                            |<----------->|

    ``step_nbytes``: scratch of a step of ``max_num_batched_tokens`` tokens, the logits and the
    sampler at ``max_num_seqs`` rows, the batch state: a pool sized without them fails in some later
    step. A pool of a given size is taken as it is, for instance beside a model that is being
    trained. Raises `ConfigError` as `num_cpu_blocks`, and when a given size is more than there is.
    """
    total, available = memory.total_nbytes(), memory.available_nbytes()
    nbytes = config.kv_cache_memory_bytes
    if nbytes is None:
        nbytes = int(total * config.gpu_memory_utilization) - (total - available) - step_nbytes
    num_blocks = _num_blocks_in(
        nbytes, config, spec, block_size=block_size, max_model_len=max_model_len
    )
    wanted = num_blocks * spec.block_nbytes(block_size)
    if wanted > available:
        raise ConfigError(
            f"a K/V pool of {num_blocks} blocks ({wanted / _GIB:.3f} GiB) was asked for: expected "
            f"at most {available / _GIB:.3f} GiB, which is what this process can still get of the "
            f"device's {total / _GIB:.3f}. Lower kv_cache_memory_bytes or num_kvcache_blocks, or "
            "free memory first."
        )
    return num_blocks


def available_memory_nbytes() -> int:
    """Bytes this process may still take on the host: what is available, within its control group's
    limit.
    """
    amounts = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = dict(
            line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines()
        )
        amounts = [int(lines["MemAvailable"].split()[0]) * 1024]
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        amounts.append(int(text) - int(used.read_text()))
    return max(min(amounts), 0)


def _num_blocks_in(
    nbytes: int, config: EngineConfig, spec: ModelSpec, *, block_size: int, max_model_len: int
) -> int:
    if config.num_kvcache_blocks > 0:
        return config.num_kvcache_blocks
    num_blocks = nbytes // spec.block_nbytes(block_size)
    needed = -(-max_model_len // block_size)
    if num_blocks < needed:
        raise ConfigError(
            f"the K/V pool would have {max(num_blocks, 0)} blocks ({nbytes / _GIB:.3f} GiB):"
            f" expected at least {needed} of {spec.block_nbytes(block_size)} bytes, for a sequence "
            f"of max_model_len={max_model_len} tokens. Lower max_model_len, max_num_seqs or "
            "max_num_batched_tokens, or give the pool more memory (kv_cache_memory_bytes, "
            "gpu_memory_utilization)."
        )
    return num_blocks
