"""References: loaded once and late, shared, counted, and closed by whom they belong to."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
from typing import TYPE_CHECKING

import pytest

from langchain_llm import ChatNanoserve, EngineReference, NanoserveLLM
from langchain_llm.engine_reference import resolve_engine
from nanoserve_adapters.registry import acquire
from nanoserve_adapters.testing import tiny_model
from nanoserve_core import ConfigError, EngineClosed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

    from tests.langchain_llm.doors import FakeDoor

OPTIONS = {"num_kvcache_blocks": 64, "max_model_len": 128}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> str:
    """The folder of a random two-layer Qwen3 with its tokenizer."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nanoserve-engine"]


def test_making_models_loads_nothing() -> None:
    chat = ChatNanoserve(model="no/such-model")

    assert not chat.engine.is_loaded
    assert not engine_threads()


def test_first_call_loads_and_close_stops_the_engine(checkpoint: str) -> None:
    chat = ChatNanoserve(model=checkpoint, engine_options=OPTIONS, max_tokens=2)

    chat.invoke("hi")

    assert chat.engine.is_loaded
    assert len(engine_threads()) == 1
    chat.close()
    chat.close()  # idempotent
    assert not engine_threads()


@pytest.mark.parametrize(
    "way", ["invoke", "ainvoke", "stream", "astream", "batch", "stats", "count"]
)
def test_closed_model_raises_and_does_not_hang(checkpoint: str, way: str) -> None:
    chat = ChatNanoserve(model=checkpoint, engine_options=OPTIONS)
    chat.close()

    async def astream() -> None:
        async for _ in chat.astream("hi"):
            pass

    ways: dict[str, Callable[[], object]] = {
        "invoke": lambda: chat.invoke("hi"),
        "ainvoke": lambda: asyncio.run(chat.ainvoke("hi")),
        "stream": lambda: list(chat.stream("hi")),
        "astream": lambda: asyncio.run(astream()),
        "batch": lambda: chat.batch(["a", "b"]),
        "stats": chat.stats,
        "count": lambda: chat.get_num_tokens("hi"),
    }

    with pytest.raises(EngineClosed, match="was closed"):
        ways[way]()


def test_models_of_one_checkpoint_share_an_engine_until_the_last_is_closed(checkpoint: str) -> None:
    chat = ChatNanoserve(model=checkpoint, engine_options=OPTIONS, max_tokens=2)
    llm = NanoserveLLM(model=checkpoint, engine_options=OPTIONS, max_tokens=2)
    chat.invoke("hi")
    llm.invoke("hi")

    assert chat.engine.thread is llm.engine.thread
    assert len(engine_threads()) == 1
    chat.close()
    llm.invoke("still there")
    llm.close()
    assert not engine_threads()


def test_model_made_on_the_engine_of_another_has_a_reference_of_its_own(checkpoint: str) -> None:
    with ChatNanoserve(model=checkpoint, engine_options=OPTIONS, max_tokens=2) as chat:
        llm = NanoserveLLM(engine=chat.engine, temperature=0, max_tokens=2)

    assert llm.invoke("hi") is not None
    assert (llm.model, llm.engine_options) == (checkpoint, OPTIONS)
    llm.close()
    assert not engine_threads()
    with pytest.raises(EngineClosed):
        NanoserveLLM(engine=chat.engine)


def test_other_options_for_a_loaded_checkpoint_are_an_error(checkpoint: str) -> None:
    with ChatNanoserve(model=checkpoint, engine_options=OPTIONS, max_tokens=2) as chat:
        chat.invoke("hi")
        other = ChatNanoserve(model=checkpoint, engine_options={"max_model_len": 64})

        with pytest.raises(ConfigError, match=r"128[\s\S]*64"):
            other.invoke("hi")


def test_collected_models_give_their_engine_back(checkpoint: str) -> None:
    chat = ChatNanoserve(model=checkpoint, engine_options=OPTIONS, max_tokens=2)
    chat.invoke("hi")
    (thread,) = engine_threads()

    del chat
    gc.collect()

    thread.join(30)
    assert not thread.is_alive()


def test_concurrent_first_calls_load_once(checkpoint: str) -> None:
    chat = ChatNanoserve(model=checkpoint, engine_options=OPTIONS, max_tokens=2)

    async def calls() -> None:
        await asyncio.gather(*(chat.ainvoke("hi") for _ in range(20)))
        await chat.aclose()

    asyncio.run(calls())

    assert not engine_threads()


def test_warmup_loads_and_generates_a_token(checkpoint: str) -> None:
    with ChatNanoserve(model=checkpoint, engine_options=OPTIONS) as chat:
        chat.warmup()

        assert chat.stats().generated_tokens == 1


def test_loaded_model_is_adopted_with_its_own_weights(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny_model()
    inputs = tokenizer("hi", return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, 2:].tolist()

    with NanoserveLLM.from_hf(model, tokenizer, temperature=0, max_tokens=8) as llm:
        text = llm.invoke("hi")

        assert llm.model == "Qwen3ForCausalLM"
        assert text == tokenizer.decode(expected, skip_special_tokens=True)
        llm.engine.weights_changed()
        assert llm.invoke("hi") == text


def test_loaded_model_can_be_given_a_name(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny_model()

    with ChatNanoserve.from_hf(model, tokenizer, model="ours", max_tokens=2) as chat:
        answer = chat.invoke("hi")

    assert chat.model == "ours"
    assert answer.response_metadata["model_name"] == "ours"


def test_running_engine_stays_with_its_owner(fake: FakeDoor) -> None:
    fake.chat().close()

    assert fake.thread.is_alive


def test_handle_of_the_registry_can_be_the_engine(
    checkpoint: str,
) -> None:
    with acquire(checkpoint, **OPTIONS) as handle:
        chat = ChatNanoserve(engine=handle, max_tokens=2)

        assert chat.invoke("hi") is not None
        assert chat.model == checkpoint
        assert chat.engine.thread is handle.thread


@pytest.mark.parametrize("wrong", [object(), "a-path", 3])
def test_engine_of_a_wrong_kind_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=rf"{type(wrong).__name__}.*chat\.engine"):
        ChatNanoserve(engine=wrong)


def test_thread_without_a_tokenizer_is_refused_when_text_is_needed(fake: FakeDoor) -> None:
    chat = ChatNanoserve(engine=fake.thread)

    with pytest.raises(ConfigError, match="tokenizer="):
        chat.invoke("hi")


def test_what_an_engine_was_made_with_cannot_be_changed(fake: FakeDoor) -> None:
    with pytest.raises(ConfigError, match="engine_options"):
        ChatNanoserve(engine=fake.reference, engine_options={"max_model_len": 3})
    with pytest.raises(ConfigError, match="tokenizer"):
        ChatNanoserve(engine=fake.reference, tokenizer="another")


def test_live_model_as_model_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match="from_hf"):
        ChatNanoserve(model=tiny_model())


def test_path_object_is_a_model(tmp_path: Path) -> None:
    assert ChatNanoserve(model=tmp_path).model == str(tmp_path)


def test_reference_is_its_own_copy() -> None:
    reference = EngineReference.to_model("x")

    assert copy.copy(reference) is copy.deepcopy(reference) is reference
    assert "not loaded" in repr(reference)
    reference.close()
    assert "closed" in repr(reference)


def test_shared_references_are_counted() -> None:
    first = resolve_engine(None, model="x")
    second = first.share()

    first.close()

    assert first.is_closed
    assert not second.is_closed
    assert second.identity == first.identity
