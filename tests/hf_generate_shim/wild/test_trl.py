"""TRL's GRPOTrainer over an installed model: the same training, to the last bit.

Three steps with the fused AdamW that it takes by default, which changes the weights without
counting versions: completions after a step must come from the new weights.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hf_generate_shim
from nanoserve_adapters.testing import tiny_model, tiny_tokenizer
from tests.hf_generate_shim.wild.optional import optional

if TYPE_CHECKING:
    from pathlib import Path

    from hf_generate_shim import Handle

datasets = optional("datasets")
trl = optional("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_STEPS = 3
PROMPTS = ["abc", "hello world", "xy", "qwerty " * 5]


class Training:
    """One run of the trainer, the same for the same seeds."""

    def __init__(self, folder: Path, **options: Any) -> None:  # Any: see install
        self.completions: list[list[int]] = []
        self.rewards: list[float] = []
        torch.manual_seed(0)
        self.model = tiny_model()
        self.handle: Handle | None = None
        tokenizer = tiny_tokenizer()
        tokenizer.padding_side = "left"
        with (
            hf_generate_shim.installed(self.model, num_kvcache_blocks=256, **options)
            if options
            else nullcontext() as self.handle
        ):
            trainer = trl.GRPOTrainer(
                model=self.model,
                processing_class=tokenizer,
                reward_funcs=self.reward,
                args=arguments(folder),
                train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
            )
            trainer.train()
            self.epoch = 0 if self.handle is None else self.handle.stats().weights_epoch

    def reward(self, completion_ids: list[list[int]], **_: object) -> list[float]:
        """Depends on every token."""
        rewards = [sum(token % 7 for token in ids) / 10 for ids in completion_ids]
        self.completions += [list(ids) for ids in completion_ids]
        self.rewards += rewards
        return rewards


def arguments(folder: Path) -> Any:  # noqa: ANN401 - TRL has no types
    """Of a short run on the CPU that writes and reports nothing."""
    return trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=NUM_STEPS,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        seed=1,
    )


def test_grpo_trains_the_same_with_transformers_random_numbers(tmp_path: Path) -> None:
    expected = Training(tmp_path)

    trained = Training(tmp_path, rng="hf")

    assert trained.completions == expected.completions
    assert trained.rewards == expected.rewards
    for ours, theirs in zip(trained.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
    assert trained.handle is not None
    assert trained.handle.counters.lockstep == NUM_STEPS
    assert trained.handle.counters.fallback == 0


def test_grpo_with_rows_of_their_own_is_served_and_reproducible(tmp_path: Path) -> None:
    first = Training(tmp_path, rng="row")

    second = Training(tmp_path, rng="row")

    assert first.completions == second.completions
    assert first.handle is not None
    assert first.handle.counters.fast == NUM_STEPS
    assert first.epoch >= NUM_STEPS - 1
