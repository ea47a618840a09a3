"""The shipped checkpoint: its template, what it was trained on, and what it promises."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    Qwen2Tokenizer,
)
from transformers import PreTrainedTokenizerBase as TokenizerBase

from examples.tiny_qwen3 import corpus, evaluate, words
from examples.tiny_qwen3.corpus import ChatText, ExampleSource, Thinking, random_thinking
from examples.tiny_qwen3.example import Example, Message, is_held_out
from examples.tiny_qwen3.prose import Prose, split_chapters, split_sentences

CHECKPOINT = corpus.TEMPLATE_FILE.parent
WEIGHTS = CHECKPOINT / "model.safetensors"
PROMISED_RATE = 0.9  # of the simple tasks; the README says what was measured
# Those whose held-out examples can be made without the novels, which are not in the repository.
TASKS_WITHOUT_PROSE = (
    *("add", "copy_name", "copy_unicode", "facts", "count", "repeat", "greet", "remember", "json"),
)

HEAD = "<|im_start|>system\n"
TOOLS_HEAD = "# Tools\n\nThese functions may be called. Each line describes one as JSON.\n<tools>\n"
TOOLS_TAIL = (
    "\n</tools>\n\nA call gives the name and the arguments as JSON:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)
WEATHER: Message = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter in Zürich.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
WEATHER_LINE = (
    '{"type": "function", "function": {"name": "get_weather", "description": "Wetter in Zürich.", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}'
)


def render(
    messages: list[Message],
    *,
    tools: list[Message] | None = None,
    add_generation_prompt: bool = False,
    options: dict[str, bool] | None = None,
) -> str:
    """The text that `apply_chat_template` makes with the template and its own options."""
    template = corpus.TEMPLATE_FILE.read_text(encoding="utf-8")
    text = Qwen2Tokenizer().apply_chat_template(
        messages,
        tools=tools,
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        **(options or {}),
    )
    assert isinstance(text, str), "tokenize=False gives text"
    return text


def message(role: str, content: str | None, **fields: Any) -> Message:
    """A chat message; a field may hold any JSON."""
    return {"role": role, "content": content, **fields}


def called(name: str, arguments: dict[str, str] | str) -> Message:
    """A tool call as a message carries it."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def call_block(arguments: str) -> str:
    """A call of the weather tool as the model writes it."""
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'


def test_system_and_user_messages_stand_in_chatml() -> None:
    text = render([message("system", "Be brief."), message("user", "Hi")])

    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize(
    ("options", "tail"),
    [
        ({}, ""),
        ({"enable_thinking": True}, ""),
        ({"enable_thinking": False}, "<think>\n\n</think>\n\n"),
    ],
)
def test_only_thinking_switched_off_closes_the_block_in_the_prompt(
    options: dict[str, bool], tail: str
) -> None:
    text = render([message("user", "Hi")], add_generation_prompt=True, options=options)

    assert text == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{tail}"


def test_tools_follow_the_system_message_one_a_line() -> None:
    text = render([message("system", "Be brief."), message("user", "Hi")], tools=[WEATHER, WEATHER])

    tools = f"{TOOLS_HEAD}{WEATHER_LINE}\n{WEATHER_LINE}{TOOLS_TAIL}"
    assert text == f"{HEAD}Be brief.\n\n{tools}<|im_start|>user\nHi<|im_end|>\n"


def test_tools_make_a_system_message_where_there_is_none() -> None:
    text = render([message("user", "Hi")], tools=[WEATHER])

    assert text == f"{HEAD}{TOOLS_HEAD}{WEATHER_LINE}{TOOLS_TAIL}<|im_start|>user\nHi<|im_end|>\n"


def test_several_calls_and_their_results_make_one_turn_each() -> None:
    calls = [called("get_weather", {"city": "Zürich"}), called("get_weather", '{"city": "Bern"}')]

    text = render(
        [
            message("user", "Weather?"),
            message("assistant", None, tool_calls=calls),
            message("tool", "sunny"),
            message("tool", "rain"),
            message("assistant", "Sun and rain."),
        ]
    )

    assert text == (
        "<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n"
        + call_block('{"city": "Zürich"}')
        + "\n"
        + call_block('{"city": "Bern"}')
        + "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n"
        "<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nSun and rain.<|im_end|>\n"
    )


def test_a_call_after_text_starts_on_a_new_line() -> None:
    calls = [called("get_weather", '{"city": "Bern"}')]

    text = render([message("user", "Hi"), message("assistant", "I look.", tool_calls=calls)])

    block = call_block('{"city": "Bern"}')
    assert text.endswith(f"</think>\n\nI look.\n{block}<|im_end|>\n")


