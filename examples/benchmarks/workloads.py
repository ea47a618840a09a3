"""The benchmark workloads, token for token, so that every engine is measured on the same requests.

EOS is ignored. `nano256` has the request lengths of nano-vllm's bench.py (256 requests, 100..1024
tokens in and out, 133,966 tokens out). Run each several times with another
``repeat``: the ids change, so that no prefix-cache hit crosses repeats; quote the median.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Workload:
    """Requests of one run: prompts as token ids, and how many tokens each must produce."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_output_tokens(self) -> int:
        """Tokens that count: what the requests asked for, without padding."""
        return sum(self.output_lens)

    def with_repeat(self, repeat: int, vocab_size: int) -> Workload:
        """The same lengths with other ids, below ``vocab_size``."""
        moved = [[(t + 17 * repeat) % vocab_size for t in prompt] for prompt in self.prompts]
        return Workload(moved, self.output_lens)


def ragged(num_seqs: int, low: int, high: int, *, seed: int = 0) -> Workload:
    """Lengths uniform in low..high, for prompts and outputs alike."""
    rng = Random(seed)
    prompts = [_ids(rng, rng.randint(low, high)) for _ in range(num_seqs)]
    return Workload(prompts, [rng.randint(low, high) for _ in range(num_seqs)])


def uniform(num_seqs: int, prompt_len: int, output_len: int, *, seed: int = 1) -> Workload:
    """Equal lengths: single stream, small batches, the 64-way chat load."""
    rng = Random(seed)
    return Workload([_ids(rng, prompt_len) for _ in range(num_seqs)], [output_len] * num_seqs)


def shared_prefix(
    num_seqs: int, prefix_len: int, suffix_len: int, output_len: int, *, seed: int = 2
) -> Workload:
    """One system prompt for everybody: what a prompt template does to an engine."""
    rng = Random(seed)
    prefix = _ids(rng, prefix_len)
    prompts = [prefix + _ids(rng, suffix_len) for _ in range(num_seqs)]
    return Workload(prompts, [output_len] * num_seqs)


def _ids(rng: Random, length: int) -> list[int]:
    return [rng.randint(0, 10000) for _ in range(length)]


GPU_WORKLOADS: dict[str, Callable[[], Workload]] = {
    "nano256": lambda: ragged(256, 100, 1024),
    "single": lambda: uniform(1, 128, 512),
    "b16": lambda: uniform(16, 128, 512),
    "c64_1k_256": lambda: uniform(64, 1024, 256),
    "shared": lambda: shared_prefix(256, 2048, 64, 64),
}

CPU_WORKLOADS: dict[str, Callable[[], Workload]] = {
    "single": lambda: uniform(1, 64, 128),
    "ragged16": lambda: ragged(16, 16, 128),
    "shared64": lambda: shared_prefix(64, 512, 16, 24),
}
