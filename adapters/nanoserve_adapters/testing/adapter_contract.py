"""`AdapterContract`: the tests every adapter has to pass, ours and others'.

Subclass it in a test module and give it a fixture ``adapter``::

    class TestMyAdapter(AdapterContract):
        @pytest.fixture
        def adapter(self):
            engine = FakeEngine()                       # or Engine(tiny_model())
            with EngineThread(engine) as thread:
                yield MyAdapterUnderTest(thread)
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from nanoserve_adapters.testing.engine_checks import (
    AdmissionGate,
    StepGate,
    leak_check,
    settle,
)
from nanoserve_core.errors import EngineClosed, EngineDead, RequestFailed
from nanoserve_core.request import Request
from nanoserve_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from nanoserve_adapters.engine_thread import EngineThread
    from nanoserve_adapters.sink import EngineLike
    from nanoserve_core.request import StepOutput

_PROMPTS = ([72, 101, 108, 108, 111], [72, 101, 121], [33], [9, 8, 7, 6, 5, 4, 3, 2, 1])
_NUM_TOKENS = 12


class AdapterUnderTest(Protocol):
    """What the contract needs of an adapter: token ids in and out, greedy, by way of its own door.

    The engine must hold four requests at a time and 256 tokens each.
    """

    thread: EngineThread
    """The thread of the engine the adapter uses; the contract closes and breaks it."""

    def complete(self, prompt_token_ids: list[int], *, max_tokens: int) -> list[int]:
        """One blocking call through the adapter: the new tokens. Raises what a user would see."""

    def stream(
        self, prompt_token_ids: list[int], *, max_tokens: int
    ) -> Generator[list[int], None, None]:
        """The same as a generator of pieces; closing it early is the adapter's way to cancel."""

    def expected(self, prompt_token_ids: list[int], *, max_tokens: int) -> list[int]:
        """What `complete` has to give, computed without our engine: by the framework itself."""


class AdapterContract:
    """Inherit, and supply the fixture ``adapter`` (an `AdapterUnderTest`)."""

    def test_complete_gives_the_tokens_of_the_framework(self, adapter: AdapterUnderTest) -> None:
        """Parity, one call at a time."""
        tokens = [adapter.complete(prompt, max_tokens=_NUM_TOKENS) for prompt in _PROMPTS]

        assert tokens == _expected(adapter)

    def test_stream_gives_the_tokens_of_complete(self, adapter: AdapterUnderTest) -> None:
        """Pieces put together are the whole."""
        pieces = list(adapter.stream(_PROMPTS[0], max_tokens=_NUM_TOKENS))

        joined = [token for piece in pieces for token in piece]
        assert joined == adapter.complete(_PROMPTS[0], max_tokens=_NUM_TOKENS)

    def test_concurrent_callers_join_one_batch(self, adapter: AdapterUnderTest) -> None:
        """Four threads, one batch of four, and nobody's tokens change."""
        tokens = _complete_together(adapter)

        assert tokens == _expected(adapter)
        assert adapter.thread.stats().peak_batch >= len(_PROMPTS)

    def test_closed_stream_leaves_nothing_behind(self, adapter: AdapterUnderTest) -> None:
        """Cancelled after its first piece: its blocks are free, another call is unharmed."""
        with StepGate(adapter.thread, at_step=8):
            stream = adapter.stream(_PROMPTS[0], max_tokens=200)
            next(stream)

            stream.close()

        after = adapter.complete(_PROMPTS[1], max_tokens=_NUM_TOKENS)
        assert after == adapter.expected(_PROMPTS[1], max_tokens=_NUM_TOKENS)
        settle(adapter.thread)
        adapter.thread.call(leak_check)
        assert adapter.thread.stats().finished_requests["abort"] == 1

    def test_request_that_fails_harms_no_other(self, adapter: AdapterUnderTest) -> None:
        """One request raises within a step that all share."""
        with _pool() as pool, AdmissionGate(adapter.thread, len(_PROMPTS) + 1):
            poison = adapter.thread.stream(_poisoned_request())
            calls = [pool.submit(adapter.complete, p, max_tokens=_NUM_TOKENS) for p in _PROMPTS]

        assert [call.result() for call in calls] == _expected(adapter)
        assert isinstance(_error_of(lambda: list(poison)), RequestFailed)

    def test_prompt_that_can_never_fit_is_refused_by_name(self, adapter: AdapterUnderTest) -> None:
        """A ValueError with the number; nothing was queued."""
        too_long = [5] * (adapter.thread.engine.max_model_len + 7)

        error = _error_of(lambda: adapter.complete(too_long, max_tokens=1))

        assert isinstance(error, ValueError)
        assert str(len(too_long)) in str(error)

    def test_closed_engine_raises_engine_closed(self, adapter: AdapterUnderTest) -> None:
        """No hang, no other exception."""
        adapter.thread.close()

        error = _error_of(lambda: adapter.complete(_PROMPTS[0], max_tokens=_NUM_TOKENS))

        assert EngineClosed in _types_of_chain(error)

    def test_dead_engine_fails_every_waiting_call_with_the_cause(
        self, adapter: AdapterUnderTest
    ) -> None:
        """The step raises while four calls wait."""
        adapter.thread.call(_break)

        with _pool() as pool, AdmissionGate(adapter.thread, len(_PROMPTS)):
            calls = [pool.submit(adapter.complete, p, max_tokens=_NUM_TOKENS) for p in _PROMPTS]

        for call in calls:
            assert {EngineDead, ZeroDivisionError} <= _types_of_chain(call.exception())


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=len(_PROMPTS))


def _expected(adapter: AdapterUnderTest) -> list[list[int]]:
    return [adapter.expected(prompt, max_tokens=_NUM_TOKENS) for prompt in _PROMPTS]


def _complete_together(adapter: AdapterUnderTest) -> list[list[int]]:
    with _pool() as pool, AdmissionGate(adapter.thread, len(_PROMPTS)):
        calls = [pool.submit(adapter.complete, p, max_tokens=_NUM_TOKENS) for p in _PROMPTS]
    return [call.result() for call in calls]


def _poisoned_request() -> Request:
    def poison(index: int, token_ids: list[int]) -> bool:
        raise LookupError(f"poison at token {len(token_ids)} of sample {index}")

    sampling = SamplingParams(temperature=0, max_tokens=_NUM_TOKENS)
    return Request(
        request_id="poison",
        prompt_token_ids=tuple(_PROMPTS[0]),
        sampling=sampling,
        should_stop=poison,
    )


def _break(engine: EngineLike) -> None:
    def broken_step() -> list[StepOutput]:
        raise ZeroDivisionError("a broken step")

    engine.step = broken_step  # type: ignore[method-assign]  # the contract is told of it


def _error_of(call: Callable[[], object]) -> BaseException | None:
    with _pool() as pool:
        return pool.submit(call).exception()


def _types_of_chain(error: BaseException | None) -> set[type[BaseException]]:
    types: set[type[BaseException]] = set()
    while error is not None:
        types.add(type(error))
        error = error.__cause__ or error.__context__
    return types
