"""LangChain's own unit suite for chat models. Nothing is loaded by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_llm import ChatNanoserve

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel
    from syrupy.assertion import SnapshotAssertion


class TestChatNanoserveUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatNanoserve

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "qwen3-tiny", "engine_options": {"max_model_len": 512}}

    @pytest.mark.xfail(
        reason="load(allowed_objects='all') only admits the packages of langchain-core's own table;"
        " with allowed_objects=[ChatNanoserve] it works, see test_identity.py"
    )
    def test_serdes(self, model: BaseChatModel, snapshot: SnapshotAssertion) -> None:
        super().test_serdes(model, snapshot)
