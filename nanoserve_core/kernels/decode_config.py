"""How decode attention is cut and launched: a small table, read on the host, measured on an H200.

Knows no tensor. Nothing here changes a result except `DecodeConfig.min_chunk` and `max_chunk`,
which decide in what order a row's K/V is summed.
"""

from __future__ import annotations

from dataclasses import dataclass

INVARIANT_CHUNK = 256


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Tile and grid of the kernel, and what the planner may choose from.

    The K/V of a row is cut at absolute multiples of a chunk, which the planner picks anew in every
    step: the smallest from ``min_chunk`` (doubling, up to ``max_chunk``) that makes no more than
    ``target_items`` work items. With both equal, a row's result does not depend on the other rows.
    """

    min_chunk: int
    max_chunk: int
    target_items: int
    """Items of all kv heads together."""
    num_programs: int
    """Programs of the persistent grid: fixed, so that the launch can be captured."""
    block_n: int
    """Tokens per tile: a power of two that divides ``min_chunk``."""
    num_warps: int
    num_stages: int

    @property
    def is_batch_invariant(self) -> bool:
        """Whether the cuts are the same in every batch."""
        return self.min_chunk == self.max_chunk


def decode_config(
    num_rows: int, *, num_multiprocessors: int, batch_invariant: bool = False
) -> DecodeConfig:
    """The configuration for steps of ``num_rows`` decode rows."""
    # Measured with 0.6B heads: at 256 rows chunks of 512 reach 0.94 of the bandwidth, of 256 0.89;
    # a single row of 512 tokens takes 8.5 us in chunks of 256 and 7.2 us in chunks of 128.
    max_chunk = 512 if num_rows >= 128 else 256
    min_chunk = 32 if num_rows <= 16 else 64 if num_rows <= 64 else max_chunk
    if batch_invariant:
        min_chunk = max_chunk = INVARIANT_CHUNK
    # Starting programs that find nothing to do costs half a microsecond for a few hundred.
    programs = 2 if num_rows <= 8 else 4 if num_rows <= 32 else 6
    return DecodeConfig(
        min_chunk=min_chunk,
        max_chunk=max_chunk,
        target_items=2 * num_multiprocessors,
        num_programs=programs * num_multiprocessors,
        block_n=32,
        num_warps=2,
        num_stages=3,
    )


def max_items(config: DecodeConfig, *, num_rows: int, max_kv_len: int, num_kv_heads: int) -> int:
    """The most chunks a step of so many rows can have: what the partial results need room for.

    A chunk below ``max_chunk`` is chosen only if it makes at most ``target_items`` items; each row
    adds one at most for its unfinished chunk.
    """
    at_max_chunk = num_rows * -(-max_kv_len // config.max_chunk)
    below = config.target_items // num_kv_heads + num_rows
    return max(at_max_chunk, below if config.min_chunk < config.max_chunk else 0)
