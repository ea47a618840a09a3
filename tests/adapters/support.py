"""What the tests of the adapters share: requests, engines that wait, sinks that remember."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

from nanoserve_adapters.engine_thread import EngineThread
from nanoserve_adapters.testing import FakeEngine, hashed_token, leak_check, settle
from nanoserve_core.request import FinishReason, Request
from nanoserve_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nanoserve_core.request import StepOutput, StopCheck

PATIENCE_SECONDS = 20.0
_IDS = count()


def new_request(
    prompt: Iterable[int] = (1, 2, 3),
    *,
    max_tokens: int = 8,
    request_id: str | None = None,
    should_stop: StopCheck | None = None,
    n: int = 1,
) -> Request:
    """A greedy request with an id of its own."""
    return Request(
        request_id=request_id or f"r{next(_IDS)}",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0, max_tokens=max_tokens, n=n),
        should_stop=should_stop,
    )


def endless_request() -> Request:
    """A request that ends only when it is cancelled."""
    return new_request(max_tokens=10**8)


def hashed_tokens(request: Request) -> list[int]:
    """What a `FakeEngine` generates for sample 0, by the definition of `hashed_token`."""
    tokens = list(request.prompt_token_ids)
    for _ in range(request.sampling.max_tokens or 0):
        tokens.append(hashed_token(request, 0, tokens))
    return tokens[len(request.prompt_token_ids) :]


def tokens_in(pieces: Iterable[list[StepOutput]]) -> list[int]:
    """All tokens of one request's stream."""
    return [token for outputs in pieces for output in outputs for token in output.token_ids]


def new_engine(**options: Any) -> FakeEngine:
    """A `FakeEngine` with room for an `endless_request`."""
    return FakeEngine(**{"max_model_len": 10**9, **options})


@contextmanager
def running(engine: FakeEngine | None = None, **options: Any) -> Iterator[EngineThread]:
    """An engine thread on a `new_engine` with `options`; afterwards nothing may be left in it."""
    with EngineThread(engine or new_engine(**options)) as thread:
        yield thread
        if thread.is_alive:
            settle(thread)
            thread.call(leak_check)


class Hold:
    """A `FakeEngine.before_step` hook that stops the engine at the start of one step."""

    def __init__(self, at_step: int) -> None:
        self.at_step = at_step
        self.reached = threading.Event()
        self._released = threading.Event()

    def __call__(self, step: int) -> None:
        if step == self.at_step:
            self.reached.set()
            assert self._released.wait(PATIENCE_SECONDS), "nobody released the engine"

    def wait(self) -> None:
        """Return when the engine has come to the step."""
        assert self.reached.wait(PATIENCE_SECONDS), f"step {self.at_step} never came"

    def release(self) -> None:
        """Let the engine go on."""
        self._released.set()


class RecordingSink:
    """Remembers every delivery and the thread it came on."""

    def __init__(self) -> None:
        self.deliveries: list[list[StepOutput]] = []
        self.errors: list[BaseException] = []
        self.threads: set[threading.Thread] = set()
        self.is_over = threading.Event()

    def deliver(self, outputs: list[StepOutput]) -> None:
        """Remember; over when a request has finished."""
        self.deliveries.append(outputs)
        self.threads.add(threading.current_thread())
        if any(output.request_finished for output in outputs):
            self.is_over.set()

    def fail(self, error: BaseException) -> None:
        """Remember the end of the engine."""
        self.errors.append(error)
        self.is_over.set()

    def wait(self) -> RecordingSink:
        """Return when it is over."""
        assert self.is_over.wait(PATIENCE_SECONDS), "no end was delivered"
        return self

    @property
    def reasons(self) -> list[FinishReason]:
        """Reasons of the ends that came, in order."""
        outputs = [output for delivery in self.deliveries for output in delivery]
        return [output.finish_reason for output in outputs if output.finish_reason is not None]


def run_threads(*threads: threading.Thread) -> None:
    """Start threads and wait for all of them."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), f"{thread.name} hangs"
