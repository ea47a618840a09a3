"""`scripted`: a real engine says what the script has, and only where the script says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.langchain_llm.doors import RealDoor


def test_one_text_is_said_to_everybody(real: RealDoor) -> None:
    real.script.texts = "Ça va — yes."

    answer = real.chat(temperature=1.0).invoke("hi")

    assert answer.content == "Ça va — yes."
    assert answer.response_metadata["finish_reason"] == "stop"


def test_text_is_chosen_by_a_part_of_the_prompt(real: RealDoor) -> None:
    real.script.texts = {"Paris": "France", "Rome": "Italy"}

    answers = real.chat(max_tokens=8).batch(["Is Rome old?", "Is Paris big?", "And Oslo?"])

    assert [answer.content for answer in answers[:2]] == ["Italy", "France"]
    assert answers[2].content not in ("Italy", "France")


def test_text_may_be_a_function_of_the_prompt(real: RealDoor) -> None:
    real.script.texts = lambda prompt: prompt.upper() if "echo" in prompt else None

    assert real.llm(max_tokens=30).invoke("echo this") == "ECHO THIS"
    assert real.llm(max_tokens=4).invoke("say this") != "SAY"


def test_mark_in_a_script_is_the_one_token_it_is(real: RealDoor) -> None:
    real.script.texts = "<tool_call>{}</tool_call>"

    answer = real.chat().invoke("hi")

    assert answer.content == "<tool_call>{}</tool_call>"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 5


def test_script_is_cut_by_the_limit_and_by_stop_strings(real: RealDoor) -> None:
    real.script.texts = "one two three"

    assert real.chat(max_tokens=5).invoke("hi").content == "one t"
    assert real.chat(stop=["three"]).invoke("hi").content == "one two "
