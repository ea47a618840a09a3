"""What LangChain's suites ask of chat models, asked of `NanoserveLLM`: there is no suite for LLMs.

The same cases, on a random tiny Qwen3 behind a real engine.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.load import dumpd
from langchain_core.prompts import PromptTemplate

from langchain_llm import NanoserveLLM

if TYPE_CHECKING:
    from collections.abc import Callable

    from langchain_core.outputs import LLMResult

    from tests.langchain_llm.doors import RealDoor

PROMPT = "Once upon a time"


class TestNanoserveLLM:
    @pytest.fixture(autouse=True)
    def _door(self, real: RealDoor) -> None:
        real.script.texts = {}
        self.door = real

    @pytest.fixture
    def llm(self) -> NanoserveLLM:
        return self.door.llm(max_tokens=12, served_model_names=["the-override"])

    # As in the unit suite.

    def test_init_takes_the_standard_parameters(self) -> None:
        llm = NanoserveLLM(
            model="qwen3-tiny",
            temperature=0,
            max_tokens=100,
            timeout=60,
            stop=[],
            max_retries=2,
            api_key="none",
        )

        assert (llm.temperature, llm.max_tokens, llm.timeout) == (0, 100, 60)
        llm.close()

    def test_init_is_cheap_and_loads_nothing(self) -> None:
        start = time.thread_time()
        models = [NanoserveLLM(model="qwen3-tiny") for _ in range(10)]
        seconds = time.thread_time() - start

        assert seconds < 1  # a hundred times what it takes, and less than any loading
        assert not any(model.engine.is_loaded for model in models)

    def test_standard_parameters_are_traced(self) -> None:
        llm = self.door.llm(max_tokens=7, temperature=0.5)

        params: Any = llm._get_ls_params(stop=["x"])  # noqa: SLF001 - LangChain's own name for it

        assert params["ls_provider"] == "nanoserve"
        assert params["ls_model_type"] == "llm"
        assert params["ls_model_name"] == "tiny"
        assert (params["ls_temperature"], params["ls_max_tokens"]) == (0.5, 7)
        assert params["ls_stop"] == ["x"]

    def test_model_from_a_path_can_be_written_down(self) -> None:
        llm = NanoserveLLM(model="qwen3-tiny", max_tokens=3)

        written = dumpd(llm)

        assert written["type"] == "constructor"
        assert written["kwargs"]["model"] == "qwen3-tiny"
        assert written["kwargs"]["max_tokens"] == 3

    # As in the integration suite.

    def test_invoke_and_ainvoke_give_the_same_text(self, llm: NanoserveLLM) -> None:
        text = llm.invoke(PROMPT)

        assert text
        assert asyncio.run(llm.ainvoke(PROMPT)) == text

    def test_stream_and_astream_join_to_the_text_of_invoke(self, llm: NanoserveLLM) -> None:
        async def read() -> list[str]:
            return [piece async for piece in llm.astream(PROMPT)]

        assert "".join(llm.stream(PROMPT)) == llm.invoke(PROMPT)
        assert "".join(asyncio.run(read())) == llm.invoke(PROMPT)

    def test_batch_and_abatch_keep_the_order(self, llm: NanoserveLLM) -> None:
        prompts = [f"{PROMPT} {number}" for number in range(5)]
        expected = [llm.invoke(prompt) for prompt in prompts]

        assert llm.batch(prompts) == expected
        assert asyncio.run(llm.abatch(prompts)) == expected

    def test_conversation_is_answered(self, llm: NanoserveLLM) -> None:
        assert llm.invoke([("human", "hello"), ("ai", "hello"), ("human", "how are you")])

    @pytest.mark.parametrize("way", ["generate", "agenerate", "stream", "astream"])
    def test_model_override_is_what_results_name(self, llm: NanoserveLLM, way: str) -> None:
        infos: dict[str, Callable[[], Any]] = {
            "generate": lambda: llm.generate([PROMPT], model="the-override"),
            "agenerate": lambda: asyncio.run(llm.agenerate([PROMPT], model="the-override")),
            "stream": lambda: self.streamed(llm, is_async=False),
            "astream": lambda: self.streamed(llm, is_async=True),
        }

        result: LLMResult = infos[way]()

        assert (result.generations[0][0].generation_info or {})["model_name"] == "the-override"

    @staticmethod
    def streamed(llm: NanoserveLLM, *, is_async: bool) -> LLMResult:
        """The result that callbacks see at the end of a stream."""
        from langchain_core.callbacks import BaseCallbackHandler

        found: list[LLMResult] = []

        class Last(BaseCallbackHandler):
            def on_llm_end(self, response: LLMResult, **_: Any) -> None:
                found.append(response)

        async def read() -> None:
            config: Any = {"callbacks": [Last()]}
            async for _ in llm.astream(PROMPT, config, model="the-override"):
                pass

        if is_async:
            asyncio.run(read())
        else:
            list(llm.stream(PROMPT, {"callbacks": [Last()]}, model="the-override"))
        return found[0]

    def test_usage_is_counted_once_and_tells_of_the_cache(self, llm: NanoserveLLM) -> None:
        long = f"{PROMPT} there was a prompt that came a second time"
        llm.invoke(long)

        for result in (llm.generate([long]), asyncio.run(llm.agenerate([long]))):
            usage = (result.generations[0][0].generation_info or {})["usage_metadata"]
            assert usage["input_tokens"] == len(llm.get_token_ids(long))
            assert usage["output_tokens"] == 12
            assert usage["total_tokens"] == usage["input_tokens"] + 12
            assert usage["input_token_details"]["cache_read"] > 0

    def test_stop_is_accepted_by_calls_and_constructor(self, llm: NanoserveLLM) -> None:
        text = llm.invoke(PROMPT)
        stop = text[4]
        expected = text.split(stop)[0]

        assert llm.invoke(PROMPT, stop=[stop]) == expected
        assert self.door.llm(max_tokens=12, stop=[stop]).invoke(PROMPT) == expected
        assert "".join(llm.stream(PROMPT, stop=[stop])) == expected

    def test_events_have_a_start_pieces_and_an_end(self, llm: NanoserveLLM) -> None:
        chain = PromptTemplate.from_template("{text}") | llm

        async def read() -> list[Any]:
            return [e async for e in chain.astream_events({"text": PROMPT}, version="v2")]

        events = [event for event in asyncio.run(read()) if "llm" in event["event"]]

        assert events[0]["event"] == "on_llm_start"
        assert events[-1]["event"] == "on_llm_end"
        assert {event["event"] for event in events[1:-1]} == {"on_llm_stream"}
