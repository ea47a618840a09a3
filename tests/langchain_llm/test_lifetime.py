"""Models at the edges of a process's life: forked, and two objects on one set of weights (S7)."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest

from langchain_llm import ChatNanoserve, NanoserveLLM
from tests.adapters.forked_child import in_forked_child

if TYPE_CHECKING:
    from pathlib import Path

    from tests.langchain_llm.doors import FakeDoor


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # that it is risky is the point
@pytest.mark.parametrize("kind", ["chat", "llm"])
def test_every_call_in_a_forked_child_says_that_the_engine_stayed_behind(
    fake: FakeDoor, kind: str
) -> None:
    model: Any = fake.chat() if kind == "chat" else fake.llm()

    async def astream() -> list[Any]:
        return [chunk async for chunk in model.astream("hi")]

    before = model.invoke("hi")
    said = in_forked_child(
        lambda: model.invoke("hi"),
        lambda: asyncio.run(model.ainvoke("hi")),
        lambda: list(model.stream("hi")),
        lambda: asyncio.run(astream()),
        lambda: model.batch(["a", "b"]),
        lambda: asyncio.run(model.abatch(["a", "b"])),
    )

    assert [error for error, _ in said] == ["EngineClosed"] * 6
    assert all(str(os.getpid()) in text and "fork" in text for _, text in said)
    assert getattr(model.invoke("hi"), "text", None) == getattr(before, "text", None)


def test_models_of_one_checkpoint_run_on_one_engine(
    tiny_checkpoint: Path,
) -> None:
    options = {"num_kvcache_blocks": 64}
    with (
        ChatNanoserve(model=tiny_checkpoint, engine_options=options) as chat,
        NanoserveLLM(model=str(tiny_checkpoint), engine_options=options) as llm,
    ):
        chat.warmup()
        llm.warmup()

        assert chat.engine.thread is llm.engine.thread
        assert chat.stats().finished_requests == {"length": 2}


def test_models_on_a_loaded_model_use_its_own_tensors() -> None:
    from nanoserve_adapters.testing import tiny_model, tiny_tokenizer

    hf_model, tokenizer = tiny_model(), tiny_tokenizer()
    options: Any = {"engine_options": {"num_kvcache_blocks": 64}, "temperature": 0, "max_tokens": 4}
    with (
        ChatNanoserve.from_hf(hf_model, tokenizer, **options) as first,
        ChatNanoserve.from_hf(hf_model, tokenizer, **options) as second,
    ):
        before = first.invoke("hi").text
        assert second.engine.thread is first.engine.thread
        for parameter in hf_model.parameters():
            parameter.data.neg_()
        first.engine.weights_changed()

        assert second.invoke("hi").text != before
