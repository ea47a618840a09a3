"""How decode attention is cut and launched: a small table, read on the host, measured on an H200.

Knows no tensor. Tile and chunks decide in what order a row's K/V is summed, and so how its result
is rounded; the grid changes no result.
"""

from __future__ import annotations

from dataclasses import dataclass

INVARIANT_CHUNK = 256


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Tile and grid of the kernel, and what the planner may choose from.

    The K/V of a row is cut at absolute multiples of a chunk, which the planner picks anew in every
    step: the smallest from ``min_chunk`` (doubling, up to ``max_chunk``) that makes no more than
    ``target_items`` work items. With both equal, and one tile, a row's result does not depend on
    the other rows.
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
    max_chunk = 256 if num_rows == 1 else 512
    min_chunk = max_chunk if num_rows >= 128 else 64
    # Up to 16 rows few programs with large tiles: the grid itself costs time, and a row is short
    # of work for more. Means over six loads (lengths of 200 to 1500, equal and ragged), against
    # the best of 40 variants for each load: 1.01 at 4 rows, 1.13 at 16, 1.05 at 32, 1.06 at 64;
    # the next best were 1.03, 1.15, 1.10 and 1.07.
    programs = 1 if num_rows <= 8 else 2 if num_rows <= 16 else 4 if num_rows < 128 else 6
    num_items = 1 if num_rows <= 16 else 2
    block_n, num_warps = (64, 4) if num_rows <= 16 else (32, 2)
    if batch_invariant:  # one tile and one chunk for all
        min_chunk = max_chunk = INVARIANT_CHUNK
        block_n, num_warps = 32, 2
    return DecodeConfig(
        min_chunk=min_chunk,
        max_chunk=max_chunk,
        target_items=num_items * num_multiprocessors,
        num_programs=programs * num_multiprocessors,
        block_n=block_n,
        num_warps=num_warps,
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
