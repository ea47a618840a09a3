"""Ten schemas, random weights, budgets from the least on: every document is valid.

Three seeds of each run here. All hundred, as the report quotes them: DOCUMENT_SEEDS=100.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from transformers import AutoTokenizer

from nanoserve_adapters.grammar import JsonSchema, compile_grammar
from nanoserve_adapters.testing import tiny_model, tiny_tokenizer
from nanoserve_core import Engine, EngineConfig, Request, SamplingParams
from tests.adapters.grammar.schemas import MODELS, SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nanoserve_core.request import StepOutput

NUM_SEEDS = int(os.environ.get("DOCUMENT_SEEDS", "3"))
SLACKS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55)
"""Tokens beyond the least, one seed after the other."""


def refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def check(name: str, text: str) -> None:
    """Raises unless ``text`` is a document of the schema."""
    document = json.loads(text, parse_constant=refuse)
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(document)
    if name in MODELS:
        MODELS[name].model_validate_json(text)


@pytest.fixture(scope="module", params=["bytes", "pairs"])
def served(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Iterator[tuple[Engine, Any]]:
    """Random weights, over single bytes and over the tokens of the shipped checkpoint."""
    is_bytes = request.param == "bytes"
    tokenizer = tiny_tokenizer() if is_bytes else AutoTokenizer.from_pretrained(tiny_checkpoint)
    model = tiny_model(
        vocab_size=len(tokenizer),
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    config = EngineConfig(max_num_seqs=50, max_model_len=1024, num_kvcache_blocks=2000)
    with Engine(model, config) as engine:
        yield engine, tokenizer


def run(engine: Engine, requests: list[Request]) -> dict[str, list[StepOutput]]:
    for item in requests:
        engine.add_request(item)
    outputs: dict[str, list[StepOutput]] = {item.request_id: [] for item in requests}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id].append(output)
    return outputs


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_document_of_a_random_model_is_valid(served: tuple[Engine, Any], name: str) -> None:
    engine, tokenizer = served
    grammar = compile_grammar(tokenizer, JsonSchema(SCHEMAS[name]))
    least = grammar.min_tokens()
    budgets = [least + SLACKS[seed % len(SLACKS)] for seed in range(NUM_SEEDS)]
    requests = [
        Request(
            request_id=str(seed),
            prompt_token_ids=(1 + seed, 2),
            sampling=SamplingParams(temperature=1.0, seed=seed, max_tokens=budget),
            grammar=grammar,
        )
        for seed, budget in enumerate(budgets)
    ]

    outputs = run(engine, requests)

    print(f"{name}: least {least} tokens")  # noqa: T201  # quoted, with -s
    for news in outputs.values():
        assert news[-1].error is None
        tokens = [token for output in news for token in output.token_ids]
        check(name, tokenizer.decode(tokens, skip_special_tokens=True))
