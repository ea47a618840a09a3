"""What is made ready beforehand changes nothing for those that run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nanoserve_core import LLM
from nanoserve_core.cuda_graphs import buckets_for
from nanoserve_core.errors import ConfigError, EngineClosed
from nanoserve_core.prompt_inputs import PromptShape
from nanoserve_core.step_parts import StepPart, Then, first_parts, usual_parts
from tests.nanoserve_core.test_cuda_runner import make_cpu_engine, make_engine, request_of, run
from tests.parity.test_engine_parity import assert_drained

if TYPE_CHECKING:
    from pathlib import Path

    from nanoserve_core import Engine

SAMPLED = {"temperature": 0.9, "top_k": 20, "ignore_eos": True}


def run_with_warmups(engine: Engine, steps: range) -> dict[str, tuple[int, ...]]:
    """Four requests, and a warmup before some steps."""
    tokens: dict[str, tuple[int, ...]] = {str(n): () for n in range(4)}
    for number in range(4):
        engine.add_request(request_of(number, length=5 + number, seed=number, **SAMPLED))
    step = 0
    while engine.has_unfinished_requests():
        if step in steps:
            assert engine.warmup(max_prompt_tokens=64) > 0
        for output in engine.step():
            tokens[output.request_id] += tuple(output.token_ids)
        step += 1
    return tokens


def test_a_warmup_between_steps_changes_no_token() -> None:
    with make_engine() as engine:
        expected = run_with_warmups(engine, range(0))

    with make_engine() as engine:
        tokens = run_with_warmups(engine, range(1, 9, 2))

        assert tokens == expected
        assert [len(ids) for ids in tokens.values()] == [10] * 4
        assert_drained(engine)


def test_a_warmup_of_an_idle_engine_leaves_it_as_it_was() -> None:
    with make_engine() as engine:
        engine.warmup()
        before = engine.stats()

        num_ready = engine.warmup()

        assert num_ready > 0
        assert engine.stats() == before
        assert run(engine, [request_of(0)])["0"]


def test_a_cpu_engine_has_nothing_to_warm_up(tiny_checkpoint: Path) -> None:
    with make_cpu_engine() as engine:
        assert engine.warmup() == 0
    with LLM(tiny_checkpoint, max_model_len=64) as llm:
        assert llm.warmup(max_num_seqs=4) == 0


def test_a_warmup_of_no_rows_is_refused() -> None:
    with make_cpu_engine() as engine, pytest.raises(ConfigError, match="max_num_seqs=0"):
        engine.warmup(max_num_seqs=0)


def test_a_closed_engine_is_not_warmed_up() -> None:
    engine = make_cpu_engine()
    engine.close()

    with pytest.raises(EngineClosed):
        engine.warmup()


def test_every_step_up_to_the_limits_finds_its_part_ready() -> None:
    shapes = [PromptShape(16, 1), PromptShape(16, 8), PromptShape(32, 8)]

    parts = usual_parts(buckets_for(6), shapes, max_num_rows=3, can_share=True)

    rows = [part for part in parts if isinstance(part.size, int)]
    assert len(parts) == len(set(parts))
    assert {part.then for part in parts} == {Then.SAMPLE, Then.FILTER}
    assert {part.size for part in rows} == {1, 2, 4}, "three rows run as four"
    assert StepPart(4, True, Then.SAMPLE) in parts
    assert StepPart(1, True, Then.SAMPLE) not in parts, "a single row shares with nobody"
    assert {part.size for part in parts if part not in rows} == set(shapes)


@pytest.mark.parametrize("most", [8, 100, 16384])
def test_a_first_token_needs_one_row_and_a_short_and_a_longer_prompt(most: int) -> None:
    sizes = [n for n in (8, 32, 128, 512) if n < most] + [most]
    shapes = [PromptShape(n, rows) for n in sizes for rows in (1, 8) if rows <= n]

    found = {part.size for part in first_parts(shapes)}

    longest = max(n for n in sizes if n == sizes[0] or n <= 128)
    assert found == {1, PromptShape(sizes[0], 1), PromptShape(longest, 1)}
