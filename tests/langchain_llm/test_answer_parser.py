"""Answers taken apart: reasoning, prose and calls, wherever the text was cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_llm.answer_parser import AnswerParser, CallBlock, Part, Prose, Reasoning, joined
from langchain_llm.answer_start import AnswerStart, answer_start

REASONING, ANSWER, UNDECIDED = AnswerStart.REASONING, AnswerStart.ANSWER, AnswerStart.UNDECIDED
CALL = '\n{"name": "f", "arguments": {}}\n'


def parsed(pieces: list[str], start: AnswerStart, *, parses_calls: bool = True) -> list[Part]:
    parser = AnswerParser(start, parses_calls=parses_calls)
    return joined([part for piece in pieces for part in parser.push(piece)] + parser.finish())


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("<|im_start|>assistant\n<think>\n", REASONING),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ANSWER),
        ("<|im_start|>assistant\n", UNDECIDED),
        ("What is <think> good for?<|im_end|>\n<|im_start|>assistant\n", UNDECIDED),
    ],
)
def test_start_is_read_from_the_end_of_the_prompt(prompt: str, start: AnswerStart) -> None:
    assert answer_start(prompt) is start


@pytest.mark.parametrize(
    ("start", "text", "expected"),
    [
        (UNDECIDED, "<think>\nhm\n</think>\n\nParis.", [Reasoning("hm"), Prose("Paris.")]),
        (UNDECIDED, "Paris.", [Prose("Paris.")]),
        (UNDECIDED, " <thing>", [Prose(" <thing>")]),
        (UNDECIDED, "<think>\nhm, a", [Reasoning("hm, a")]),
        (UNDECIDED, "<think>\n\n</think>\n\nParis.", [Prose("Paris.")]),
        (UNDECIDED, "<thi", [Prose("<thi")]),
        (REASONING, "hm\n\nso\n</think>\n\n Paris. ", [Reasoning("hm\n\nso"), Prose("Paris. ")]),
        (REASONING, "hm </thi", [Reasoning("hm </thi")]),
        (ANSWER, "<think>a</think>", [Prose("<think>a</think>")]),
        (ANSWER, "\n Paris.\n", [Prose("\n Paris.\n")]),
        (ANSWER, "", []),
    ],
)
def test_reasoning_is_what_the_block_holds_without_the_space_around_it(
    start: AnswerStart, text: str, expected: list[Part]
) -> None:
    assert parsed([text], start) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"Sure. <tool_call>{CALL}</tool_call>", [Prose("Sure."), CallBlock(CALL, True)]),
        (
            f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n",
            [CallBlock(CALL, True), CallBlock(CALL, True)],
        ),
        (
            f"A.\n<tool_call>{CALL}</tool_call>\n B. ",
            [Prose("A."), CallBlock(CALL, True), Prose("\nB.")],
        ),
        (f"<tool_call>{CALL}</tool_call> B.", [CallBlock(CALL, True), Prose("B.")]),
        ('A <tool_call>{"name', [Prose("A"), CallBlock('{"name', False)]),
        (f"<tool_call>{CALL}</tool_call><tool_", [CallBlock(CALL, True), Prose("<tool_")]),
        ("Sure. <tool_ca", [Prose("Sure. <tool_ca")]),
        ("Sure.  ", [Prose("Sure.  ")]),
        ("a < b <tool", [Prose("a < b <tool")]),
    ],
)
def test_calls_leave_the_prose_and_the_space_around_them(text: str, expected: list[Part]) -> None:
    assert parsed([text], ANSWER) == expected


def test_closing_mark_inside_a_string_is_a_part_of_the_string() -> None:
    block = '{"name": "write", "arguments": {"text": "a </tool_call> b"}}'

    assert parsed([f"<tool_call>{block}</tool_call>"], ANSWER) == [CallBlock(block, True)]


def test_without_tools_calls_are_prose() -> None:
    text = f" Sure. <tool_call>{CALL}</tool_call> "

    assert parsed([text], ANSWER, parses_calls=False) == [Prose(text)]


def test_prose_comes_out_until_a_mark_may_begin() -> None:
    parser = AnswerParser(ANSWER, parses_calls=True)

    pieces = [parser.push(piece) for piece in ("Yes", ", it", " <", "3", " is", " <tool")]

    assert pieces == [
        [Prose("Yes")],
        [Prose(", it")],
        [],
        [Prose(" <3")],
        [Prose(" is")],
        [],
    ]


TEXTS = st.lists(
    st.sampled_from(
        [
            *(
                "<think>",
                "</think>",
                "<tool_call>",
                "</tool_call>",
                "<",
                "</",
                "think>",
                "tool_call>",
            ),
            *("\n", " ", "a", "b", '"', "\\", '{"name": "f", "arguments": {"x": "', '"}}'),
        ]
    ),
    max_size=14,
).map("".join)


@given(text=TEXTS, cuts=st.lists(st.integers(0, 120)), start=st.sampled_from(AnswerStart))
def test_parts_do_not_depend_on_where_the_text_is_cut(
    text: str, cuts: list[int], start: AnswerStart
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]

    assert parsed(pieces, start) == parsed([text], start)


@given(text=TEXTS, start=st.sampled_from(AnswerStart))
def test_no_character_but_marks_and_space_is_lost_or_moved(text: str, start: AnswerStart) -> None:
    def without_space(text: str) -> str:
        return "".join(text.split())

    parts = parsed(list(text), start)

    kept = "".join(p.written if isinstance(p, CallBlock) else p.text for p in parts)
    rest = without_space(text)
    for mark in ("<think>", "</think>"):  # the thinking block's own marks stand in no part
        if without_space(kept).count(mark) < rest.count(mark):
            rest = rest.replace(mark, "", 1)
    assert without_space(kept) == rest
