"""`CudaRunner` on a stand-in device: two steps ahead, and the same tokens as everybody else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve_core import Engine, EngineConfig, Request, SamplingParams
from nanoserve_core.cuda_graphs import PlainCalls
from nanoserve_core.errors import EngineClosed
from nanoserve_core.model_runner import ModelRunner
from nanoserve_core.plan import StepPlan
from nanoserve_core.plugins import PluginManager
from nanoserve_core.step_parts import StepPart
from tests.nanoserve_core.automaton import Automaton, masked_greedy
from tests.nanoserve_core.hand_made_plans import Driver
from tests.nanoserve_core.host_device import cuda_runner_on_host
from tests.parity.test_engine_parity import (
    Arrival,
    arrivals,
    assert_drained,
    assert_one_end_each,
    assert_tokens_of_solo_runs,
    engine_options,
    serve,
)
from tests.tiny_qwen3_models import EOS, SHAPES, VOCAB_SIZE, greedy_tokens, prompt_of, tiny_qwen3

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from nanoserve_core.request import StepOutput

ROOMY: dict[str, Any] = {
    "block_size": 4,
    "num_kvcache_blocks": 200,
    "max_model_len": 64,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
}


def make_engine(shape: str = "gqa", **options: Any) -> Engine:
    config = EngineConfig(**{**ROOMY, **options})
    return Engine.from_runner(
        cuda_runner_on_host(tiny_qwen3(shape), config), config, PluginManager()
    )


def make_cpu_engine(shape: str = "gqa", **options: Any) -> Engine:
    config, plugins = EngineConfig(**{**ROOMY, **options}), PluginManager()
    runner = ModelRunner.create(tiny_qwen3(shape), config, plugins)
    return Engine.from_runner(runner, config, plugins)


def run(engine: Engine, requests: list[Request]) -> dict[str, list[StepOutput]]:
    """All requests at once; their outputs by request id."""
    outputs: dict[str, list[StepOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id].append(output)
    return outputs


def tokens_of(outputs: list[StepOutput], index: int = 0) -> tuple[int, ...]:
    return tuple(t for o in outputs if o.index == index for t in o.token_ids)


def request_of(number: int, *, length: int = 9, **sampling: Any) -> Request:
    options = {"temperature": 0.0, "max_tokens": 10, **sampling}
    return Request(
        request_id=str(number),
        prompt_token_ids=prompt_of(length, seed=number),
        sampling=SamplingParams(**options),
    )


@settings(max_examples=25)
@given(schedule=st.lists(arrivals(), min_size=1, max_size=7), options=engine_options())
def test_every_schedule_gives_each_request_its_solo_tokens(
    schedule: list[Arrival], options: dict[str, Any]
) -> None:
    with make_engine("gqa", **options) as engine:
        outputs = serve(engine, schedule, {"temperature": 0.0})

        assert_one_end_each(outputs, schedule)
        assert_tokens_of_solo_runs(outputs, schedule, "gqa")
        assert_drained(engine)


@settings(max_examples=3)
@given(schedule=st.lists(arrivals(), min_size=2, max_size=5), options=engine_options())
@pytest.mark.parametrize("shape", sorted(set(SHAPES) - {"gqa"}))
def test_other_shapes_give_solo_tokens_too(
    shape: str, schedule: list[Arrival], options: dict[str, Any]
) -> None:
    with make_engine(shape, **options) as engine:
        outputs = serve(engine, schedule, {"temperature": 0.0})

        assert_tokens_of_solo_runs(outputs, schedule, shape)
        assert_drained(engine)


@settings(max_examples=8)
@given(schedule=st.lists(arrivals(), min_size=2, max_size=6), options=engine_options())
def test_sampled_rows_give_the_tokens_of_the_cpu_engine(
    schedule: list[Arrival], options: dict[str, Any]
) -> None:
    sampling = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 11}
    with make_engine("gqa", **options) as engine:
        outputs = serve(engine, schedule, sampling)
        assert_drained(engine)

    assert_solo_tokens_of_cpu(outputs, schedule, sampling)


@settings(max_examples=6)
@given(schedule=st.lists(arrivals(), min_size=2, max_size=6), options=engine_options())
def test_rows_with_penalties_give_the_tokens_of_the_cpu_engine(
    schedule: list[Arrival], options: dict[str, Any]
) -> None:
    sampling = {
        "temperature": 0.8,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "min_tokens": 1,
        "seed": 11,
    }
    with make_engine("gqa", **options) as engine:
        outputs = serve(engine, schedule, sampling)
        assert_drained(engine)

    assert_solo_tokens_of_cpu(outputs, schedule, sampling)


def assert_solo_tokens_of_cpu(
    outputs: list[StepOutput], schedule: list[Arrival], sampling: dict[str, Any]
) -> None:
    for number, arrival in enumerate(schedule):
        with make_cpu_engine() as engine:
            solo = replace(arrival, step=0, abort_after=None)
            expected = serve(engine, [solo], sampling)
        for index in range(arrival.n):
            own = [o for o in outputs if (o.request_id, o.index) == (str(number), index)]
            tokens, wanted = tokens_of(own, index), tokens_of(expected, index)
            assert tokens == (wanted[: len(tokens)] if own[-1].finish_reason == "abort" else wanted)


def shared_requests(prefix_length: int, num_requests: int, **sampling: Any) -> list[Request]:
    """Two families, of prompts that begin alike, and a stranger in the middle."""
    requests = []
    for number in range(num_requests):
        request = request_of(number, length=1 + number % 5, **sampling)
        prefix = prompt_of(prefix_length, seed=500 + number % 2)
        if number != num_requests // 2:
            request = replace(request, prompt_token_ids=(*prefix, *request.prompt_token_ids))
        requests.append(request)
    return requests


def test_rows_that_share_blocks_stand_together_and_keep_their_tokens() -> None:
    config = EngineConfig(**{**ROOMY, "max_num_seqs": 12})
    runner = cuda_runner_on_host(tiny_qwen3(), config)
    requests = shared_requests(17, 10, ignore_eos=True)
    orders = []
    with Engine.from_runner(runner, config, PluginManager()) as engine:
        for request in requests:
            engine.add_request(request)
        outputs: dict[str, list[StepOutput]] = {request.request_id: [] for request in requests}
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id].append(output)
            orders.append(runner._rows.order)  # noqa: SLF001  # what the test is about

        for request in requests:
            expected = greedy_tokens("gqa", request.prompt_token_ids, 10, ignore_eos=True)
            assert tokens_of(outputs[request.request_id]) == expected
        assert_drained(engine)
    sizes = {len(order) for order in orders if order is not None}
    assert max(sizes) == 10, "the rows were never reordered"


def test_new_tenants_of_the_same_slots_do_not_keep_the_groups_of_the_old() -> None:
    prefix = prompt_of(17, seed=500)
    strangers = [request_of(i, length=21, ignore_eos=True) for i in range(2)]
    kin = [replace(r, prompt_token_ids=prefix + r.prompt_token_ids[:4]) for r in strangers]
    with make_engine() as engine:
        for requests in (kin, kin, strangers):  # the second time they begin and end together
            outputs = run(engine, requests)

            for request in requests:
                expected = greedy_tokens("gqa", request.prompt_token_ids, 10, ignore_eos=True)
                assert tokens_of(outputs[request.request_id]) == expected


def test_three_steps_are_launched_when_the_oldest_is_read() -> None:
    with make_engine() as engine:
        engine.add_request(request_of(0))

        first = engine.step()

        assert len(engine._in_flight) == 3  # noqa: SLF001  # what the test is about
        assert [len(output.token_ids) for output in first] == [1]


def test_a_row_that_stopped_on_the_device_is_not_sampled_again() -> None:
    prompt = next(
        p
        for p in (prompt_of(6, seed=seed) for seed in range(200))
        if 2 <= len(greedy_tokens("gqa", p, 12)) < 10
    )
    expected = greedy_tokens("gqa", prompt, 12)
    assert expected[-1] == EOS
    request = Request(
        request_id="a",
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=12),
    )
    with make_engine() as engine:
        outputs = run(engine, [request, request_of(1)])

        assert tokens_of(outputs["a"]) == expected
        assert outputs["a"][-1].finish_reason == "stop"
        assert tokens_of(outputs["1"]) == greedy_tokens("gqa", prompt_of(9, seed=1), 10)
        assert_drained(engine)


def test_stop_token_ids_beyond_what_the_device_holds_are_found_by_the_host() -> None:
    free_run = greedy_tokens("gqa", prompt_of(9, seed=1), 10)
    stop_ids = (*range(200, 230), free_run[4])
    with make_engine() as engine:
        outputs = run(engine, [request_of(1, stop_token_ids=stop_ids)])["1"]

        wanted = free_run[: min(free_run.index(t) for t in free_run if t in stop_ids) + 1]
        assert tokens_of(outputs) == wanted
        assert outputs[-1].finish_reason == "stop"


def test_max_tokens_of_one_ends_with_the_prompt() -> None:
    with make_engine() as engine:
        outputs = run(engine, [request_of(i, max_tokens=1) for i in range(4)])

        for i in range(4):
            assert tokens_of(outputs[str(i)]) == greedy_tokens("gqa", prompt_of(9, seed=i), 1)
        assert_drained(engine)


def test_a_row_that_asks_for_logprobs_gets_those_of_the_cpu_engine() -> None:
    requests = [request_of(0, logprobs=3, prompt_logprobs=2), request_of(1)]
    with make_engine() as engine, make_cpu_engine() as cpu:
        outputs, expected = run(engine, requests), run(cpu, requests)

        assert tokens_of(outputs["1"]) == tokens_of(expected["1"])
        ours = [p for o in outputs["0"] for p in o.logprobs or ()]
        theirs = [p for o in expected["0"] for p in o.logprobs or ()]
        assert len(ours) == len(theirs) == 10
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.keys() == other.keys()
            for token in mine:
                assert mine[token].logprob == pytest.approx(other[token].logprob, abs=1e-5)


def test_a_processor_sees_every_token_of_its_row() -> None:
    seen: list[int] = []

    def note_length(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids.shape[1])
        return scores

    request = replace(request_of(0), logits_processors=(note_length,))
    with make_engine() as engine:
        outputs = run(engine, [request, request_of(1)])

        assert tokens_of(outputs["0"]) == greedy_tokens("gqa", prompt_of(9, seed=0), 10)
        assert tokens_of(outputs["1"]) == greedy_tokens("gqa", prompt_of(9, seed=1), 10)
    num_tokens = len(tokens_of(outputs["0"]))
    assert seen[:num_tokens] == list(range(9, 9 + num_tokens))


def test_steps_without_wishes_do_not_pass_the_host_sampler() -> None:
    config = EngineConfig(**ROOMY)
    runner = cuda_runner_on_host(tiny_qwen3(), config)
    with Engine.from_runner(runner, config, PluginManager()) as engine:
        run(engine, [request_of(0, temperature=0.7, top_k=5), request_of(1)])
        num_plain = runner.num_host_sampled_steps
        run(engine, [request_of(2, min_tokens=3)])

        assert num_plain == 0
        assert runner.num_host_sampled_steps == 3  # until the minimum is reached


def test_grammars_hold_their_rows_and_leave_the_others_as_they_are() -> None:
    pairs = Automaton({0: {20: 1, 21: 1, 90: 1}, 1: {30: 0, 40: 0}})
    mute = Automaton({}, free=frozenset({0}))
    grammars = [pairs, None, mute, pairs]
    requests = [
        replace(request_of(number), grammar=grammar) for number, grammar in enumerate(grammars)
    ]

    with make_engine() as engine:
        outputs = run(engine, requests)
        assert_drained(engine)

    for request, grammar in zip(requests, grammars, strict=True):
        prompt, tokens = request.prompt_token_ids, tokens_of(outputs[request.request_id])
        if grammar is pairs:
            assert tokens == masked_greedy(pairs, prompt, 10)
        else:
            assert tokens == greedy_tokens("gqa", prompt, 10)


def test_a_grammar_that_says_nothing_keeps_steps_on_the_device() -> None:
    mute = Automaton({}, free=frozenset({0}))
    config = EngineConfig(**ROOMY)
    runner = cuda_runner_on_host(tiny_qwen3(), config)

    with Engine.from_runner(runner, config, PluginManager()) as engine:
        run(engine, [replace(request_of(1), grammar=mute)])

    assert runner.num_host_sampled_steps == 0


def test_logits_of_hand_made_plans_are_those_of_transformers() -> None:
    config = EngineConfig(**ROOMY)
    runner = cuda_runner_on_host(tiny_qwen3(), config)
    driver = Driver(runner)
    sequence = driver.add(prompt_of(7))

    driver.prefill(sequence, chunk=3)
    driver.decode([sequence], 4)

    with torch.no_grad():
        full = tiny_qwen3()(torch.tensor([sequence.tokens[:-1]])).logits[0]
    for position, logits in enumerate(sequence.logits, 6):
        torch.testing.assert_close(logits, full[position], rtol=1e-4, atol=1e-4)
    runner.close()


def test_nothing_is_written_outside_the_blocks_of_live_rows() -> None:
    config = EngineConfig(**ROOMY)
    runner = cuda_runner_on_host(tiny_qwen3(), config)
    cache = runner._kv_cache.tensor  # noqa: SLF001  # what the test is about
    cache.fill_(torch.nan)
    with Engine.from_runner(runner, config, PluginManager()) as engine:
        run(engine, [request_of(i, length=5 + i) for i in range(3)])

        written = (~cache.isnan()).all(-1).all(-1)[0, 0].sum()
        longest = sum(5 + i + 10 - 1 for i in range(3))
        assert written <= longest


def test_a_step_without_rows_gives_no_tokens() -> None:
    runner = cuda_runner_on_host(tiny_qwen3(), EngineConfig(**ROOMY))

    result = runner.launch(StepPlan(step_id=0, seqs=(), num_decode_seqs=0)).wait()

    assert result.token_ids.shape == (0,)
    assert result.token_ids.dtype == np.int64
    runner.close()


def test_a_closed_runner_refuses_steps() -> None:
    runner = cuda_runner_on_host(tiny_qwen3(), EngineConfig(**ROOMY))
    runner.close()
    runner.close()

    with pytest.raises(EngineClosed, match="closed"):
        runner.launch(StepPlan(step_id=0, seqs=(), num_decode_seqs=0))


def test_logits_without_a_token_fail_their_request_only() -> None:
    config = EngineConfig(**ROOMY)
    runner = cuda_runner_on_host(tiny_qwen3(), config)
    embedding = runner._source.weights.embedding  # noqa: SLF001  # no public way to break a row
    with Engine.from_runner(runner, config, PluginManager()) as engine:
        poisoned = VOCAB_SIZE - 1
        kept = embedding[poisoned].clone()
        try:
            embedding.data[poisoned] = torch.nan
            request = replace(request_of(0, temperature=1.0), prompt_token_ids=(8, 9, poisoned))
            engine.add_request(request)
            outputs = [o for _ in range(4) for o in engine.step()]
        finally:
            embedding.data[poisoned] = kept

        assert outputs[-1].finish_reason == "error"
        assert "no token can be drawn" in str(outputs[-1].error)


class Noted(PlainCalls):
    """Calls every function, and keeps the keys."""

    def __init__(self) -> None:
        self.keys: list[StepPart] = []

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Note and call."""
        assert isinstance(key, StepPart), "what the runner captures"
        self.keys.append(key)
        function()


def test_only_a_whole_prompt_that_is_alone_is_taken_for_one_long_prompt() -> None:
    config = EngineConfig(**{**ROOMY, "max_num_batched_tokens": 16})
    runner = cuda_runner_on_host(tiny_qwen3(), config)
    noted = Noted()
    runner._tools = replace(runner._tools, replays=noted)  # noqa: SLF001  # the only way in
    driver = Driver(runner)
    whole, begun, beside = (driver.add(prompt_of(n)) for n in (20, 16, 12))

    driver.step({whole: 16})
    driver.step({begun: 12})
    driver.step({begun: 4, beside: 12})  # fills a step and ends where one ends, too

    assert [key.is_special for key in noted.keys] == [True, False, False]
    runner.close()
