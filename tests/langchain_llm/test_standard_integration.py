"""LangChain's integration suite on random weights.

A grammar makes a random model's calls and documents valid. The six tests that ask for what stands
in the prompt are told it by a script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from transformers import AutoTokenizer

from tests.langchain_llm.chat_suite import ChatSuite
from tests.langchain_llm.doors import RealDoor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# What is asked for -> the arguments that are expected of the call.
ANSWERS = {
    "What is the value of magic_function(3)?": ("magic_function", '{"input": 3}'),
    "What is the weather in San Francisco, CA?": ("get_weather", '{"location": "here"}'),
    "你好啊集团": ("unicode_customer", '{"customer_name": "你好啊集团", "description": "a"}'),
    "こんにちは株式会社": (
        "unicode_customer",
        '{"customer_name": "こんにちは株式会社", "description": "a"}',
    ),
}


def script(prompt: str) -> str | None:
    """The call a prompt asks for; None, which is the model's own text, after its result."""
    if "<tool_response>" in prompt:
        return None
    for question, (name, arguments) in ANSWERS.items():
        if question in prompt:
            call = f'{{"name": "{name}", "arguments": {arguments}}}'
            return f"<tool_call>\n{call}\n</tool_call>"
    return None


@pytest.fixture(scope="module")
def scripted_door(tiny_checkpoint: Path) -> Iterator[RealDoor]:
    """Random weights under the vocabulary and the template of the shipped checkpoint."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    door = RealDoor(
        tokenizer,
        max_model_len=1024,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        max_position_embeddings=1024,
    )
    door.script.texts = script
    yield door
    door.thread.close()


class TestScriptedChat(ChatSuite):
    @pytest.fixture(autouse=True)
    def _engine(self, scripted_door: RealDoor) -> None:
        self.engine = scripted_door.reference
