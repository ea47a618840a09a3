"""`Engine` end to end on small random models: life of a request, endings, isolation, counters."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nanoserve_core import Engine, EngineConfig, FinishReason, Request, SamplingParams, hookimpl
from nanoserve_core.errors import (
    ConfigError,
    EngineClosed,
    InvalidRequest,
    RequestTooLong,
    UnsupportedOption,
)
from tests.tiny_qwen3_models import EOS, VOCAB_SIZE, greedy_tokens, prompt_of, tiny_qwen3

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanoserve_core.request import StepOutput

SMALL: dict[str, Any] = {
    "block_size": 4,
    "num_kvcache_blocks": 64,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}


def make_engine(**options: Any) -> Engine:
    return Engine(tiny_qwen3(), EngineConfig(**{**SMALL, **options}))


@pytest.fixture
def engine() -> Iterator[Engine]:
    with make_engine() as engine:
        yield engine
        assert_nothing_left(engine)


def assert_nothing_left(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_blocks == stats.num_blocks
    engine.check()


def request(request_id: str, prompt: tuple[int, ...], **sampling: Any) -> Request:
    options = {"temperature": 0.0, "max_tokens": 8, **sampling}
    return Request(
        request_id=request_id, prompt_token_ids=prompt, sampling=SamplingParams(**options)
    )


def run(engine: Engine, *requests: Request) -> dict[str, list[StepOutput]]:
    """Serve the requests to the end; all outputs by request id."""
    for item in requests:
        engine.add_request(item)
    outputs: dict[str, list[StepOutput]] = {item.request_id: [] for item in requests}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id].append(output)
    return outputs


def tokens_of(outputs: list[StepOutput], index: int = 0) -> tuple[int, ...]:
    return tuple(t for output in outputs if output.index == index for t in output.token_ids)


def test_greedy_tokens_equal_transformers(engine: Engine) -> None:
    prompt = prompt_of(13)

    outputs = run(engine, request("a", prompt, max_tokens=20))["a"]

    assert tokens_of(outputs) == greedy_tokens("gqa", prompt, 20)


def test_end_of_sequence_stops_and_is_the_last_token(engine: Engine) -> None:
    prompt = next(p for p in map(prompt_of, range(3, 40)) if greedy_tokens("gqa", p, 60)[-1] == EOS)
    expected = greedy_tokens("gqa", prompt, 60)

    outputs = run(engine, request("a", prompt, max_tokens=60))["a"]

    assert tokens_of(outputs) == expected
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].ends_with_stop_token
    assert outputs[-1].stop_reason is None


def test_ignore_eos_runs_to_max_tokens(engine: Engine) -> None:
    prompt = prompt_of(9)

    outputs = run(engine, request("a", prompt, max_tokens=60, ignore_eos=True))["a"]

    assert tokens_of(outputs) == greedy_tokens("gqa", prompt, 60, ignore_eos=True)
    assert outputs[-1].finish_reason == "length"


def test_a_stop_token_id_names_itself_as_the_reason(engine: Engine) -> None:
    prompt = prompt_of(9)
    expected = greedy_tokens("gqa", prompt, 8, ignore_eos=True)
    stop = expected[3]

    outputs = run(engine, request("a", prompt, stop_token_ids=[stop], ignore_eos=True))["a"]

    assert tokens_of(outputs) == expected[: expected.index(stop) + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)


def test_every_request_of_a_batch_equals_its_solo_run(engine: Engine) -> None:
    prompts = {f"r{n}": prompt_of(3 + 5 * n, seed=n) for n in range(6)}

    outputs = run(engine, *(request(name, p, max_tokens=10) for name, p in prompts.items()))

    for name, prompt in prompts.items():
        assert tokens_of(outputs[name]) == greedy_tokens("gqa", prompt, 10)


def test_each_request_has_exactly_one_end(engine: Engine) -> None:
    outputs = run(engine, *(request(f"r{n}", prompt_of(4 + n), n=2) for n in range(4)))

    for news in outputs.values():
        assert [o.request_finished for o in news].count(True) == 1
        assert news[-1].request_finished
        assert sorted(o.index for o in news if o.finish_reason is not None) == [0, 1]


def test_the_same_whole_block_prompt_computes_one_token_the_second_time(engine: Engine) -> None:
    prompt = prompt_of(8)
    first = run(engine, request("a", prompt, max_tokens=1))["a"]
    computed = engine.stats().prompt_tokens_computed

    second = run(engine, request("b", prompt, max_tokens=1))["b"]

    assert tokens_of(first) == tokens_of(second) == greedy_tokens("gqa", prompt, 1)
    assert engine.stats().prompt_tokens_computed - computed == 1
    metrics = second[-1].metrics
    assert metrics is not None
    assert metrics.num_cached_tokens == 7


def test_each_request_is_told_the_largest_batch_it_ran_in(engine: Engine) -> None:
    alone = run(engine, request("alone", prompt_of(5)))["alone"]
    together = run(
        engine, *(request(f"r{n}", prompt_of(4 + n), max_tokens=4 * (n + 1)) for n in range(3))
    )
    afterwards = run(engine, request("after", prompt_of(6)))["after"]

    peaks = [o.metrics.peak_batch for news in together.values() for o in news if o.metrics]
    assert peaks == [3, 3, 3]
    for news in (alone, afterwards):
        assert [o.metrics.peak_batch for o in news if o.metrics] == [1]


def test_a_prefix_hit_gives_the_tokens_of_an_uncached_run(engine: Engine) -> None:
    prefix = prompt_of(21)
    run(engine, request("first", prefix + prompt_of(5, seed=1)))

    prompt = prefix + prompt_of(9, seed=2)
    outputs = run(engine, request("second", prompt, max_tokens=12))["second"]

    assert tokens_of(outputs) == greedy_tokens("gqa", prompt, 12)
    assert engine.stats().prompt_tokens_cached == 20


def test_generated_blocks_are_hit_by_the_next_turn(engine: Engine) -> None:
    prompt = prompt_of(10)
    answer = tokens_of(run(engine, request("turn1", prompt, ignore_eos=True))["turn1"])
    before = engine.stats().prompt_tokens_cached

    run(engine, request("turn2", (*prompt, *answer, 5)))

    assert engine.stats().prompt_tokens_cached - before == 16  # 17 tokens have K/V: 4 whole blocks


def test_salts_keep_cached_prefixes_apart(engine: Engine) -> None:
    prompt = prompt_of(16)
    sampling = SamplingParams(temperature=0, max_tokens=1)
    for salt in ("a", "b", None):
        run(
            engine,
            Request(
                request_id=f"r{salt}", prompt_token_ids=prompt, sampling=sampling, cache_salt=salt
            ),
        )

    assert engine.stats().prompt_tokens_cached == 0


def test_several_samples_compute_the_prompt_once(engine: Engine) -> None:
    prompt = prompt_of(14)

    outputs = run(engine, request("a", prompt, n=4, temperature=0.9, seed=3, max_tokens=6))["a"]

    stats = engine.stats()
    assert stats.prompt_tokens_computed == 14 + 3  # the siblings compute the last prompt token
    assert stats.prompt_tokens_cached == 3 * 13
    assert len({tokens_of(outputs, index) for index in range(4)}) > 1


def test_greedy_samples_of_one_request_are_the_same(engine: Engine) -> None:
    prompt = prompt_of(14)

    outputs = run(engine, request("a", prompt, n=3))["a"]

    expected = greedy_tokens("gqa", prompt, 8)
    assert [tokens_of(outputs, index) for index in range(3)] == [expected] * 3


def test_an_aborted_request_gets_no_token_after_the_call(engine: Engine) -> None:
    engine.add_request(request("a", prompt_of(30), max_tokens=50))
    engine.add_request(request("b", prompt_of(6), max_tokens=10))
    engine.step()
    engine.step()

    engine.abort("a")
    engine.abort("a")
    engine.abort("nobody")
    outputs: list[StepOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()

    ends = [o for o in outputs if o.request_id == "a"]
    assert [(o.token_ids, o.finish_reason, o.request_finished) for o in ends] == [
        ((), FinishReason.ABORT, True)
    ]


def test_a_waiting_request_can_be_aborted(engine: Engine) -> None:
    engine.add_request(request("a", prompt_of(30)))
    engine.abort("a")

    outputs = engine.step()

    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", "abort")]


def test_max_tokens_zero_ends_at_once_with_length(engine: Engine) -> None:
    outputs = run(engine, request("a", prompt_of(5), max_tokens=0, n=2))["a"]

    assert [(o.index, o.token_ids, o.finish_reason) for o in outputs] == [
        (0, (), "length"),
        (1, (), "length"),
    ]
    assert engine.stats().steps == 0


def test_max_tokens_none_runs_to_the_end_of_the_context() -> None:
    with make_engine(max_model_len=24) as engine:
        outputs = run(engine, request("a", prompt_of(20), max_tokens=None, ignore_eos=True))["a"]

        assert len(tokens_of(outputs)) == 4
        assert outputs[-1].finish_reason == "length"
        assert_nothing_left(engine)


def test_a_request_too_large_is_refused_and_others_go_on() -> None:
    with make_engine(num_kvcache_blocks=4) as engine:
        with pytest.raises(RequestTooLong, match=r"need 10 KV blocks.*has 4"):
            engine.add_request(request("big", prompt_of(40)))

        outputs = run(engine, request("small", (1, 2, 3), max_tokens=2))["small"]

        assert len(tokens_of(outputs)) == 2
        assert_nothing_left(engine)


@pytest.mark.parametrize("prompt", [(), (VOCAB_SIZE,), (-1,)])
def test_bad_prompts_are_refused_and_running_requests_unharmed(
    engine: Engine, prompt: tuple[int, ...]
) -> None:
    good = prompt_of(11)
    engine.add_request(request("good", good))
    engine.step()

    with pytest.raises(InvalidRequest):
        engine.add_request(request("bad", prompt))
    outputs = [o for _ in range(20) if engine.has_unfinished_requests() for o in engine.step()]

    assert len(outputs) >= 7
    assert {o.request_id for o in outputs} == {"good"}


def test_two_requests_cannot_share_an_id(engine: Engine) -> None:
    engine.add_request(request("a", (1, 2)))

    with pytest.raises(InvalidRequest, match="'a' is in use"):
        engine.add_request(request("a", (1, 2)))

    while engine.has_unfinished_requests():
        engine.step()


def test_a_raising_stop_check_fails_its_request_only(engine: Engine) -> None:
    def broken(_index: int, token_ids: list[int]) -> bool:
        if len(token_ids) == 3:
            raise LookupError("no such word")
        return False

    sampling = SamplingParams(temperature=0, max_tokens=10, n=2)
    bad = Request(
        request_id="bad", prompt_token_ids=(1, 2, 3), sampling=sampling, should_stop=broken
    )
    good_prompt = prompt_of(9)

    outputs = run(engine, bad, request("good", good_prompt))

    assert {o.finish_reason for o in outputs["bad"] if o.finish_reason} == {FinishReason.ERROR}
    assert isinstance(outputs["bad"][-1].error, LookupError)
    assert tokens_of(outputs["good"]) == greedy_tokens("gqa", good_prompt, 8)


def test_a_raising_logits_processor_fails_its_request_only(engine: Engine) -> None:
    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 5:
            raise LookupError("no such token")
        return scores

    sampling = SamplingParams(temperature=0, max_tokens=10)
    bad = Request(
        request_id="bad", prompt_token_ids=(1, 2, 3), sampling=sampling, logits_processors=(broken,)
    )
    good_prompt = prompt_of(9)

    outputs = run(engine, bad, request("good", good_prompt))

    assert outputs["bad"][-1].finish_reason == "error"
    assert len(tokens_of(outputs["bad"])) == 2
    assert tokens_of(outputs["good"]) == greedy_tokens("gqa", good_prompt, 8)


def test_should_stop_ends_with_the_newest_token(engine: Engine) -> None:
    prompt = prompt_of(9)
    sampling = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    stops = Request(
        request_id="a",
        prompt_token_ids=prompt,
        sampling=sampling,
        should_stop=lambda _, token_ids: len(token_ids) == 4,
    )

    outputs = run(engine, stops)["a"]

    assert tokens_of(outputs) == greedy_tokens("gqa", prompt, 4, ignore_eos=True)
    assert (outputs[-1].finish_reason, outputs[-1].ends_with_stop_token) == ("stop", False)


def test_running_requests_never_exceed_max_num_seqs_and_finish_in_order() -> None:
    with make_engine(max_num_seqs=2) as engine:
        for n in range(6):
            engine.add_request(
                request(f"r{n}", prompt_of(9, seed=n), max_tokens=20, ignore_eos=True)
            )
        finished = []
        while engine.has_unfinished_requests():
            finished += [o.request_id for o in engine.step() if o.request_finished]
            assert engine.stats().running <= 2

        assert finished == [f"r{n}" for n in range(6)]
        assert_nothing_left(engine)


@pytest.mark.parametrize("num_blocks", range(9, 40, 3))
def test_preemption_never_changes_tokens(num_blocks: int) -> None:
    prompts = [prompt_of(8 + n, seed=n) for n in range(5)]
    with make_engine(num_kvcache_blocks=num_blocks) as engine:
        outputs = run(
            engine,
            *(request(f"r{n}", p, max_tokens=20, ignore_eos=True) for n, p in enumerate(prompts)),
        )

        for n, prompt in enumerate(prompts):
            assert tokens_of(outputs[f"r{n}"]) == greedy_tokens("gqa", prompt, 20, ignore_eos=True)
        assert_nothing_left(engine)


def test_a_small_pool_does_preempt() -> None:
    with make_engine(num_kvcache_blocks=10, watermark=0.0) as engine:
        run(
            engine,
            *(
                request(f"r{n}", prompt_of(6, seed=n), max_tokens=24, ignore_eos=True)
                for n in range(4)
            ),
        )

        assert engine.stats().preemptions > 0
        assert_nothing_left(engine)


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 13])
def test_chunked_prefill_never_changes_tokens(budget: int) -> None:
    prompts = [prompt_of(7 * n + 3, seed=n) for n in range(4)]
    with make_engine(max_num_batched_tokens=budget) as engine:
        outputs = run(engine, *(request(f"r{n}", p) for n, p in enumerate(prompts)))

        for n, prompt in enumerate(prompts):
            assert tokens_of(outputs[f"r{n}"]) == greedy_tokens("gqa", prompt, 8)


def test_running_streams_get_a_token_every_step_while_a_long_prompt_prefills() -> None:
    with make_engine(max_num_batched_tokens=8) as engine:
        engine.add_request(request("stream", prompt_of(5), max_tokens=30, ignore_eos=True))
        engine.step()
        engine.add_request(request("long", prompt_of(100), max_tokens=1))
        gaps = [sum(o.request_id == "stream" for o in engine.step()) for _ in range(14)]

        assert gaps == [1] * 14
        while engine.has_unfinished_requests():
            engine.step()


def test_seeded_sampling_does_not_depend_on_neighbours_or_order(engine: Engine) -> None:
    def sampled(name: str, **options: Any) -> Request:
        return request(name, prompt_of(7), temperature=1.0, max_tokens=12, **options)

    alone = tokens_of(run(engine, sampled("a", seed=42))["a"])
    beside = tokens_of(run(engine, sampled("b"), sampled("a", seed=42))["a"])
    crowd = [sampled(f"c{n}", seed=n) for n in range(7)]
    crowded = tokens_of(run(engine, *crowd[:4], sampled("a", seed=42), *crowd[4:])["a"])

    assert alone == beside == crowded


def test_logprobs_are_those_of_the_models_own_logits(engine: Engine) -> None:
    prompt = prompt_of(9)

    outputs = run(engine, request("a", prompt, logprobs=3, max_tokens=4, temperature=0.5, seed=1))[
        "a"
    ]

    tokens = tokens_of(outputs)
    with torch.no_grad():
        logits = tiny_qwen3()(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits.double(), dim=-1)
    rows = [row for output in outputs for row in output.logprobs or ()]
    assert len(rows) == 4
    for position, row in enumerate(rows):
        best = expected[position].topk(3).indices.tolist()
        assert set(row) == {tokens[position], *best}
        for token_id, entry in row.items():
            assert math.isclose(entry.logprob, expected[position, token_id].item(), abs_tol=1e-4)
            assert entry.rank == 1 + int((expected[position] > expected[position, token_id]).sum())


@pytest.mark.parametrize("budget", [4, 64])
def test_prompt_logprobs_are_those_of_the_models_own_logits(budget: int) -> None:
    prompt = prompt_of(11)
    with make_engine(max_num_batched_tokens=budget) as engine:
        run(engine, request("cached", prompt))
        outputs = run(engine, request("a", prompt, prompt_logprobs=1, max_tokens=1))["a"]

    with torch.no_grad():
        expected = torch.log_softmax(
            tiny_qwen3()(torch.tensor([prompt])).logits[0].double(), dim=-1
        )
    given = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
    assert len(given) == 1
    assert len(given[0]) == 11
    assert given[0][0] is None
    for position, row in enumerate(given[0][1:], start=1):
        assert row is not None
        own = row[prompt[position]].logprob
        assert math.isclose(own, expected[position - 1, prompt[position]].item(), abs_tol=1e-4)


def test_prompt_logprobs_without_any_new_token(engine: Engine) -> None:
    outputs = run(engine, request("a", prompt_of(6), max_tokens=0, prompt_logprobs=0))["a"]

    assert tokens_of(outputs) == ()
    assert outputs[-1].finish_reason == "length"
    assert outputs[-1].prompt_logprobs is not None


def test_changed_weights_are_noticed_and_the_prefix_cache_dropped() -> None:
    model = copy.deepcopy(tiny_qwen3())
    prompt = prompt_of(16)
    with Engine(model, EngineConfig(**SMALL)) as engine:
        run(engine, request("before", prompt))
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
        after = tokens_of(run(engine, request("after", prompt))["after"])
        cached = engine.stats().prompt_tokens_cached

    ids = torch.tensor([prompt])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    assert after == tuple(expected[0, 16:].tolist())
    assert cached == 0


def test_weights_changed_drops_the_prefix_cache(engine: Engine) -> None:
    prompt = prompt_of(16)
    run(engine, request("before", prompt))

    engine.weights_changed()
    run(engine, request("after", prompt))

    assert engine.stats().prompt_tokens_cached == 0
    assert engine.stats().weights_epoch == 1


def test_a_closed_engine_says_so() -> None:
    engine = make_engine()
    engine.close()
    engine.close()

    with pytest.raises(EngineClosed):
        engine.add_request(request("a", (1,)))


def test_tensor_parallelism_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=2"):
        make_engine(tensor_parallel_size=2)


def test_two_engines_in_one_process_do_not_see_each_other() -> None:
    with make_engine() as one, Engine(tiny_qwen3("tied"), EngineConfig(**SMALL)) as other:
        prompt = prompt_of(12)
        one.add_request(request("a", prompt))
        other.add_request(request("a", prompt))
        news: list[StepOutput] = []
        others: list[StepOutput] = []
        while one.has_unfinished_requests() or other.has_unfinished_requests():
            news += one.step() if one.has_unfinished_requests() else []
            others += other.step() if other.has_unfinished_requests() else []

        assert tokens_of(news) == greedy_tokens("gqa", prompt, 8)
        assert tokens_of(others) == greedy_tokens("tied", prompt, 8)


def test_weights_that_can_no_longer_be_served_fail_the_requests_and_not_the_engine() -> None:
    model = copy.deepcopy(tiny_qwen3())
    prompt = prompt_of(9)
    with Engine(model, EngineConfig(**SMALL)) as engine:
        run(engine, request("before", prompt))
        linear = model.model.layers[0].mlp.down_proj
        model.model.layers[0].mlp.down_proj = torch.nn.Sequential(linear)
        refused = run(engine, request("refused", prompt))["refused"]
        model.model.layers[0].mlp.down_proj = linear
        after = tokens_of(run(engine, request("after", prompt))["after"])

    assert refused[-1].finish_reason == "error"
    assert isinstance(refused[-1].error, UnsupportedOption)
    assert after == greedy_tokens("gqa", prompt, 8)


class Ends:
    """A plugin that keeps how requests ended."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    @hookimpl
    def nanoserve_request_finished(self, request: Request, finish_reason: FinishReason) -> None:
        self.reasons[request.request_id] = str(finish_reason)


def test_closing_ends_unfinished_requests_once() -> None:
    ends = Ends()
    engine = make_engine(plugins=[ends])
    engine.add_request(request("running", prompt_of(9), max_tokens=50))
    engine.step()
    engine.add_request(request("waiting", prompt_of(9)))

    engine.close()

    assert ends.reasons == {"running": "abort", "waiting": "abort"}
