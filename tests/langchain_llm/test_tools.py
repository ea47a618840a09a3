"""Tools: shown to the model, called in every form, streamed, and never called by half (B11, S1)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage

from langchain_llm import answer_grammar
from langchain_llm.messages import to_template_messages
from langchain_llm.prompt import TemplateOptions, render_chat
from nanoserve_core import ConfigError
from tests.langchain_llm.doors import RealDoor, summed

if TYPE_CHECKING:
    from collections.abc import Callable

    from langchain_core.runnables import Runnable

    from tests.langchain_llm.doors import FakeDoor

# The tiny tokenizer's own template knows no tools: a short one that does, and one in Qwen3's form.
SHORT = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
QWEN3 = (Path(__file__).parents[2] / "examples" / "tiny_qwen3" / "chat_template.jinja").read_text(
    encoding="utf-8"
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
NO_ARGUMENTS = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sun in {city}"


def now() -> str:
    """The time."""
    return "noon"


def with_tools(door: RealDoor | FakeDoor, **options: Any) -> Runnable[Any, AIMessage]:
    """A chat model that may call both tools, whatever its script makes of it."""
    options = {"chat_template": SHORT, **options}
    return door.chat(**options).bind_tools([get_weather, now])


def by_every_route(chat: Runnable[Any, AIMessage]) -> list[AIMessage]:
    """The answers of invoke, batch, stream and astream."""

    async def streamed() -> AIMessageChunk:
        return summed([chunk async for chunk in chat.astream("hi")])  # type: ignore[misc]  # they are chunks

    return [
        chat.invoke("hi"),
        *chat.batch(["hi"]),
        summed(list(chat.stream("hi"))),  # type: ignore[arg-type]  # they are chunks
        asyncio.run(streamed()),
    ]


def calls_of(answer: AIMessage) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of each valid call, each of which has an id of its own."""
    identifiers = [call["id"] for call in answer.tool_calls]
    assert all(identifiers)
    assert len(set(identifiers)) == len(identifiers)
    return [(call["name"], call["args"]) for call in answer.tool_calls]


def test_call_after_prose_is_found_by_every_route(real: RealDoor) -> None:
    real.script.texts = f"Sure. {CALL}"

    for answer in by_every_route(with_tools(real)):
        assert answer.content == "Sure."
        assert calls_of(answer) == [("get_weather", {"city": "Zürich"})]
        assert answer.response_metadata["finish_reason"] == "tool_calls"


def test_model_reads_the_schemas(make_fake: Callable[..., FakeDoor]) -> None:
    door = make_fake()

    with_tools(door, chat_template=QWEN3).invoke("hi")

    (prompt,) = door.prompts()
    assert '"description": "The weather in a city."' in prompt
    assert json.dumps({"properties": {"city": {"type": "string"}}})[1:-1] in prompt
    assert '"name": "now"' in prompt


def test_template_that_prints_no_tools_is_refused(fake: FakeDoor) -> None:
    chat = fake.chat().bind_tools([get_weather])

    with pytest.raises(ConfigError, match=r"prints no tools.*get_weather"):
        chat.invoke("hi")


def test_several_calls_and_calls_without_arguments_are_kept_in_order(real: RealDoor) -> None:
    real.script.texts = f"{CALL}\n{NO_ARGUMENTS}"

    for answer in by_every_route(with_tools(real)):
        assert answer.content == ""
        assert calls_of(answer) == [("get_weather", {"city": "Zürich"}), ("now", {})]


def test_first_chunk_of_a_call_has_name_and_id_and_every_call_its_index(real: RealDoor) -> None:
    real.script.texts = f"Sure. {CALL}\n{NO_ARGUMENTS}"

    chunks = [c for m in with_tools(real).stream("hi") for c in m.tool_call_chunks]  # type: ignore[attr-defined]  # chunks

    assert [(c["name"], c["index"]) for c in chunks] == [("get_weather", 0), ("now", 1)]
    assert [c["args"] for c in chunks] == ['{"city": "Zürich"}', "{}"]


