"""LangChain's integration suite for chat models, on a random tiny Qwen3 behind a real engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests

from langchain_llm import ChatNanoserve

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel

    from tests.langchain_llm.doors import RealDoor


class TestChatNanoserveIntegration(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _door(self, real: RealDoor) -> None:
        real.script.texts = {}  # nothing is scripted: the random model's own text
        self.door = real

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatNanoserve

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "engine": self.door.reference,
            "temperature": 0,
            "max_tokens": 12,
            "served_model_names": ["the-override"],
        }

    @property
    def has_tool_calling(self) -> bool:
        return False  # bind_tools refuses by name until tools are served

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def model_override_value(self) -> str:
        return "the-override"

    @property
    def supported_usage_metadata_details(
        self,
    ) -> dict[
        Literal["invoke", "stream"],
        list[
            Literal[
                "audio_input",
                "audio_output",
                "reasoning_output",
                "cache_read_input",
                "cache_creation_input",
            ]
        ],
    ]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        chat = ChatNanoserve(**self.chat_model_params)
        prompt = "the same long prompt, read from the prefix cache the second time"
        chat.invoke(prompt)
        if not stream:
            answer = chat.invoke(prompt)
        else:
            first, *rest = chat.stream(prompt)
            answer = sum(rest, first)
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
        assert isinstance(answer, AIMessage | AIMessageChunk)
        return answer
