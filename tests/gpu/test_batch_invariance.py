"""With ``batch_invariant`` a decoding row's logits do not depend on who else decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from nanoserve_core import EngineConfig
from nanoserve_core.cuda_runner import CudaRunner
from nanoserve_core.model_runner import ModelRunner
from nanoserve_core.plugins import PluginManager
from tests.gpu.test_cuda_engine import CapturedDriver
from tests.tiny_qwen3_models import prompt_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_TOKENS = 16


def logits_beside(checkpoint: Path, neighbour_lens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab_size]: those of a row of 700 that decodes beside rows of other lengths."""
    config = EngineConfig(
        device="cuda",
        dtype="bfloat16",
        batch_invariant=True,
        num_kvcache_blocks=700,
        max_model_len=1024,
        max_num_seqs=len(neighbour_lens) + 1,
    )
    runner = ModelRunner.create(checkpoint, config, PluginManager())
    assert isinstance(runner, CudaRunner)
    driver = CapturedDriver(runner)
    lengths = [700, *neighbour_lens]
    sequences = [driver.add_plain(prompt_of(n, seed=n)) for n in lengths]
    for sequence in sequences:
        driver.prefill(sequence)
    driver.decode(sequences, NUM_TOKENS)
    logits = torch.stack(sequences[0].logits[1:])
    runner.close()
    return logits


@pytest.mark.parametrize("num_neighbours", [3, 19, 40])
def test_a_rows_logits_are_the_same_bits_beside_any_others(
    tiny_checkpoint: Path, num_neighbours: int
) -> None:
    short = logits_beside(tiny_checkpoint, [3 + i for i in range(num_neighbours)])

    long = logits_beside(tiny_checkpoint, [900 - 7 * i for i in range(num_neighbours)])

    assert torch.equal(short, long)
