"""Drawn schedules with drawn automata: a constrained row gives its solo tokens however far the
engine runs ahead, and its neighbours give theirs as if it were not there.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve_adapters.testing import DelayedRunner
from nanoserve_core import Engine, EngineConfig, SamplingParams
from nanoserve_core.model_runner import ModelRunner
from nanoserve_core.plugins import PluginManager
from tests.nanoserve_core.automaton import Automaton, constrained, masked_greedy
from tests.tiny_qwen3_models import EOS, VOCAB_SIZE, greedy_tokens, prompt_of, tiny_qwen3

MAX_LEN = 64
PREFIX = prompt_of(8, seed=91)
TOKENS = st.integers(8, VOCAB_SIZE - 1)
STATES = st.integers(0, 3)

automata = st.builds(
    Automaton,
    moves=st.fixed_dictionaries(
        {0: st.dictionaries(TOKENS, STATES, min_size=1, max_size=40)},
        optional={
            state: st.dictionaries(TOKENS, STATES, min_size=1, max_size=9) for state in (1, 2, 3)
        },
    ),
    ends=st.frozensets(STATES),
    free=st.just(frozenset[int]()) | st.frozensets(STATES, max_size=2),
)
arrivals = st.tuples(
    st.none() | automata,
    st.integers(1, 9),  # length of its own prompt
    st.booleans(),  # after the common prefix
    st.integers(1, 14),  # max_tokens
    st.integers(0, 6),  # step of arrival
)


def make_engine(options: dict[str, int], run_ahead: int) -> Engine:
    config = EngineConfig(max_model_len=MAX_LEN, **options)
    plugins = PluginManager()
    runner: Any = ModelRunner.create(tiny_qwen3(), config, plugins)
    delayed = DelayedRunner(runner, run_ahead) if run_ahead else runner
    return Engine.from_runner(delayed, config, plugins)


@settings(max_examples=50)
@given(
    schedule=st.lists(arrivals, min_size=1, max_size=5),
    run_ahead=st.integers(0, 2),
    options=st.fixed_dictionaries(
        {
            "block_size": st.sampled_from([1, 4, 16]),
            "num_kvcache_blocks": st.sampled_from([64, 100]),
            "max_num_seqs": st.integers(1, 5),
            "max_num_batched_tokens": st.integers(1, 30),
        }
    ),
)
def test_constrained_rows_and_their_neighbours_give_solo_tokens(
    schedule: list[tuple[Automaton | None, int, bool, int, int]],
    run_ahead: int,
    options: dict[str, int],
) -> None:
    prompts = [
        (*(PREFIX if is_after else ()), *prompt_of(length, seed=number))
        for number, (_, length, is_after, _, _) in enumerate(schedule)
    ]
    outputs: list[Any] = []
    with make_engine(options, run_ahead) as engine:
        step = 0
        while step <= 6 or engine.has_unfinished_requests():
            for number, (grammar, _, _, max_tokens, arrival) in enumerate(schedule):
                if arrival == step:
                    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
                    engine.add_request(constrained(str(number), grammar, sampling, prompts[number]))
            outputs += engine.step()
            step += 1
            assert step < 2000, "the engine makes no progress"
        engine.check()

    for number, (grammar, _, _, max_tokens, _) in enumerate(schedule):
        own = [output for output in outputs if output.request_id == str(number)]
        tokens = tuple(token for output in own for token in output.token_ids)
        if grammar is None:
            assert tokens == greedy_tokens("gqa", prompts[number], max_tokens)
        else:
            assert tokens == masked_greedy(grammar, prompts[number], max_tokens)
            ends_early = len(tokens) < max_tokens or tokens[-1] == EOS
            assert own[-1].finish_reason == "stop" or not ends_early
