"""Prompts: the template applied exactly once, no doubled BOS, plain text left plain (B7, B8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage

from langchain_llm.prompt import TemplateOptions, encode_chat, encode_text, render_chat
from nanoserve_core import ConfigError, InvalidRequest
from tests.langchain_llm.doors import new_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerFast

    from tests.langchain_llm.doors import FakeDoor

MESSAGES = [{"role": "user", "content": "hi"}]
NOTHING = TemplateOptions()
BOS = "<|endoftext|>"


@pytest.fixture
def bos_tokenizer() -> PreTrainedTokenizerFast:
    """Puts a BOS before plain text; its template prints the BOS too."""
    from tokenizers import processors

    tokenizer = new_tokenizer()
    tokenizer.bos_token = BOS
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    return tokenizer


def test_chat_prompt_is_the_template_with_the_generation_prompt(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = encode_chat(tokenizer, MESSAGES, NOTHING)

    expected = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    assert ids == expected
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n")


def test_template_prints_the_bos_once(bos_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode_chat(bos_tokenizer, MESSAGES, NOTHING)

    assert ids.count(bos_tokenizer.bos_token_id) == 1


def test_plain_text_has_the_tokenizers_own_bos_only_where_it_is_a_prompt(
    bos_tokenizer: PreTrainedTokenizerFast,
) -> None:
    as_prompt = encode_text(bos_tokenizer, "hi", special=True)
    as_text = encode_text(bos_tokenizer, "hi", special=False)

    assert as_prompt == [bos_tokenizer.bos_token_id, *b"hi"]
    assert as_text == [*b"hi"]


def test_bos_comes_once_in_chat_batch_llm_and_counting(
    make_fake: Callable[..., FakeDoor], bos_tokenizer: PreTrainedTokenizerFast
) -> None:
    from langchain_llm import ChatNanoserve, NanoserveLLM

    door = make_fake()
    chat = ChatNanoserve(engine=door.thread, tokenizer=bos_tokenizer)
    llm = NanoserveLLM(engine=chat.engine)
    wrapped = NanoserveLLM(engine=chat.engine, apply_chat_template=True)

    chat.invoke("hi")
    chat.batch(["a", "b"])
    llm.invoke("hi")
    wrapped.invoke("hi")

    bos = bos_tokenizer.bos_token_id
    assert [request.prompt_token_ids.count(bos) for request in door.requests] == [1] * 5
    assert chat.get_num_tokens_from_messages([HumanMessage("hi")]) == len(
        door.requests[0].prompt_token_ids
    )
    assert llm.get_num_tokens("hi") == len(door.requests[3].prompt_token_ids)


def test_chat_sends_the_template_and_the_llm_plain_text(fake: FakeDoor) -> None:
    fake.chat().invoke([SystemMessage("be kind"), HumanMessage("hi")])
    fake.llm().invoke("hi")
    fake.llm(apply_chat_template=True).invoke("hi")

    assert fake.prompts() == [
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n",
        "hi",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    ]


def test_answers_do_not_repeat_the_prompt_and_end_at_the_end_of_turn(fake: FakeDoor) -> None:
    answer = fake.chat().invoke("hi")

    assert answer.content == "Hello."
    assert answer.response_metadata["finish_reason"] == "stop"
    assert fake.llm().invoke("hi") == "Hello."


@pytest.mark.parametrize(
    ("option", "tail"),
    [(None, "assistant\n"), (True, "assistant\n"), (False, "<think>\n\n</think>\n\n")],
)
def test_enable_thinking_reaches_the_template(
    fake: FakeDoor, option: bool | None, tail: str
) -> None:
    fake.chat(enable_thinking=option).invoke("hi")
    fake.chat().bind(enable_thinking=option).invoke("hi")
    fake.chat().invoke("hi", enable_thinking=option)
    fake.chat(chat_template_kwargs={"enable_thinking": option}).invoke("hi")

    assert all(prompt.endswith(tail) for prompt in fake.prompts())


def test_template_and_its_variables_can_be_given(fake: FakeDoor) -> None:
    template = "{{ mood }}:{% for m in messages %}{{ m.content }}{% endfor %}"

    fake.chat(chat_template=template, chat_template_kwargs={"mood": "calm"}).invoke("hi")

    assert fake.prompts() == ["calm:hi"]


def test_template_that_refuses_the_messages_is_an_invalid_request(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    options = TemplateOptions(chat_template="{{ raise_exception('roles must alternate') }}")

    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render_chat(tokenizer, MESSAGES, options)


def test_tokenizer_without_a_template_is_refused_with_a_way_out() -> None:
    tokenizer = new_tokenizer()
    tokenizer.chat_template = None

    with pytest.raises(ConfigError, match=r"no chat template.*chat_template=.*NanoserveLLM"):
        render_chat(tokenizer, MESSAGES, NOTHING)


def test_empty_conversation_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InvalidRequest, match="no messages"):
        render_chat(tokenizer, [], NOTHING)


@pytest.mark.parametrize("name", ["tokenize", "tools", "messages", "chat_template"])
def test_variables_that_are_ours_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        TemplateOptions(variables={name: True})


def test_tools_are_counted_where_the_template_prints_them(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    options = TemplateOptions(chat_template="{{ tools | length }} {{ tools[0].function.name }}")
    tool: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {}}}

    assert render_chat(tokenizer, MESSAGES, options, [tool]) == "1 add"
