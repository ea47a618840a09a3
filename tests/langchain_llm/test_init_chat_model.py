"""`register_init_chat_model`: models by string in LangChain's own table, only when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from langchain_llm import ChatNanoserve, register_init_chat_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType


def table_of(base: ModuleType) -> dict[str, Any]:
    table: dict[str, Any] = base._BUILTIN_PROVIDERS  # noqa: SLF001 - private, but the only one
    return table


@pytest.fixture
def base() -> Iterator[ModuleType]:
    """LangChain's module with the table, which is put back afterwards."""
    base: ModuleType = pytest.importorskip("langchain.chat_models.base")
    table = table_of(base)
    before = dict(table)
    yield base
    table.clear()
    table.update(before)


def test_model_is_made_from_a_string_with_its_options(
    base: ModuleType, tiny_checkpoint: Path
) -> None:
    with pytest.raises(ValueError, match="nanoserve"):
        base.init_chat_model("any", model_provider="nanoserve")

    assert register_init_chat_model()
    chat = base.init_chat_model(f"nanoserve:{tiny_checkpoint}", temperature=0, max_tokens=3)

    assert isinstance(chat, ChatNanoserve)
    assert (chat.model, chat.temperature, chat.max_tokens) == (str(tiny_checkpoint), 0, 3)
    assert not chat.engine.is_loaded
    chat.close()


def test_registering_twice_is_registering_once(base: ModuleType) -> None:
    assert register_init_chat_model()
    before = dict(table_of(base))

    assert register_init_chat_model()

    assert table_of(base) == before


def test_configurable_model_is_ours_at_run_time(base: ModuleType, tiny_checkpoint: Path) -> None:
    register_init_chat_model()
    chooser = base.init_chat_model(temperature=0, max_tokens=2)

    answer = chooser.invoke("hi", {"configurable": {"model": f"nanoserve:{tiny_checkpoint}"}})

    assert answer.response_metadata["model_provider"] == "nanoserve"
    assert answer.usage_metadata["output_tokens"] == 2


def test_missing_table_is_warned_of(base: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(base, "_BUILTIN_PROVIDERS")

        with pytest.warns(UserWarning, match=r"_BUILTIN_PROVIDERS.*ChatNanoserve"):
            is_registered = register_init_chat_model()

    assert not is_registered


def test_without_langchain_there_is_nothing_to_register_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    assert not register_init_chat_model()