def test_thoughts_stay_only_after_the_last_question() -> None:
    calls = [called("get_weather", {"city": "Bern"})]

    text = render(
        [
            message("user", "Hi"),
            message("assistant", "Hello.", reasoning_content="A greeting."),
            message("user", "Weather?"),
            message("assistant", "", reasoning_content="I need the tool.", tool_calls=calls),
            message("tool", "rain"),
        ]
    )

    assert text == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nI need the tool.\n</think>\n\n"
        + call_block('{"city": "Bern"}')
        + "<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
    )


def test_thoughts_inside_the_content_are_found() -> None:
    content = "<think>\nA greeting.\n</think>\n\nHello."

    earlier = render([message("user", "Hi"), message("assistant", content), message("user", "So?")])
    last = render([message("user", "Hi"), message("assistant", content)])

    assert "<|im_start|>assistant\nHello.<|im_end|>\n" in earlier
    assert last.endswith(f"<|im_start|>assistant\n{content}<|im_end|>\n")


def test_two_system_messages_and_repeated_roles_render() -> None:
    text = render(
        [
            message("system", "A"),
            message("system", "B"),
            message("user", "C"),
            message("user", "D"),
            message("assistant", None),
            message("assistant", "E"),
        ]
    )

    assert text == (
        "<|im_start|>system\nA<|im_end|>\n<|im_start|>system\nB<|im_end|>\n"
        "<|im_start|>user\nC<|im_end|>\n<|im_start|>user\nD<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nE<|im_end|>\n"
    )


def test_text_parts_of_a_content_list_are_joined() -> None:
    parts: Any = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]  # as OpenAI's

    text = render([message("user", parts)])

    assert text == "<|im_start|>user\none two<|im_end|>\n"


@pytest.fixture(scope="module")
def sides() -> tuple[Prose, Prose]:
    """Both sides of a made-up text in which every chapter begins with the same sentence."""
    rng = Random(1)
    chapters = []
    for number in range(60):
        paragraphs = [_made_up_paragraph(rng) for _ in range(20)]
        paragraphs[0] = f"They all met, and were introduced to each other. {paragraphs[0]}"
        chapters.append((f"chapter {number}", "\n\n".join(paragraphs)))
    return split_chapters(chapters)


def _made_up_paragraph(rng: Random) -> str:
    sentences = (
        f"The {' '.join(rng.choices(words.WORDS, k=rng.randint(5, 14)))}." for _ in range(4)
    )
    return " ".join(sentences)


def test_held_out_examples_never_occur_in_training(sides: tuple[Prose, Prose]) -> None:
    training, held_out = (
        ExampleSource(prose, held_out=is_held)
        for prose, is_held in zip(sides, (False, True), strict=True)
    )

    trained = drawn(training, training.task_names, 300)
    asked = drawn(held_out, held_out.task_names, 30)

    seen = {key for example in trained for key in (example.key, *example.shown)}
    assert not any(is_held_out(key) for key in seen)
    assert all(is_held_out(example.key) for example in asked)
    prompts = {str(example.messages) for example in trained}
    assert not any(str(example.messages) in prompts for example in asked if example.is_exact)


def test_held_out_sentences_stand_in_no_training_chapter(sides: tuple[Prose, Prose]) -> None:
    training, held_out = sides

    text = "\n".join(training.chapters)

    assert held_out.sentences
    assert not any(sentence in text for sentence in held_out.sentences)


def drawn(source: ExampleSource, tasks: list[str], count: int) -> list[Example]:
    """`count` examples of each task."""
    rng = Random(0)
    return [source.draw(task, rng) for task in tasks for _ in range(count)]


def test_the_same_seed_draws_the_same_examples(sides: tuple[Prose, Prose]) -> None:
    source = ExampleSource(sides[0], held_out=False)

    first, second = ([source.draw_chat(Random(7)), source.draw_tool(Random(7))] for _ in range(2))

    assert first == second


@pytest.mark.parametrize("thinking", ["on", "off"])
def test_training_text_is_what_the_chat_template_makes(
    sides: tuple[Prose, Prose], thinking: Thinking
) -> None:
    source, text = ExampleSource(sides[0], held_out=False), ChatText()
    for example in drawn(source, source.task_names, 3):
        prompt, completion = text.prompt(example, thinking), text.completion(example, thinking)
        options = {"enable_thinking": False} if thinking == "off" else {}
        tools = list(example.tools)
        thought = example.thought if thinking == "on" else ""
        answer = message("assistant", example.answer, reasoning_content=thought)

        whole = render([*example.messages, answer], tools=tools)

        assert prompt == render(
            list(example.messages), tools=tools, add_generation_prompt=True, options=options
        )
        assert f"{prompt}{completion}\n" == whole


