"""Fixtures: the engines behind the tests of the LangChain door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.langchain_llm.doors import FakeDoor, RealDoor, fake_engine, new_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, ChatML, a switch for thinking."""
    return new_tokenizer()


@pytest.fixture
def make_fake(tokenizer: PreTrainedTokenizerFast) -> Iterator[Callable[..., FakeDoor]]:
    """Makes fake engines with models on them: ``make_fake("text", max_model_len=64)``."""
    doors: list[FakeDoor] = []

    def make(text: str = "Hello.", **options: Any) -> FakeDoor:
        doors.append(FakeDoor(fake_engine(text, **options), tokenizer))
        return doors[-1]

    yield make
    for door in doors:
        door.thread.close()


@pytest.fixture
def fake(make_fake: Callable[..., FakeDoor]) -> FakeDoor:
    """A fake engine that says "Hello." to everybody."""
    return make_fake()


@pytest.fixture(scope="module")
def real(tokenizer: PreTrainedTokenizerFast) -> Iterator[RealDoor]:
    """A random Qwen3 behind a real engine, one for a test module."""
    door = RealDoor(tokenizer)
    yield door
    door.thread.close()
