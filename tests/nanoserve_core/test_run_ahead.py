"""RunAhead: as few launched steps as keep the device busy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nanoserve_core import Engine, EngineConfig, Request, SamplingParams
from nanoserve_core.model_runner import ModelRunner
from nanoserve_core.plugins import PluginManager
from nanoserve_core.run_ahead import PATIENCE, RunAhead
from tests.tiny_qwen3_models import greedy_tokens, prompt_of, tiny_qwen3

if TYPE_CHECKING:
    from nanoserve_core.model_runner import InFlight, StepResult
    from nanoserve_core.plan import StepPlan


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def visit(run_ahead: RunAhead, clock: Clock, seconds: float, num_done: int) -> None:
    """A visit after so long; dry when all that may be launched was done."""
    clock.now += seconds
    run_ahead.note(num_done=num_done, is_dry=num_done == run_ahead.depth + 1)


def test_a_host_in_time_launches_no_more_than_the_least() -> None:
    clock = Clock()
    run_ahead = RunAhead(2, 32, clock=clock)

    for _ in range(3 * PATIENCE):
        visit(run_ahead, clock, 0.001, 1)

    assert run_ahead.depth == 2


def test_it_doubles_while_the_device_runs_dry_and_never_passes_the_most() -> None:
    clock = Clock()
    run_ahead = RunAhead(2, 32, clock=clock)
    depths = []

    for _ in range(6):
        visit(run_ahead, clock, 0.005, run_ahead.depth + 1)
        depths.append(run_ahead.depth)

    assert depths == [4, 8, 16, 32, 32, 32]


def test_launched_work_stays_below_a_tenth_of_a_second() -> None:
    clock = Clock()
    run_ahead = RunAhead(2, 32, clock=clock)

    for _ in range(6):
        visit(run_ahead, clock, 0.02 * (run_ahead.depth + 1), run_ahead.depth + 1)

    assert run_ahead.depth == 5  # steps of 20 ms


def test_it_comes_down_again_when_the_host_is_in_time() -> None:
    clock = Clock()
    run_ahead = RunAhead(2, 32, clock=clock)
    for _ in range(3):
        visit(run_ahead, clock, 0.005, run_ahead.depth + 1)

    for _ in range(PATIENCE):
        visit(run_ahead, clock, 0.001, 1)
    once = run_ahead.depth
    for _ in range(5 * PATIENCE):
        visit(run_ahead, clock, 0.001, 1)

    assert once == 8
    assert run_ahead.depth == 2


def test_a_late_host_that_lost_nothing_changes_nothing() -> None:
    clock = Clock()
    run_ahead = RunAhead(2, 32, clock=clock)
    for _ in range(3):
        visit(run_ahead, clock, 0.005, run_ahead.depth + 1)

    for _ in range(3 * PATIENCE):
        visit(run_ahead, clock, 0.005, 7)

    assert run_ahead.depth == 16


def test_a_runner_without_run_ahead_keeps_none() -> None:
    run_ahead = RunAhead(0, 0, clock=Clock())

    run_ahead.note(num_done=1, is_dry=True)

    assert run_ahead.depth == 0


class BurstRunner:
    """Steps of a runner that are all done whenever somebody waits for one: a host that is late."""

    run_ahead, max_run_ahead = 1, 8

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_waits = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> BurstStep:
        """Launch; done when a step is waited for next."""
        return BurstStep(self, self._runner.launch(plan))


class BurstStep:
    """A step of `BurstRunner`."""

    def __init__(self, runner: BurstRunner, step: InFlight) -> None:
        self._runner, self._step = runner, step
        self._launched_at = runner.num_waits

    def is_done(self) -> bool:
        """Whether somebody has waited since it was launched."""
        return self._runner.num_waits > self._launched_at

    def wait(self) -> StepResult:
        """The result."""
        if not self.is_done():
            self._runner.num_waits += 1
        return self._step.wait()


@pytest.mark.parametrize("max_tokens", [5, 40])
def test_an_engine_whose_device_runs_dry_commits_many_steps_at_a_visit(max_tokens: int) -> None:
    config = EngineConfig(block_size=4, num_kvcache_blocks=60, max_model_len=64, max_num_seqs=4)
    plugins = PluginManager()
    runner = BurstRunner(ModelRunner.create(tiny_qwen3(), config, plugins))
    engine = Engine.from_runner(runner, config, plugins)  # type: ignore[arg-type]  # its shape
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    request = Request(request_id="a", prompt_token_ids=prompt_of(9), sampling=sampling)

    with engine:
        engine.add_request(request)
        visits = []
        while engine.has_unfinished_requests():
            visits.append([t for output in engine.step() for t in output.token_ids])

        expected = greedy_tokens("gqa", prompt_of(9), max_tokens, ignore_eos=True)
        assert [t for tokens in visits for t in tokens] == list(expected)
        assert max(map(len, visits)) == min(max_tokens - 2, 9)
        engine.check()


def test_tokens_of_a_visit_in_which_the_request_fails_are_delivered_before_the_failure() -> None:
    config = EngineConfig(block_size=4, num_kvcache_blocks=60, max_model_len=64, max_num_seqs=4)
    plugins = PluginManager()
    runner = BurstRunner(ModelRunner.create(tiny_qwen3(), config, plugins))
    engine = Engine.from_runner(runner, config, plugins)  # type: ignore[arg-type]  # its shape

    def fail_at_the_fifth(_index: int, token_ids: list[int]) -> bool:
        if len(token_ids) == 5:
            raise ValueError("the fifth")
        return False

    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    request = Request(
        request_id="a",
        prompt_token_ids=prompt_of(9),
        sampling=sampling,
        should_stop=fail_at_the_fifth,
    )

    with engine:
        engine.add_request(request)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()

        tokens = [t for output in outputs for t in output.token_ids]
        assert tokens == list(greedy_tokens("gqa", prompt_of(9), 4, ignore_eos=True))
        assert [output.finish_reason for output in outputs][-1] == "error"
        assert str(outputs[-1].error) == "the fifth"
