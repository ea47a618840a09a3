"""Grammars in the engine: what is allowed, endings, errors, what must stay as it was."""

from __future__ import annotations

import gc
import math
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from nanoserve_core import Engine, EngineConfig, SamplingParams, hookimpl
from nanoserve_core.errors import InvalidRequest, PluginError, RequestFailed, UnsupportedOption
from nanoserve_core.sample_grammar import SampleGrammar
from nanoserve_core.sampler import Sampler
from tests.nanoserve_core.automaton import (
    Automaton,
    RaisingMatcher,
    constrained,
    masked_greedy,
    set_bit,
)
from tests.tiny_qwen3_models import EOS, VOCAB_SIZE, greedy_tokens, prompt_of, tiny_qwen3

if TYPE_CHECKING:
    from nanoserve_core.config import ModelSpec
    from nanoserve_core.grammar import GrammarMatcher
    from nanoserve_core.request import Request, StepOutput

PROMPT = prompt_of(9)
PAIRS = Automaton({0: {20: 1, 21: 1, 90: 1}, 1: {30: 0, 31: 2, 40: 0}}, ends=frozenset({0}))
"""Pairs of (20, 21 or 90) and (30 or 40); after 31 there is nothing."""


def make_engine(*plugins: object, **options: Any) -> Engine:
    small = {"block_size": 4, "num_kvcache_blocks": 64, "max_model_len": 128, "max_num_seqs": 8}
    return Engine(tiny_qwen3(), EngineConfig(**{**small, "plugins": plugins, **options}))


def greedy(max_tokens: int = 8, **sampling: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **sampling)


def run(engine: Engine, *requests: Request) -> dict[str, list[StepOutput]]:
    for item in requests:
        engine.add_request(item)
    outputs: dict[str, list[StepOutput]] = {item.request_id: [] for item in requests}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id].append(output)
    engine.check()
    return outputs


def tokens_of(outputs: list[StepOutput], index: int = 0) -> tuple[int, ...]:
    return tuple(t for output in outputs if output.index == index for t in output.token_ids)


def only(*tokens: int) -> Automaton:
    """One of the tokens, then nothing."""
    return Automaton({0: dict.fromkeys(tokens, 1)})


def test_greedy_tokens_are_the_most_likely_allowed_ones() -> None:
    with make_engine() as engine:
        outputs = run(
            engine,
            constrained("a", PAIRS, greedy(), PROMPT),
            constrained("b", None, greedy(), PROMPT),
        )

    assert tokens_of(outputs["a"]) == masked_greedy(PAIRS, PROMPT, 8)
    assert tokens_of(outputs["b"]) == greedy_tokens("gqa", PROMPT, 8)


def test_every_sampled_token_is_allowed() -> None:
    grammar = Automaton({0: {3: 1, 200: 1}, 1: {5: 0, 255: 0}})
    sampling = SamplingParams(temperature=1.5, top_p=0.9, max_tokens=40, seed=1)

    with make_engine() as engine:
        tokens = tokens_of(run(engine, constrained("a", grammar, sampling))["a"])

    assert set(tokens[::2]) == {3, 200}
    assert set(tokens[1::2]) == {5, 255}


def test_a_finished_grammar_ends_the_sample_with_its_last_token() -> None:
    grammar = Automaton({0: {20: 1}, 1: {31: 2}})

    with make_engine() as engine:
        outputs = run(engine, constrained("a", grammar, greedy(min_tokens=8)))["a"]

    assert tokens_of(outputs) == (20, 31)
    assert outputs[-1].finish_reason == "stop"
    assert not outputs[-1].ends_with_stop_token


def test_end_of_sequence_is_allowed_only_where_the_output_may_end() -> None:
    grammar = Automaton({0: {20: 1}, 1: {30: 0}}, ends=frozenset({1}))
    biased = greedy(logit_bias={EOS: 100.0})

    with make_engine() as engine:
        outputs = run(engine, constrained("a", grammar, biased))["a"]

    assert tokens_of(outputs) == (20, EOS)
    assert outputs[-1].ends_with_stop_token


def test_ignore_eos_goes_on_while_the_grammar_can() -> None:
    grammar = Automaton({0: {20: 1}, 1: {30: 0}}, ends=frozenset({1}))
    biased = greedy(5, logit_bias={EOS: 100.0}, ignore_eos=True)

    with make_engine() as engine:
        outputs = run(engine, constrained("a", grammar, biased))["a"]

    assert tokens_of(outputs) == (20, 30, 20, 30, 20)
    assert outputs[-1].finish_reason == "length"


def test_ignore_eos_ends_where_nothing_else_is_allowed() -> None:
    class Late(Automaton):
        """Finds out late that nothing can follow: its last state offers only the end."""

        def matcher(self) -> GrammarMatcher:
            made = super().matcher()
            made.is_finished = lambda: False  # type: ignore[method-assign]  # for this test
            return made

    grammar = Late({0: {20: 1}}, ends=frozenset({1}))

    with make_engine() as engine:
        outputs = run(engine, constrained("a", grammar, greedy(ignore_eos=True)))["a"]

    assert tokens_of(outputs) == (20, EOS)
    assert outputs[-1].finish_reason == "stop"


