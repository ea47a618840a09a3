"""`DelayedRunner`: a model runner whose results come late, as from a device that runs ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nanoserve_core.config import ModelSpec
    from nanoserve_core.model_runner import InFlight, ModelRunner, StepResult
    from nanoserve_core.plan import StepPlan


class DelayedRunner:
    """Runs every step at once on `runner`, but its result is not done before ``run_ahead`` later
    steps were launched, or somebody waits for it.

    With it the CPU engine plans steps before the tokens of earlier ones are known, frees blocks
    under launched steps and meets late stops, as on a GPU. Tokens must not change.
    """

    def __init__(self, runner: ModelRunner, run_ahead: int) -> None:
        self.run_ahead = self.max_run_ahead = run_ahead
        self.num_launched = 0
        self._runner = runner

    @property
    def spec(self) -> ModelSpec:
        """The wrapped runner's."""
        return self._runner.spec

    @property
    def num_blocks(self) -> int:
        """The wrapped runner's."""
        return self._runner.num_blocks

    @property
    def block_size(self) -> int:
        """The wrapped runner's."""
        return self._runner.block_size

    @property
    def max_model_len(self) -> int:
        """The wrapped runner's."""
        return self._runner.max_model_len

    @property
    def backend_names(self) -> Mapping[str, str]:
        """The wrapped runner's."""
        return self._runner.backend_names

    def launch(self, plan: StepPlan) -> InFlight:
        """Launch on the wrapped runner; the result is late."""
        self.num_launched += 1
        return _LateStep(self, self._runner.launch(plan))

    def weights_epoch(self) -> int:
        """The wrapped runner's."""
        return self._runner.weights_epoch()

    def warmup(self, *, max_num_seqs: int, max_prompt_tokens: int) -> int:
        """The wrapped runner's."""
        return self._runner.warmup(max_num_seqs=max_num_seqs, max_prompt_tokens=max_prompt_tokens)

    def memory_nbytes(self) -> dict[str, int]:
        """The wrapped runner's."""
        return self._runner.memory_nbytes()

    def close(self) -> None:
        """Close the wrapped runner."""
        self._runner.close()


class _LateStep:
    def __init__(self, runner: DelayedRunner, step: InFlight) -> None:
        self._runner = runner
        self._step = step
        self._done_at = runner.num_launched + runner.run_ahead

    def wait(self) -> StepResult:
        """The step's result; waiting is always allowed: nothing more may be launched."""
        self._done_at = 0
        return self._step.wait()

    def is_done(self) -> bool:
        """Whether enough later steps were launched, or somebody has waited."""
        return self._runner.num_launched >= self._done_at and self._step.is_done()
