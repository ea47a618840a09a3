"""The fewest seconds a GPU could need for a workload: what `gpu.py` measures the engine against.

Each operator of a step is charged max(bytes / bandwidth, operations / peak), and the operators of a
step follow each other. Bandwidth and peak are what copies and matrix products reach on an H200. The
schedule is prompts first, then decoding, which needs the fewest steps.

    python examples/benchmarks/roofline.py            the workloads of workloads.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from workloads import GPU_WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BANDWIDTH = 4.3e12
PEAK = 790e12
NBYTES = 2
"""Of a weight, an activation or an element of K/V: bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of a Qwen3 model decides its cost."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    is_tied: bool
    head_dim: int = 128
    vocab_size: int = 151936

    @property
    def kv_nbytes(self) -> int:
        """K and V of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * NBYTES

    def products(self) -> Iterator[tuple[bool, int, int, int]]:
        """(is it the head, how many a step, inputs, outputs) of each matrix product."""
        heads, hidden = self.num_heads * self.head_dim, self.hidden_size
        kv = 2 * self.num_kv_heads * self.head_dim
        yield False, self.num_layers, hidden, heads + kv
        yield False, self.num_layers, heads, hidden
        yield False, self.num_layers, hidden, 2 * self.intermediate_size
        yield False, self.num_layers, self.intermediate_size, hidden
        yield True, 1, hidden, self.vocab_size


SHAPES = {
    "0.6B": Shape(
        num_layers=28,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=8,
        intermediate_size=3072,
        is_tied=True,
    ),
    "1.7B": Shape(
        num_layers=28,
        hidden_size=2048,
        num_heads=16,
        num_kv_heads=8,
        intermediate_size=6144,
        is_tied=True,
    ),
    "4B": Shape(
        num_layers=36,
        hidden_size=2560,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=9728,
        is_tied=True,
    ),
    "8B": Shape(
        num_layers=36,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=12288,
        is_tied=False,
    ),
}


@dataclass
class _Running:
    context: int
    num_left: int


def decode_seconds(shape: Shape, contexts: Sequence[int]) -> float:
    """One decode step; ``contexts``: tokens that each row attends to, its own included."""
    num_rows = len(contexts)
    return _dense_seconds(shape, num_rows, num_rows) + _attention(shape, num_rows, sum(contexts), 0)


def decode_parts(shape: Shape, contexts: Sequence[int]) -> dict[str, float]:
    """The seconds of `decode_seconds`, by part of the step."""
    num_rows, names = len(contexts), iter(("qkv", "o", "gate_up", "down", "lm_head"))
    parts = {"attention": _attention(shape, num_rows, sum(contexts), 0)}
    parts |= {next(names): _product(product, num_rows) for product in shape.products()}
    parts["norms, rope, silu"] = num_rows * _elementwise_nbytes(shape) / BANDWIDTH
    parts["sampler"] = num_rows * shape.vocab_size * NBYTES / BANDWIDTH
    return parts


def prefill_seconds(shape: Shape, chunks: Sequence[tuple[int, int]], num_logits: int) -> float:
    """One step of prompt chunks: (new tokens, context with them) of each."""
    num_tokens = sum(new for new, _ in chunks)
    num_pairs = sum(new * context - new * (new - 1) // 2 for new, context in chunks)
    num_read = sum(context for _, context in chunks)
    dense = _dense_seconds(shape, num_tokens, num_logits)
    return dense + _attention(shape, num_tokens, num_read, num_pairs)


def workload_seconds(
    shape: Shape,
    prompt_lens: Sequence[int],
    output_lens: Sequence[int],
    *,
    num_shared: int = 0,
    max_num_batched_tokens: int = 16384,
) -> float:
    """All requests, there at the start. ``num_shared``: leading tokens that all have in common, and
    that are computed for the first one only.
    """
    seconds, chunks, num_logits, budget = 0.0, [], 0, max_num_batched_tokens
    running: list[_Running] = []
    for number, (prompt_len, output_len) in enumerate(zip(prompt_lens, output_lens, strict=True)):
        done = num_shared if number else 0
        while done < prompt_len:
            new = min(budget, prompt_len - done)
            done, budget = done + new, budget - new
            chunks.append((new, done))
            num_logits += done == prompt_len
            if budget == 0:
                seconds += prefill_seconds(shape, chunks, num_logits)
                chunks, num_logits, budget = [], 0, max_num_batched_tokens
        running.append(_Running(prompt_len + 1, output_len - 1))
    if chunks:
        seconds += prefill_seconds(shape, chunks, num_logits)
    while running := [row for row in running if row.num_left > 0]:
        seconds += decode_seconds(shape, [row.context for row in running])
        for row in running:
            row.context += 1
            row.num_left -= 1
    return seconds


def _dense_seconds(shape: Shape, num_tokens: int, num_logits: int) -> float:
    """Products, and what norms, rotation, activation and sampling read and write."""
    seconds = sum(
        _product(product, num_logits if product[0] else num_tokens) for product in shape.products()
    )
    nbytes = num_tokens * _elementwise_nbytes(shape) + num_logits * shape.vocab_size * NBYTES
    return seconds + nbytes / BANDWIDTH


def _product(product: tuple[bool, int, int, int], rows: int) -> float:
    _, count, inputs, outputs = product
    nbytes = count * (inputs * outputs + rows * (inputs + outputs)) * NBYTES
    return max(nbytes / BANDWIDTH, count * 2 * rows * inputs * outputs / PEAK)


def _elementwise_nbytes(shape: Shape) -> int:
    """Of one token: norms, rotation and activation, read and written."""
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    width = 8 * shape.hidden_size + 2 * heads + 3 * shape.intermediate_size
    return shape.num_layers * width * NBYTES


def _attention(shape: Shape, num_tokens: int, num_read: int, num_pairs: int) -> float:
    """K and V read once and written once; ``num_pairs`` 0: bound by reading."""
    nbytes = (num_read + num_tokens) * shape.kv_nbytes
    work = 4 * shape.num_layers * shape.num_heads * shape.head_dim * num_pairs
    return max(nbytes / BANDWIDTH, work / PEAK)


def main() -> None:
    """Print the floor of each workload."""
    for name, make in GPU_WORKLOADS.items():
        workload = make()
        num_shared = 2048 if name == "shared" else 0
        seconds = workload_seconds(
            SHAPES["0.6B"],
            [len(prompt) for prompt in workload.prompts],
            workload.output_lens,
            num_shared=num_shared,
        )
        rate = workload.num_output_tokens / seconds
        print(f"{name:12} {seconds:8.3f} s {rate:10,.0f} tokens/s")


if __name__ == "__main__":
    main()
