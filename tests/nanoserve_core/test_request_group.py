"""Groups of requests in an engine over a real model: chosen together, ended together.

Oracle: the greedy tokens of transformers for each member alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nanoserve_core import Engine, EngineConfig, Request, SamplingParams
from nanoserve_core.errors import InvalidRequest, RequestTooLong
from nanoserve_core.request_group import RequestGroup
from tests.nanoserve_core.host_device import cuda_runner_on_host
from tests.nanoserve_core.test_engine import SMALL, assert_nothing_left, request, run, tokens_of
from tests.tiny_qwen3_models import greedy_tokens, prompt_of, tiny_qwen3

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nanoserve_core.request import StopCheck


RUNNERS = ["cpu", "steps ahead"]
"""The second is the runner of a CUDA device, on a stand-in: it launches steps ahead."""


@dataclass
class Recorder:
    """Takes the largest logit of each row, and remembers who was asked for."""

    raise_at: int = -1
    wrong_shape_at: int = -1
    steps: list[list[int]] = field(default_factory=list)

    def __call__(self, logits: torch.Tensor, members: Sequence[int]) -> torch.Tensor:
        """The argmax of each row; may be told to fail."""
        assert logits.dtype == torch.float32
        assert len(logits) == len(members)
        self.steps.append(list(members))
        if len(self.steps) == self.raise_at:
            raise ZeroDivisionError("as told")
        tokens = logits.argmax(-1)
        logits.zero_()  # its own to edit
        return tokens[:-1] if len(self.steps) == self.wrong_shape_at else tokens


def make_engine(runner: str, **options: Any) -> Engine:
    config = EngineConfig(**{**SMALL, **options})
    if runner == "cpu":
        return Engine(tiny_qwen3(), config)
    return Engine.from_runner(cuda_runner_on_host(tiny_qwen3(), config), config)


@pytest.fixture(params=RUNNERS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with make_engine(request.param) as engine:
        yield engine
        assert_nothing_left(engine)


def members(
    sampler: Recorder, *lengths: int, should_stop: StopCheck | None = None, **sampling: Any
) -> list[Request]:
    return RequestGroup.join(
        [
            Request(
                request_id=f"m{place}",
                prompt_token_ids=prompt_of(length),
                sampling=SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, **sampling),
                should_stop=should_stop if place == 1 else None,
            )
            for place, length in enumerate(lengths)
        ],
        sampler,
    )


def expected(length: int, max_tokens: int = 8) -> tuple[int, ...]:
    return greedy_tokens("gqa", prompt_of(length), max_tokens, ignore_eos=True)


def test_members_are_chosen_together_and_get_the_tokens_of_their_solo_runs(engine: Engine) -> None:
    sampler = Recorder()

    outputs = run(engine, request("other", prompt_of(30)), *members(sampler, 3, 70, 9))

    assert [tokens_of(outputs[f"m{i}"]) for i in range(3)] == [expected(n) for n in (3, 70, 9)]
    assert tokens_of(outputs["other"]) == greedy_tokens("gqa", prompt_of(30), 8)
    assert sampler.steps == [[0, 1, 2]] * 8


def test_others_go_on_when_a_member_stops(engine: Engine) -> None:
    sampler = Recorder()

    stop_at_three = lambda _, tokens: len(tokens) == 3  # noqa: E731 - a check in one line
    outputs = run(engine, *members(sampler, 3, 5, 9, should_stop=stop_at_three))

    assert [len(tokens_of(outputs[f"m{i}"])) for i in range(3)] == [8, 3, 8]
    assert sampler.steps == [[0, 1, 2]] * 3 + [[0, 2]] * 5


@pytest.mark.parametrize("how", ["raise_at", "wrong_shape_at"])
def test_failing_sampler_fails_its_group_only(engine: Engine, how: str) -> None:
    sampler = Recorder(**{how: 3})

    outputs = run(engine, request("other", prompt_of(30)), *members(sampler, 3, 5, 9))

    assert tokens_of(outputs["other"]) == greedy_tokens("gqa", prompt_of(30), 8)
    for name in ("m0", "m1", "m2"):
        assert tokens_of(outputs[name]) == expected({"m0": 3, "m1": 5, "m2": 9}[name])[:2]
        assert outputs[name][-1].finish_reason == "error"
        assert outputs[name][-1].error is outputs["m0"][-1].error
    assert isinstance(outputs["m0"][-1].error, ZeroDivisionError) == (how == "raise_at")


def test_failing_stop_check_of_a_member_fails_its_group(engine: Engine) -> None:
    def check(index: int, tokens: list[int]) -> bool:
        return 1 // (2 - len(tokens)) + index > 5

    outputs = run(engine, *members(Recorder(), 3, 5, 9, should_stop=check))

    for news in outputs.values():
        assert isinstance(news[-1].error, ZeroDivisionError)
        assert [output.request_finished for output in news].count(True) == 1


def test_abort_of_a_member_ends_its_group(engine: Engine) -> None:
    for item in members(Recorder(), 3, 5, 9):
        engine.add_request(item)
    engine.step()
    engine.step()

    engine.abort("m1")

    ends = {o.request_id: o.finish_reason for o in engine.step() if o.request_finished}
    assert ends == {"m0": "abort", "m1": "abort", "m2": "abort"}


def test_incomplete_group_hinders_nobody_and_can_be_aborted(engine: Engine) -> None:
    first, *_ = members(Recorder(), 3, 5)
    engine.add_request(first)
    engine.add_request(request("other", prompt_of(9)))

    outputs = [output for _ in range(9) for output in engine.step()]
    engine.abort("m0")

    assert {output.request_id for output in outputs} == {"other"}
    assert outputs[-1].request_finished
    assert [output.finish_reason for output in engine.step()] == ["abort"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_group_is_preempted_and_resumed_as_one(runner: str) -> None:
    sampler = Recorder()
    with make_engine(runner, num_kvcache_blocks=16, watermark=0.0) as engine:
        other = request("other", prompt_of(24), max_tokens=40, ignore_eos=True)

        outputs = run(engine, other, *members(sampler, 9, 10, 11))

        assert engine.stats().preemptions >= 3
        assert_nothing_left(engine)
    assert [tokens_of(outputs[f"m{i}"]) for i in range(3)] == [expected(n) for n in (9, 10, 11)]
    assert tokens_of(outputs["other"]) == greedy_tokens("gqa", prompt_of(24), 40, ignore_eos=True)
    assert sampler.steps == [[0, 1, 2]] * 8


def test_equal_prompts_are_computed_once(engine: Engine) -> None:
    run(engine, *members(Recorder(), 41, 41, 41, 41))

    assert engine.stats().prompt_tokens_computed < 60


def test_group_larger_than_the_engine_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestTooLong, match="9 members, which sample in the same step"):
        engine.add_request(members(Recorder(), *[3] * 9)[0])
    with pytest.raises(RequestTooLong, match="need 90 KV blocks of 4 tokens, but the pool has 64"):
        engine.add_request(members(Recorder(), 110, 110, 110)[0])


@pytest.mark.parametrize("wish", [{"n": 2, "seed": 0}, {"prompt_logprobs": 1}])
def test_member_has_one_sample_and_no_prompt_logprobs(engine: Engine, wish: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="in a group"):
        engine.add_request(members(Recorder(), 3, 4, **wish)[0])
