"""What the tests of the LangChain door talk to: models on a fake and on a real engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_llm import ChatNanoserve, EngineReference, NanoserveLLM
from langchain_llm.testing import scripted
from nanoserve_adapters.engine_thread import EngineThread
from nanoserve_adapters.testing import (
    DelayedRunner,
    FakeEngine,
    leak_check,
    settle,
    tiny_model,
    tiny_tokenizer,
)
from nanoserve_core import Engine, EngineConfig, hookimpl
from nanoserve_core.model_runner import ModelRunner
from nanoserve_core.plugins import PluginManager

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langchain_core.messages import AIMessageChunk
    from transformers import PreTrainedTokenizerFast

    from nanoserve_core import StepStats
    from nanoserve_core.request import Request

IM_END = 258
"""The end-of-sequence id of the tiny tokenizer."""


class Door:
    """One engine on a thread, and models of both classes on it. Greedy unless options say more."""

    def __init__(self, thread: EngineThread, tokenizer: PreTrainedTokenizerFast) -> None:
        self.thread = thread
        self.tokenizer = tokenizer
        self.reference = EngineReference.to_running(thread, tokenizer=tokenizer, name="tiny")

    def chat(self, **options: Any) -> ChatNanoserve:
        """A chat model on the engine."""
        return ChatNanoserve(engine=self.reference, **{"temperature": 0, **options})

    def llm(self, **options: Any) -> NanoserveLLM:
        """An LLM on the engine."""
        return NanoserveLLM(engine=self.reference, **{"temperature": 0, **options})

    def assert_nothing_left(self) -> None:
        """Wait until the engine is idle; nothing runs then and all blocks are free."""
        settle(self.thread)
        self.thread.call(leak_check)


class FakeDoor(Door):
    """A fake engine: no weights, answers decided by the test."""

    def __init__(self, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(EngineThread(engine), tokenizer)
        self.engine = engine

    @property
    def requests(self) -> list[Request]:
        """Every request the engine has admitted, in order."""
        return self.engine.requests

    def prompts(self) -> list[str]:
        """The prompts of these requests, as text."""
        return [self.tokenizer.decode(list(r.prompt_token_ids)) for r in self.requests]


class PeakWatch:
    """A plugin that remembers the largest batch since it was last set to 0."""

    def __init__(self) -> None:
        self.peak = 0

    @hookimpl
    def nanoserve_step_finished(self, stats: StepStats) -> None:
        """Engine thread."""
        self.peak = max(self.peak, len(stats.rows))


class RealDoor(Door):
    """A random two-layer Qwen3 behind a real engine, whose answers ``script.texts`` can decide."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        num_blocks: int = 2000,
        run_ahead: int = 0,
        max_model_len: int = 256,
        **shape: Any,
    ) -> None:
        """`shape`: fields of the model's ``Qwen3Config``."""
        self.script = scripted({}, tokenizer)
        self.watch = PeakWatch()
        config = EngineConfig(
            max_num_seqs=256,
            max_model_len=max_model_len,
            num_kvcache_blocks=num_blocks,
            plugins=(self.script, self.watch),
        )
        plugins = PluginManager(config.plugins, config.allowed_plugins)
        runner = ModelRunner.create(tiny_model(**shape), config, plugins)
        self.block_size = runner.block_size
        late: Any = DelayedRunner(runner, run_ahead) if run_ahead else runner
        super().__init__(EngineThread(Engine.from_runner(late, config, plugins)), tokenizer)


class SayText:
    """``next_token`` of a fake engine: says a text, then ends. Texts may depend on the prompt."""

    def __init__(self, text: str, by_prompt: dict[str, str] | None = None) -> None:
        self.text = text
        self.by_prompt = by_prompt or {}

    def __call__(self, request: Request, index: int, token_ids: Sequence[int]) -> int:
        del index
        prompt = bytes(token for token in request.prompt_token_ids if token < 256).decode()
        text = next((t for part, t in self.by_prompt.items() if part in prompt), self.text)
        position = len(token_ids) - len(request.prompt_token_ids)
        said = text.encode()
        return said[position] if position < len(said) else IM_END


def fake_engine(text: str = "Hello.", **options: Any) -> FakeEngine:
    """A fake engine that says `text` to everybody."""
    return FakeEngine(**{"next_token": SayText(text), "eos_token_ids": (IM_END,), **options})


def summed(chunks: Sequence[AIMessageChunk]) -> AIMessageChunk:
    """The sum of all chunks of a stream, as LangChain adds them up."""
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    return total


def new_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer: a byte is a token."""
    return tiny_tokenizer()