def test_min_tokens_holds_the_end_back() -> None:
    grammar = Automaton({0: {20: 1}, 1: {30: 0}}, ends=frozenset({0}))
    biased = greedy(8, logit_bias={EOS: 100.0}, min_tokens=3)

    with make_engine() as engine:
        outputs = run(engine, constrained("a", grammar, biased))["a"]

    assert tokens_of(outputs) == (20, 30, 20, 30, EOS)


def test_a_grammar_wins_over_processors() -> None:
    def favour(_input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 21] += 50
        return scores.index_fill(1, torch.tensor([99]), 1e4)

    item = constrained("a", only(20, 21), greedy())

    with make_engine() as engine:
        outputs = run(engine, with_fields(item, logits_processors=(favour,)))["a"]

    assert tokens_of(outputs) == (21,)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_an_allowed_token_fails_and_says_why(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, max_tokens=4, bad_words_ids=[[20]], seed=0)

    with make_engine() as engine:
        outputs = run(
            engine,
            constrained("bad", only(20), sampling),
            constrained("good", only(21), sampling),
            constrained("free", None, greedy(), PROMPT),
        )

    assert isinstance(outputs["bad"][-1].error, RequestFailed)
    assert "grammar" in str(outputs["bad"][-1].error)
    assert tokens_of(outputs["bad"]) == ()
    assert tokens_of(outputs["good"]) == (21,)
    assert tokens_of(outputs["free"]) == greedy_tokens("gqa", PROMPT, 8)


@pytest.mark.parametrize("method", ["is_active", "fill_bitmask", "accept", "is_finished"])
@pytest.mark.parametrize("after", [0, 2])
def test_a_matcher_that_raises_fails_its_request_only(method: str, after: int) -> None:
    with make_engine() as engine:
        outputs = run(
            engine,
            constrained("bad", RaisingMatcher(method, after), greedy()),
            constrained("good", PAIRS, greedy(), PROMPT),
            constrained("free", None, greedy(), PROMPT),
        )

    assert "is broken" in str(outputs["bad"][-1].error)
    assert outputs["bad"][-1].finish_reason == "error"
    assert tokens_of(outputs["good"]) == masked_greedy(PAIRS, PROMPT, 8)
    assert tokens_of(outputs["free"]) == greedy_tokens("gqa", PROMPT, 8)


def test_an_empty_mask_fails_the_request_and_names_the_position() -> None:
    with make_engine() as engine:
        outputs = run(engine, constrained("a", RaisingMatcher("nothing", 2), greedy()))["a"]

    assert "allows no token at position 5" in str(outputs[-1].error)
    assert len(tokens_of(outputs)) == 2


def test_a_grammar_that_makes_no_matcher_refuses_the_request() -> None:
    with make_engine() as engine:
        with pytest.raises(PluginError, match="matcher is broken"):
            engine.add_request(constrained("a", RaisingMatcher("matcher"), greedy()))

        assert not engine.has_unfinished_requests()


def test_every_sample_has_its_own_matcher() -> None:
    grammar = Automaton({0: {20: 1, 21: 2, 22: 3}, 1: {30: 9}, 2: {31: 9}, 3: {32: 9}})
    sampling = SamplingParams(temperature=5.0, max_tokens=4, n=6, seed=3)

    with make_engine() as engine:
        outputs = run(engine, constrained("a", grammar, sampling))["a"]

    samples = [tokens_of(outputs, index) for index in range(6)]
    assert set(samples) <= {(20, 30), (21, 31), (22, 32)}
    assert len(set(samples)) > 1
    assert [tuple(matcher.accepted) for matcher in grammar.made] == samples


def test_an_inactive_matcher_fills_no_mask_and_sees_every_token() -> None:
    expected = greedy_tokens("gqa", PROMPT, 8)
    grammar = Automaton({}, free=frozenset({0}))

    with make_engine() as engine:
        outputs = run(engine, constrained("a", grammar, greedy(), PROMPT))["a"]

    assert tokens_of(outputs) == expected
    assert grammar.made[0].remaining == []
    assert tuple(grammar.made[0].accepted) == tuple(t for t in expected if t != EOS)


def test_a_trigger_switches_the_mask_on() -> None:
    free_tokens = greedy_tokens("gqa", PROMPT, 8)
    grammar = Automaton({0: {free_tokens[2]: 1}, 1: {20: 2}, 2: {21: 3}}, free=frozenset({0}))

    with make_engine() as engine:
        outputs = run(engine, constrained("a", grammar, greedy(), PROMPT))["a"]

    assert tokens_of(outputs) == (*free_tokens[:3], 20, 21)
    assert grammar.made[0].remaining == [5, 4]


@pytest.mark.parametrize(("max_tokens", "first"), [(6, 6), (None, 128 - len(PROMPT))])
def test_a_matcher_knows_how_many_tokens_remain(max_tokens: int | None, first: int) -> None:
    grammar = Automaton({0: {20: 1}, 1: {21: 2}, 2: {22: 3}})
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)

    with make_engine() as engine:
        run(engine, constrained("a", grammar, sampling, PROMPT))

    assert grammar.made[0].remaining == [first, first - 1, first - 2]


