"""`PromptEncoder`: the ids of the tokenizer itself, with long beginnings tokenised once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from langchain_llm import prompt_encoder
from langchain_llm.prompt_encoder import MIN_PIECE, PromptEncoder
from tests.langchain_llm.doors import new_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

END = "<|im_end|>"
SYSTEM = f"<|im_start|>system\n{'You are a careful clerk. ' * 40}{END}\n"


def turn(text: str) -> str:
    return f"<|im_start|>user\n{text}{END}\n<|im_start|>assistant\n"


@pytest.fixture(scope="module", params=["bytes", "trained"])
def tokenizer(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> PreTrainedTokenizerFast:
    """The tests' tokenizer of bytes, and the trained one of the shipped checkpoint."""
    if request.param == "bytes":
        return new_tokenizer()
    trained: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(tiny_checkpoint)
    trained.model_max_length = 10**6  # it would warn of long texts, which is the engine's business
    return trained


class Counted:
    """A tokenizer that remembers how long the texts were that it had to encode."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.lengths: list[int] = []
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the tokenizer has
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.lengths.append(len(text))
        token_ids: list[int] = self._tokenizer.encode(text, **options)
        return token_ids


@settings(max_examples=30)
@given(
    texts=st.lists(
        st.text(st.sampled_from(" \n\tab1e\u0301日\U0001f642\u200d<|"), max_size=40), max_size=6
    ),
    repeat=st.integers(1, 30),
)
def test_ids_are_those_of_the_whole_text(
    tokenizer: PreTrainedTokenizerFast, texts: list[str], repeat: int
) -> None:
    encoder = PromptEncoder(tokenizer)
    text = END.join(part * repeat for part in texts)

    expected = tokenizer.encode(text, add_special_tokens=False)

    assert encoder.encode(text) == expected
    assert encoder.encode(text) == expected  # now from memory


def test_long_beginning_is_tokenised_once(tokenizer: PreTrainedTokenizerFast) -> None:
    counted: Any = Counted(tokenizer)
    encoder = PromptEncoder(counted)
    counted.lengths.clear()

    for number in range(10):
        encoder.encode(SYSTEM + turn(f"question {number}"))

    assert len([length for length in counted.lengths if length >= MIN_PIECE]) == 1
    assert sum(counted.lengths) < 2 * len(SYSTEM)


def test_conversation_that_goes_on_keeps_its_pieces(tokenizer: PreTrainedTokenizerFast) -> None:
    counted: Any = Counted(tokenizer)
    encoder = PromptEncoder(counted)
    history = SYSTEM
    for number in range(30):
        history += turn(f"question {number}") + f"an answer of some length to {number}{END}\n"
        encoder.encode(history)
    counted.lengths.clear()

    encoder.encode(history + turn("the next question"))

    assert sum(counted.lengths) < 2 * MIN_PIECE


class JoinsTurns:
    """A tokenizer for which the end of a turn is nothing special: what follows joins with it."""

    eos_token, is_fast = END, True

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        del add_special_tokens
        return [len(text)]


def test_tokenizer_that_does_not_cut_at_turns_gets_whole_texts() -> None:
    joins: Any = JoinsTurns()

    assert PromptEncoder(joins).encode(SYSTEM + SYSTEM) == [2 * len(SYSTEM)]


def test_oldest_pieces_are_forgotten(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_encoder, "MAX_CHARACTERS", 3 * len(SYSTEM))
    counted: Any = Counted(tokenizer)
    encoder = PromptEncoder(counted)
    systems = [SYSTEM.replace("careful", f"careful{number}") for number in range(6)]
    for system in systems:
        encoder.encode(system + turn("hi"))
    counted.lengths.clear()

    encoder.encode(systems[-1] + turn("hi"))
    newest = sum(counted.lengths)
    encoder.encode(systems[0] + turn("hi"))

    assert newest < MIN_PIECE
    assert sum(counted.lengths) > len(SYSTEM)
