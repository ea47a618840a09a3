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
    # One row, as many programs as multiprocessors, larger tiles: 7.7 us instead of 9.1 for 512
    # tokens, 12.0 instead of 15.9 for 4096. At sixteen rows such tiles lose 3 %.
    is_alone = num_rows == 1 and not batch_invariant
    # Chunks of 512 instead of 256: 294 us instead of 306 for 256 rows; together with the grid below
    # 84.6 instead of 90.2 for 64 rows of 1100 (8B heads: 85.7 instead of 97.8), but a tenth more
    # where these rows share most of their tokens.
    max_chunk = 512 if num_rows > 32 else 256
    min_chunk = 64 if is_alone or num_rows > 16 else 32
    if num_rows >= 128:
        min_chunk = max_chunk
    if batch_invariant:
        min_chunk = max_chunk = INVARIANT_CHUNK
    # Eight programs do not fit a multiprocessor at once: the last ones fill in where others ended,
    # which evens out a batch of few items (64 rows: 84.6 us instead of 86.2) and no larger one.
    programs = 8 if num_rows > 32 else 4 if num_rows > 8 else 2
    if num_rows >= 128:
        programs = 6
    return DecodeConfig(
        min_chunk=min_chunk,
        max_chunk=max_chunk,
        target_items=(1 if is_alone else 2) * num_multiprocessors,
        num_programs=(1 if is_alone else programs) * num_multiprocessors,
        block_n=64 if is_alone else 32,
        num_warps=4 if is_alone else 2,
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
