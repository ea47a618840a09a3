"""LangChain's integration suite for chat models, with every switch on that can honestly be on.

Subclasses say what stands behind it: `engine` and `extra_params`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from langchain_tests.integration_tests import ChatModelIntegrationTests

from langchain_llm import ChatNanoserve
from tests.langchain_llm.doors import summed

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage

Detail = Literal[
    "audio_input", "audio_output", "reasoning_output", "cache_read_input", "cache_creation_input"
]


class ChatSuite(ChatModelIntegrationTests):
    """Off stay images, audio, video and files, which Qwen3 cannot read, and recorded HTTP traffic,
    which there is none of.
    """

    engine: Any = None
    """An `EngineReference`, set by a fixture. Any: the base class's own attributes are untyped."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatNanoserve

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine, "temperature": 0, "served_model_names": ["the-override"]}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"max_tokens": 100, "timeout": 60, "stop": [], "max_retries": 2}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "the-override"

    @property
    def supported_usage_metadata_details(
        self,
    ) -> dict[Literal["invoke", "stream"], list[Detail]]:
        details: list[Detail] = ["cache_read_input", "reasoning_output"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        prompt = "the same long prompt, read from the prefix cache the second time"
        self._answer(prompt, stream=False)
        answer = self._answer(prompt, stream=stream)
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
        return answer

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        template = "{{ messages[0].content }}<think>\n"
        answer = self._answer("Think.", stream=stream, chat_template=template)
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_token_details"]["reasoning"] > 0
        assert answer.additional_kwargs["reasoning_content"]
        return answer

    def _answer(self, prompt: str, *, stream: bool, **options: Any) -> AIMessage:
        chat = ChatNanoserve(**{**self.chat_model_params, "max_tokens": 20, **options})
        return summed(list(chat.stream(prompt))) if stream else chat.invoke(prompt)
