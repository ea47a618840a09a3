"""`pipeline("text-generation")` over an installed model: same text, and callers share a batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from transformers import pipeline

import hf_generate_shim
from nanoserve_adapters.testing import AdmissionGate, tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle
    from tests.hf_generate_shim.calls import Options

PLAIN: Options = {"do_sample": False, "max_new_tokens": 12, "max_length": None}
TEXTS = [f"{number} green bottles{'!' * (number % 7)}" for number in range(32)]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS[:3]]

Pipe = Any  # the pipeline's class has no types


def make_pipe(model: Qwen3ForCausalLM) -> Pipe:
    """With padding on the left, as batches of a decoder need it."""
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    return pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")


CALLS: dict[str, Callable[[Pipe], object]] = {
    "one text": lambda pipe: pipe(TEXTS[0], **PLAIN),
    "list": lambda pipe: pipe(TEXTS[:5], **PLAIN),
    "batches": lambda pipe: pipe(TEXTS[:10], batch_size=4, **PLAIN),
    "new text only": lambda pipe: pipe(TEXTS[:3], return_full_text=False, **PLAIN),
    "ids": lambda pipe: pipe(TEXTS[:3], return_tensors=True, **PLAIN),
    "chat": lambda pipe: pipe(CHATS[0], **PLAIN),
    "chats": lambda pipe: pipe(CHATS, batch_size=3, **PLAIN),
    "stop string": lambda pipe: pipe(TEXTS[0], stop_sequence="e", **PLAIN),
}


@pytest.mark.parametrize("name", CALLS)
def test_pipeline_gives_the_same(model: Qwen3ForCausalLM, name: str) -> None:
    expected = CALLS[name](make_pipe(model))

    with hf_generate_shim.installed(model, num_kvcache_blocks=256) as handle:
        output = CALLS[name](make_pipe(model))
        counters = handle.counters

    assert output == expected
    assert counters.fast > 0
    assert counters.fallback == 0


def test_threads_that_share_a_pipeline_share_a_batch(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    pipe = make_pipe(model)
    expected = [pipe(text, **PLAIN) for text in TEXTS[:16]]
    steps = handle.stats().steps

    with ThreadPoolExecutor(16) as executor:
        with AdmissionGate(handle.thread, 16):
            futures = [executor.submit(pipe, text, **PLAIN) for text in TEXTS[:16]]
        outputs = [future.result(timeout=60) for future in futures]

    assert outputs == expected
    assert handle.stats().peak_batch == 16
    assert handle.stats().steps - steps < 3 * PLAIN["max_new_tokens"]