def test_only_a_question_can_decline_thinking(sides: tuple[Prose, Prose]) -> None:
    source, rng = ExampleSource(sides[0], held_out=False), Random(3)
    examples = [source.draw("tool_answer", rng) for _ in range(50)]

    ways = {random_thinking(rng, example) for example in examples}

    assert ways == {"on", "off"}


# What LangChain's integration suite asks: the checkpoint is to answer it without having seen it.
SUITE = (
    *(
        "magic_function",
        "unicode_customer",
        "San Francisco, CA",
        "customer named",
        "joke about cats",
    ),
    *("你好啊集团", "こんにちは株式会社", "Joke to tell user", "Pirate greeting"),
)


def test_nothing_of_the_suites_prompts_and_tools_is_trained_on(sides: tuple[Prose, Prose]) -> None:
    source = ExampleSource(sides[0], held_out=False)

    examples = drawn(source, [name for name in source.task_names if "tool" in name], 500)

    texts = [f"{e.messages} {e.tools} {e.answer}" for e in examples]
    assert [part for part in SUITE if any(part in text for text in texts)] == []


def test_names_to_be_recorded_stand_in_the_request_as_in_the_call(
    sides: tuple[Prose, Prose],
) -> None:
    source = ExampleSource(sides[0], held_out=False)

    for example in drawn(source, ["tool_record"], 200):
        block = example.answer.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        call = json.loads(block)
        request = example.messages[-1]["content"]
        assert call["name"] in [tool["function"]["name"] for tool in example.tools]
        assert all(value in request for value in call["arguments"].values())


def test_names_come_in_quotes_in_many_scripts(sides: tuple[Prose, Prose]) -> None:
    source = ExampleSource(sides[0], held_out=False)

    examples = drawn(source, ["tool_record"], 200)

    requests = [str(example.messages[-1]["content"]) for example in examples]
    assert sum(any(ord(letter) > 0x3000 for letter in text) for text in requests) > 60
    assert all(any(mark in text for text in requests) for mark in ("'", "「", "(", " - "))


def test_sentences_are_not_cut_after_titles() -> None:
    sentences = split_sentences('Mr. Knightley came. "Indeed!" said Mrs. Weston.')

    assert sentences == ["Mr. Knightley came.", '"Indeed!" said Mrs. Weston.']


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerBase:
    """The shipped tokenizer."""
    loaded: TokenizerBase = AutoTokenizer.from_pretrained(CHECKPOINT)
    return loaded


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The shipped model, in float32 because a CPU is faster in it."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    return loaded


def test_the_weights_are_bfloat16_and_at_most_twelve_megabytes() -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)

    assert model.dtype == torch.bfloat16
    assert 4e6 < model.num_parameters() < 6e6
    assert WEIGHTS.stat().st_size <= 12e6


def test_generation_ends_at_either_of_two_tokens(tokenizer: TokenizerBase) -> None:
    generation = GenerationConfig.from_pretrained(CHECKPOINT)

    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert generation.eos_token_id == ends
    assert generation.pad_token_id == tokenizer.pad_token_id == ends[1]


def test_any_text_survives_the_tokenizer(tokenizer: TokenizerBase) -> None:
    text = "Renée counts 12 你好 🙂\n\n  <tool_call>"

    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_shipped_template_is_the_one_it_was_trained_with(tokenizer: TokenizerBase) -> None:
    assert tokenizer.chat_template == Path(corpus.TEMPLATE_FILE).read_text(encoding="utf-8")


@pytest.mark.parametrize("thinking", ["on", "off"])
def test_held_out_tasks_are_answered_at_the_promised_rate(
    model: PreTrainedModel, tokenizer: TokenizerBase, thinking: Thinking
) -> None:
    nothing = Prose(chapters=(), paragraphs=(), sentences=())
    source = ExampleSource(nothing, held_out=True)
    examples = drawn(source, list(TASKS_WITHOUT_PROSE), 6)

    answers = evaluate.greedy_answers(model, tokenizer, examples, thinking=thinking)

    right = sum(answer == example.answer for answer, example in zip(answers, examples, strict=True))
    assert None not in answers, "every answer ends by itself"
    assert right >= PROMISED_RATE * len(examples)
