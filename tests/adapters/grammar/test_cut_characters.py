"""Characters of several tokens under a limit that is near: all may be written, none is left cut."""

from __future__ import annotations

import json
from random import Random

import numpy as np
import pytest

from nanoserve_adapters.grammar import ToolCalls, compile_grammar
from nanoserve_adapters.testing import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TOOL = {
    "name": "write",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    },
}
HEAD = '<tool_call>\n{"name": "write", "arguments": {"text": "'
TAIL = '"}}\n</tool_call>'
VOCAB_SIZE = 263


def allowed(matcher: object, remaining: int) -> list[int]:
    """The tokens that may come next."""
    row = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    matcher.fill_bitmask(row, remaining)  # type: ignore[attr-defined]  # a GrammarMatcher
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return [int(token) for token in np.flatnonzero(bits)]


@pytest.mark.parametrize("text", ["Zürich", "ÿ÷þ", "日本語で", "🙂🦊", "aé🙂b"])
def test_every_character_may_be_written_where_it_fits(text: str) -> None:
    matcher = compile_grammar(TOKENIZER, ToolCalls((TOOL,))).matcher()
    token_ids = TOKENIZER.encode(HEAD + text + TAIL, add_special_tokens=False)
    remaining = len(token_ids) + 12

    for token_id in token_ids:
        assert token_id in allowed(matcher, remaining), text
        matcher.accept(token_id)
        remaining -= 1


@pytest.mark.parametrize("seed", range(12))
def test_no_character_is_left_cut_at_the_limit(seed: int) -> None:
    matcher, rng = compile_grammar(TOKENIZER, ToolCalls((TOOL,))).matcher(), Random(seed)
    said: list[int] = []
    limit = len(HEAD) + len(TAIL) - 20 + rng.randint(0, 40)

    while not matcher.is_finished() and len(said) < limit:
        tokens = allowed(matcher, limit - len(said))
        cut = [token for token in tokens if 128 <= token < 256]
        said.append(rng.choice(cut if cut and rng.random() < 0.8 else tokens))
        if said[-1] == TOKENIZER.eos_token_id:
            break
        matcher.accept(said[-1])

    assert said
    text = TOKENIZER.decode(said, skip_special_tokens=True)
    for block in text.removesuffix("\n</tool_call>").split("\n</tool_call>\n"):
        call = json.loads(block.removeprefix("<tool_call>\n"))
        assert "\ufffd" not in call["arguments"]["text"]