def test_prose_streams_with_tools_bound(real: RealDoor) -> None:
    real.script.texts = f"one two three four five {CALL}"

    pieces = [c.content for c in with_tools(real).stream("hi") if c.content]

    assert len(pieces) >= 10
    assert "".join(map(str, pieces)) == "one two three four five"


def test_plain_answer_with_tools_bound_streams_and_ends_with_stop(real: RealDoor) -> None:
    real.script.texts = "one two three "

    for answer in by_every_route(with_tools(real)):
        assert answer.content == "one two three "
        assert answer.tool_calls == answer.invalid_tool_calls == []
        assert answer.response_metadata["finish_reason"] == "stop"


NUM_TOKENS = len(f"Sure. {CALL}".encode()) - len("<tool_call>") - len("</tool_call>") + 2


@pytest.mark.parametrize("max_tokens", [7, 9, 25, 50, NUM_TOKENS - 2, NUM_TOKENS - 1])
def test_call_cut_by_the_limit_is_never_a_call(real: RealDoor, max_tokens: int) -> None:
    real.script.texts = f"Sure. {CALL}"

    for answer in by_every_route(with_tools(real, max_tokens=max_tokens, close_json=False)):
        assert answer.tool_calls == []
        assert len(answer.invalid_tool_calls) == 1
        assert str(answer.invalid_tool_calls[0]["args"]).startswith("<tool_call>")
        assert answer.content == "Sure."
        assert answer.response_metadata["finish_reason"] == "length"


def test_call_that_ends_with_the_limit_is_a_call(real: RealDoor) -> None:
    real.script.texts = f"Sure. {CALL}"

    for answer in by_every_route(with_tools(real, max_tokens=NUM_TOKENS, close_json=False)):
        assert calls_of(answer) == [("get_weather", {"city": "Zürich"})]
        assert answer.response_metadata["finish_reason"] == "length"


def test_whole_call_before_a_cut_one_stays_a_call(real: RealDoor) -> None:
    real.script.texts = f"{NO_ARGUMENTS}\n{CALL}"

    for answer in by_every_route(with_tools(real, max_tokens=70, close_json=False)):
        assert calls_of(answer) == [("now", {})]
        assert len(answer.invalid_tool_calls) == 1


@pytest.mark.parametrize("block", ['{"name": "now", "arguments": {"a": tru}}', '{"name": "now"'])
def test_invalid_json_is_an_invalid_call_where_no_grammar_prevents_it(
    real: RealDoor, block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_grammar, "has_grammar_backend", lambda: False)
    real.script.texts = f"<tool_call>{block}</tool_call>"

    for answer in by_every_route(with_tools(real)):
        assert answer.tool_calls == []
        assert [call["name"] for call in answer.invalid_tool_calls] == ["now"]
        assert answer.response_metadata["finish_reason"] == "stop"


def test_thinking_comes_before_the_call(real: RealDoor) -> None:
    real.script.texts = f"<think>\nI call it.\n</think>\n\n{CALL}"

    for answer in by_every_route(with_tools(real)):
        assert answer.content == ""
        assert answer.additional_kwargs == {"reasoning_content": "I call it."}
        assert calls_of(answer) == [("get_weather", {"city": "Zürich"})]


@pytest.mark.parametrize(
    "text", [f"Sure. {CALL}\n{NO_ARGUMENTS}", CALL, f"<think>\nhm\n</think>\n\n{CALL}"]
)
def test_version_1_content_holds_the_calls_as_blocks(real: RealDoor, text: str) -> None:
    real.script.texts = text

    for answer in by_every_route(with_tools(real, output_version="v1")):
        kinds = [block["type"] for block in answer.content_blocks]
        assert kinds == [
            *(["reasoning"] if "think" in text else []),
            *(["text"] if "Sure" in text else []),
            *["tool_call"] * text.count("<tool_call>"),
        ]
        assert [b["name"] for b in answer.content_blocks if b["type"] == "tool_call"] == [
            call["name"] for call in answer.tool_calls
        ]


def test_events_of_version_3_have_the_text_and_the_call(real: RealDoor) -> None:
    real.script.texts = f"Sure. {CALL}"

    stream = with_tools(real).stream_events("hi", version="v3")
    list(stream)

    assert stream.output.text == "Sure."
    assert calls_of(stream.output) == [("get_weather", {"city": "Zürich"})]
    assert stream.output.response_metadata["finish_reason"] == "tool_calls"


