"""Structured output from the core: a JSON schema becomes a grammar, and every answer is a document.

    python examples/structured.py

Runs on the shipped checkpoint, which has never seen this schema: what it writes is valid, not wise.
Needs the extra ``structured``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer

from nanoserve_adapters.grammar import Choice, JsonSchema, compile_grammar
from nanoserve_core import Engine, EngineConfig, InvalidRequest, Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanoserve_core.grammar import Grammar

CHECKPOINT = Path(__file__).parent / "tiny_qwen3"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colors": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colors"],
}


def request(
    name: str, prompt: str, grammar: Grammar, tokenizer: PreTrainedTokenizerBase, **sampling: Any
) -> Request:
    """One request that must follow ``grammar``."""
    return Request(
        request_id=name,
        prompt_token_ids=tuple(tokenizer.encode(prompt)),
        sampling=SamplingParams(**sampling),
        grammar=grammar,
    )


def main() -> None:
    """Two grammars in one batch, then a budget that no document fits."""
    parser = argparse.ArgumentParser(description="Structured output from the core.")
    parser.add_argument("--model", default=CHECKPOINT)
    model = parser.parse_args().model
    tokenizer = AutoTokenizer.from_pretrained(model)
    document = compile_grammar(tokenizer, JsonSchema(SCHEMA))
    answer = compile_grammar(tokenizer, Choice(("yes", "no")))
    least = document.min_tokens()

    with Engine(model, EngineConfig(max_num_seqs=8)) as engine:
        for budget in (least, least + 5, least + 20):
            name = f"max_tokens={budget}"
            engine.add_request(
                request(name, "A person: ", document, tokenizer, max_tokens=budget, seed=budget)
            )
        engine.add_request(request("choice", "Is it so? ", answer, tokenizer, max_tokens=8))
        texts: dict[str, str] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                text = tokenizer.decode(output.token_ids, skip_special_tokens=True)
                texts[output.request_id] = texts.get(output.request_id, "") + text
        for name, text in texts.items():
            print(f"{name}: {text if name == 'choice' else json.loads(text)}")
        try:
            engine.validate(request("short", "A person: ", document, tokenizer, max_tokens=5))
        except InvalidRequest as error:
            print("refused:", error)


if __name__ == "__main__":
    main()
