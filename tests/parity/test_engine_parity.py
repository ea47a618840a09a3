"""The schedule may change speed, never tokens: drawn schedules against transformers, one by one.

Arrivals, aborts, priorities, shared prefixes, pool, budget, block size and run-ahead are drawn;
every request that was not aborted must give exactly the tokens of its solo run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve_adapters.testing import DelayedRunner
from nanoserve_core import Engine, EngineConfig, Request, SamplingParams
from nanoserve_core.model_runner import ModelRunner
from nanoserve_core.plugins import PluginManager
from tests.tiny_qwen3_models import SHAPES, greedy_tokens, prompt_of, tiny_qwen3

if TYPE_CHECKING:
    from nanoserve_core.request import StepOutput

MAX_LEN = 64
PREFIXES = [(), prompt_of(8, seed=91), prompt_of(16, seed=92), prompt_of(21, seed=93)]


@dataclass(frozen=True)
class Arrival:
    """One request of a drawn schedule."""

    prompt: tuple[int, ...]
    max_tokens: int
    step: int
    abort_after: int | None
    priority: int
    n: int


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    """Prompts are short and share prefixes often; some requests are aborted."""
    prefix = draw(st.sampled_from(PREFIXES))
    own = prompt_of(draw(st.integers(1, 12)), seed=draw(st.integers(0, 5)))
    return Arrival(
        prompt=prefix + own,
        max_tokens=draw(st.integers(1, 12)),
        step=draw(st.integers(0, 12)),
        abort_after=draw(st.none() | st.integers(0, 8)),
        priority=draw(st.integers(0, 1)),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
    )


@st.composite
def engine_options(draw: st.DrawFn) -> dict[str, Any]:
    """Engines from roomy to hardly large enough for the largest request (33 + 11 positions)."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16, 64]))
    smallest = -(-MAX_LEN // block_size)
    return {
        "block_size": block_size,
        "num_kvcache_blocks": smallest + draw(st.integers(0, 2 * smallest)),
        "max_model_len": MAX_LEN,
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.integers(1, 40)),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 2, 1024])),
        "watermark": draw(st.sampled_from([0.0, 0.01, 0.2])),
        "enable_prefix_caching": draw(st.sampled_from([True, True, True, False])),
    }


def make_engine(shape: str, options: dict[str, Any], run_ahead: int) -> Engine:
    config = EngineConfig(**options)
    plugins = PluginManager()
    runner = ModelRunner.create(tiny_qwen3(shape), config, plugins)
    delayed = DelayedRunner(runner, run_ahead) if run_ahead else runner
    return Engine.from_runner(delayed, config, plugins)


def serve(engine: Engine, schedule: list[Arrival], sampling: dict[str, Any]) -> list[StepOutput]:
    """Add and abort requests at their steps; all outputs in order."""
    outputs: list[StepOutput] = []
    step = 0
    while step <= 24 or engine.has_unfinished_requests():
        for number, arrival in enumerate(schedule):
            if arrival.step == step:
                params = SamplingParams(max_tokens=arrival.max_tokens, n=arrival.n, **sampling)
                engine.add_request(
                    Request(
                        request_id=str(number),
                        prompt_token_ids=arrival.prompt,
                        sampling=params,
                        priority=arrival.priority,
                    )
                )
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                engine.abort(str(number))
        outputs += engine.step()
        step += 1
        assert step < 5000, "the engine makes no progress"
    return outputs


def assert_drained(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_blocks == stats.num_blocks
    engine.check()


def assert_one_end_each(outputs: list[StepOutput], schedule: list[Arrival]) -> None:
    ends = [output.request_id for output in outputs if output.request_finished]
    assert sorted(ends) == sorted(map(str, range(len(schedule))))
    for number, arrival in enumerate(schedule):
        own = [o for o in outputs if o.request_id == str(number)]
        for index in range(arrival.n):
            reasons = [o.finish_reason for o in own if o.index == index]
            assert sum(reason is not None for reason in reasons) == 1
            assert reasons[-1] is not None


def assert_tokens_of_solo_runs(
    outputs: list[StepOutput], schedule: list[Arrival], shape: str
) -> None:
    for number, arrival in enumerate(schedule):
        expected = greedy_tokens(shape, arrival.prompt, arrival.max_tokens)
        for index in range(arrival.n):
            own = [o for o in outputs if (o.request_id, o.index) == (str(number), index)]
            tokens = tuple(t for o in own for t in o.token_ids)
            if own[-1].finish_reason == "abort":
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected


@settings(max_examples=150)
@given(
    schedule=st.lists(arrivals(), min_size=1, max_size=7),
    options=engine_options(),
    run_ahead=st.sampled_from([0, 0, 1, 2]),
)
def test_every_schedule_gives_each_request_its_solo_tokens(
    schedule: list[Arrival], options: dict[str, Any], run_ahead: int
) -> None:
    with make_engine("gqa", options, run_ahead) as engine:
        outputs = serve(engine, schedule, {"temperature": 0.0})

        assert_one_end_each(outputs, schedule)
        assert_tokens_of_solo_runs(outputs, schedule, "gqa")
        assert_drained(engine)


@settings(max_examples=10)
@given(schedule=st.lists(arrivals(), min_size=2, max_size=5), options=engine_options())
@pytest.mark.parametrize("shape", sorted(set(SHAPES) - {"gqa"}))
def test_other_shapes_give_solo_tokens_too(
    shape: str, schedule: list[Arrival], options: dict[str, Any]
) -> None:
    with make_engine(shape, options, run_ahead=0) as engine:
        outputs = serve(engine, schedule, {"temperature": 0.0})

        assert_tokens_of_solo_runs(outputs, schedule, shape)
        assert_drained(engine)


@settings(max_examples=25)
@given(
    schedule=st.lists(arrivals(), min_size=2, max_size=6),
    options=engine_options(),
    run_ahead=st.integers(0, 2),
)
def test_seeded_sampling_with_penalties_equals_its_solo_run(
    schedule: list[Arrival], options: dict[str, Any], run_ahead: int
) -> None:
    sampling = {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 40,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "seed": 11,
    }
    roomy = {**options, "num_kvcache_blocks": 256, "max_num_batched_tokens": 256}
    with make_engine("gqa", options, run_ahead) as engine:
        outputs = serve(engine, schedule, sampling)
        assert_drained(engine)

    for number, arrival in enumerate(schedule):
        solo = Arrival(arrival.prompt, arrival.max_tokens, 0, None, 0, arrival.n)
        with make_engine("gqa", roomy, 0) as engine:
            expected = serve(engine, [solo], sampling)
        for index in range(arrival.n):
            own = [o for o in outputs if (o.request_id, o.index) == (str(number), index)]
            tokens = tuple(t for o in own for t in o.token_ids)
            wanted = tuple(t for o in expected if o.index == index for t in o.token_ids)
            assert tokens == (wanted[: len(tokens)] if own[-1].finish_reason == "abort" else wanted)
