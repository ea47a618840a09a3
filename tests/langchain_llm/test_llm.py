"""`NanoserveLLM`: all prompts of a call in one go, all samples, results as text."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from nanoserve_adapters.testing import AdmissionGate
from nanoserve_core import UnsupportedOption
from tests.langchain_llm.doors import SayText

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nanoserve_adapters.sink import Sink
    from nanoserve_core import Request
    from tests.langchain_llm.doors import FakeDoor, RealDoor


def test_batch_submits_all_prompts_in_one_call(
    fake: FakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    enqueue = fake.thread.enqueue

    def count(requests: Sequence[Request], sinks: Sequence[Sink]) -> None:
        sizes.append(len(requests))
        enqueue(requests, sinks)

    monkeypatch.setattr(fake.thread, "enqueue", count)

    fake.llm().batch(["a", "b", "c"])
    asyncio.run(fake.llm().abatch(["a", "b"]))

    assert sizes == [3, 2]


def test_texts_belong_to_their_prompts(make_fake: Callable[..., FakeDoor]) -> None:
    door = make_fake(next_token=SayText("?", {"<a>": "for a", "<b>": "b", "<c>": "longest for c"}))
    llm = door.llm()

    assert llm.batch(["<a>", "<b>", "<c>"]) == ["for a", "b", "longest for c"]
    assert [g[0].text for g in llm.generate(["<c>", "<a>"]).generations] == [
        "longest for c",
        "for a",
    ]


@pytest.mark.parametrize("way", ["generate", "agenerate"])
def test_all_samples_are_returned(real: RealDoor, way: str) -> None:
    llm = real.llm(n=3, temperature=1.0, seed=5, max_tokens=6)
    prompts = ["one", "two"]

    result = llm.generate(prompts) if way == "generate" else asyncio.run(llm.agenerate(prompts))

    assert [len(row) for row in result.generations] == [3, 3]
    assert len({generation.text for generation in result.generations[0]}) > 1
    usage = result.llm_output["token_usage"]
    assert usage == {"prompt_tokens": 6, "completion_tokens": 36, "total_tokens": 42}


def test_invoke_gives_the_first_of_several_samples(real: RealDoor) -> None:
    llm = real.llm(temperature=1.0, seed=5, max_tokens=6)

    first = llm.generate(["one"], n=3).generations[0][0].text

    assert llm.invoke("one", n=3) == first


def test_stream_of_several_samples_is_refused(fake: FakeDoor) -> None:
    with pytest.raises(UnsupportedOption, match=r"n=2.*generate"):
        list(fake.llm(n=2).stream("hi"))


def test_generation_has_reason_usage_and_name(fake: FakeDoor) -> None:
    (row,) = fake.llm(stop=["lo"]).generate(["hi"]).generations

    info = row[0].generation_info
    assert info is not None
    assert row[0].text == "Hel"
    assert (info["finish_reason"], info["stop_reason"]) == ("stop", "lo")
    assert info["model_name"] == "tiny"
    assert info["usage_metadata"]["input_tokens"] == 2
    assert info["usage_metadata"]["output_tokens"] == 5


def test_streaming_invoke_gives_the_same_result_as_a_plain_one(fake: FakeDoor) -> None:
    from langchain_core.callbacks import BaseCallbackHandler

    config: Any = {"callbacks": [BaseCallbackHandler()]}

    plain = fake.llm().generate(["hi"], **config)
    streaming = fake.llm(streaming=True).generate(["hi"], **config)

    assert streaming.generations[0][0].text == plain.generations[0][0].text
    assert streaming.llm_output == plain.llm_output


def test_messages_are_sent_as_text(fake: FakeDoor) -> None:
    fake.llm().invoke([("human", "hi")])

    assert fake.prompts() == ["Human: hi"]


def test_log_probabilities_are_reported(real: RealDoor) -> None:
    (row,) = real.llm(max_tokens=3, logprobs=2).generate(["hi"]).generations

    content = (row[0].generation_info or {})["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]


def test_chat_and_llm_run_in_one_batch(real: RealDoor) -> None:
    chat, llm = real.chat(max_tokens=5), real.llm(max_tokens=5)
    real.watch.peak = 0

    async def both() -> list[Any]:
        return await asyncio.gather(chat.ainvoke("hi"), llm.ainvoke("hi"))

    with AdmissionGate(real.thread, 2):
        asyncio.run(both())

    assert real.watch.peak == 2