def test_preemption_keeps_the_state() -> None:
    grammar = Automaton({0: {20: 1, 90: 1}, 1: {30: 0, 40: 0}})
    items = [constrained(str(n), grammar, greedy(20), prompt_of(9, seed=n)) for n in range(4)]

    with make_engine(num_kvcache_blocks=14, enable_prefix_caching=False) as engine:
        outputs = run(engine, *items)
        num_preemptions = engine.stats().preemptions

    assert num_preemptions > 0
    assert len(grammar.made) == 4
    for item in items:
        expected = masked_greedy(grammar, item.prompt_token_ids, 20)
        assert tokens_of(outputs[item.request_id]) == expected


def test_scores_and_processed_logprobs_are_masked_and_raw_ones_are_not() -> None:
    processed = greedy(logprobs=4, logprobs_mode="processed_logprobs")
    raw = greedy(logprobs=4)
    plain = greedy(1, logprobs=VOCAB_SIZE)

    with make_engine() as engine:
        outputs = run(
            engine,
            with_fields(constrained("p", only(20, 21), processed), output_scores=True),
            constrained("r", only(20, 21), raw),
            constrained("plain", None, plain),
        )

    (token,) = tokens_of(outputs["p"])
    assert set(outputs["p"][0].scores[0].isfinite().nonzero().flatten().tolist()) == {20, 21}
    chances = {t: math.exp(p.logprob) for t, p in outputs["p"][0].logprobs[0].items()}
    assert chances[20] + chances[21] == pytest.approx(1)
    everything = outputs["plain"][0].logprobs[0]
    assert outputs["r"][0].logprobs[0][token] == everything[token]


def test_a_budget_below_the_shortest_output_is_refused_with_both_numbers() -> None:
    grammar = Automaton({0: {20: 1}}, shortest=9)

    with make_engine() as engine:
        with pytest.raises(InvalidRequest, match=r"takes 9 tokens, but it may generate 8"):
            engine.add_request(constrained("a", grammar, greedy(8)))
        with pytest.raises(InvalidRequest, match=r"takes 9 tokens, but it may generate 5"):
            engine.validate(constrained("a", grammar, greedy(None), prompt_of(123)))

        outputs = run(engine, constrained("a", grammar, greedy(9)))["a"]

    assert tokens_of(outputs) == (20,)


def test_state_is_dropped_at_the_end() -> None:
    grammar = Automaton({0: {20: 0}})

    with make_engine() as engine:
        run(engine, constrained("a", grammar, greedy(2)))
        matcher = weakref.ref(grammar.made.pop())
        run(engine, constrained("b", None, greedy(2)))
        gc.collect()

        assert matcher() is None


def test_hook_grammar() -> None:
    class Plugin:
        @hookimpl
        def nanoserve_grammar(self, request: Request, spec: ModelSpec) -> object:
            assert spec.vocab_size == VOCAB_SIZE
            return only(int(request.grammar)) if request.grammar != "unknown" else None

    with make_engine(Plugin()) as engine:
        outputs = run(engine, constrained("a", "33", greedy()))["a"]
        with pytest.raises(InvalidRequest, match="'unknown' is no Grammar"):
            engine.add_request(constrained("b", "unknown", greedy()))
        with pytest.raises(PluginError, match="invalid literal"):
            engine.add_request(constrained("b", "x", greedy()))

    assert tokens_of(outputs) == (33,)


def test_a_plugins_sampler_and_a_grammar_are_refused_together() -> None:
    class Plugin:
        @hookimpl
        def nanoserve_sampler(self) -> object:
            return Sampler()

    with (
        make_engine(Plugin()) as engine,
        pytest.raises(UnsupportedOption, match="a plugin's sampler would not see"),
    ):
        engine.add_request(constrained("a", PAIRS, greedy()))


def test_all_end_of_sequence_ids_are_allowed_where_one_is() -> None:
    eos_token_ids = (3, 63, 95)
    grammar = SampleGrammar(
        Automaton({0: {20: 1}}, ends=frozenset({1}), eos_token_id=63).matcher(),
        max_total_tokens=10,
        eos_token_ids=eos_token_ids,
        ignore_eos=False,
    )
    inside, at_end = np.zeros((2, 3), dtype=np.int32)

    grammar.fill(inside, 4)
    grammar.accept(20)
    grammar.fill(at_end, 5)

    assert bits_of(inside) == {20}
    assert bits_of(at_end) == set(eos_token_ids)


def bits_of(row: np.ndarray[Any, np.dtype[np.int32]]) -> set[int]:
    return {t for t in range(32 * len(row)) if row.view(np.uint32)[t // 32] >> t % 32 & 1}


def test_bits_of_every_word_are_read() -> None:
    row = np.zeros(3, dtype=np.int32)

    for token in (0, 31, 63, 64):
        set_bit(row, token)

    assert bits_of(row) == {0, 31, 63, 64}


def with_fields(item: Request, **fields: Any) -> Request:
    from dataclasses import replace

    return replace(item, **fields)