def test_events_of_version_2_have_the_chunks_and_the_whole(real: RealDoor) -> None:
    real.script.texts = f"Sure. {CALL}"

    async def events() -> list[Any]:
        return [event async for event in with_tools(real).astream_events("hi", version="v2")]

    found = asyncio.run(events())

    pieces = [e["data"]["chunk"] for e in found if e["event"] == "on_chat_model_stream"]
    assert "".join(piece.content for piece in pieces) == "Sure."
    ends = [e["data"]["output"] for e in found if e["event"] == "on_chat_model_end"]
    assert calls_of(ends[0]) == calls_of(summed(pieces)) == [("get_weather", {"city": "Zürich"})]


def test_calls_are_text_when_none_may_be_made(real: RealDoor) -> None:
    real.script.texts = CALL
    chat = real.chat(chat_template=SHORT)

    answer = chat.bind_tools([now], tool_choice="none").invoke("hi")

    assert answer.content == CALL
    assert answer.tool_calls == []


def test_history_of_calls_and_results_is_written_as_the_model_was_trained(
    make_fake: Callable[..., FakeDoor],
) -> None:
    door = make_fake(CALL)
    chat = with_tools(door, chat_template=QWEN3)
    question = HumanMessage("Weather?")

    answer = chat.invoke([question])
    result = ToolMessage("no such city", tool_call_id=answer.tool_calls[0]["id"], status="error")
    chat.invoke([question, answer, result])

    assert door.prompts()[1].endswith(
        f"<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n{CALL}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nno such city\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_invalid_call_goes_back_as_it_was_written(make_fake: Callable[..., FakeDoor]) -> None:
    block = '<tool_call>{"name": "now"</tool_call>'
    door = make_fake(f"Well: {block}")
    chat = with_tools(door, chat_template=QWEN3)

    answer = chat.invoke("hi")
    chat.invoke([HumanMessage("hi"), answer, HumanMessage("That was no JSON.")])

    assert f"<|im_start|>assistant\nWell:\n{block}<|im_end|>\n" in door.prompts()[1]


def test_binding_no_tools_changes_nothing(fake: FakeDoor) -> None:
    assert fake.chat().bind_tools([]).invoke("hi").content == "Hello."


def test_tools_given_in_the_call_work_as_bound_ones(real: RealDoor) -> None:
    real.script.texts = CALL

    answer = real.chat(chat_template=SHORT).invoke("hi", tools=[get_weather])

    assert calls_of(answer) == [("get_weather", {"city": "Zürich"})]


def test_log_probabilities_of_a_call_come_with_it(real: RealDoor) -> None:
    real.script.texts = f"Sure. {CALL}"

    answers = by_every_route(with_tools(real, logprobs=True))

    contents = [answer.response_metadata["logprobs"]["content"] for answer in answers]
    assert len(contents[0]) == NUM_TOKENS + 1  # the end of sequence too
    assert all(content == contents[0] for content in contents)


@pytest.mark.parametrize("version", ["v0", "v1"])
@pytest.mark.parametrize("max_tokens", [30, None])
def test_answers_of_every_route_and_version_go_back_into_the_history(
    real: RealDoor, version: str, max_tokens: int | None
) -> None:
    real.script.texts = f"Sure. {CALL}"
    chat = with_tools(real, output_version=version, max_tokens=max_tokens, close_json=False)
    stream: Any = chat.stream_events("hi", version="v3")
    list(stream)
    answers = [*by_every_route(chat), stream.output]
    template = (
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    )

    prompts = [
        render_chat(
            real.tokenizer, to_template_messages([answer]), TemplateOptions(chat_template=template)
        )
        for answer in answers
    ]

    expected = (
        'Sure.{"name": "get_weather", "arguments": {"city": "Zürich"}}'
        if max_tokens is None
        else "Sure.\n" + f"Sure. {CALL}".encode()[6 : 6 + 34].decode()
    )
    assert set(prompts) == {expected}
