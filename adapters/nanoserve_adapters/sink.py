"""What an engine thread needs from the sides it connects: an engine, and sinks of consumers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nanoserve_core.config import EngineConfig
    from nanoserve_core.engine_stats import EngineStats
    from nanoserve_core.request import Request, StepOutput


class Waker(Protocol):
    """Wakes a group of consumers (an event loop) once, after all deliveries of a step."""

    def wake(self) -> None:
        """Called on the engine thread, at most once per step; must not block or run user code.

        Raising means that the consumers are gone: their requests are cancelled.
        """


class Sink(Protocol):
    """Where the outputs of one or several requests go. Its methods run on the engine thread.

    They must only store and signal: never block, never run a user's callback. A sink that raises
    loses its requests (they are cancelled) and nobody else's. Sinks are told apart by identity.
    """

    def deliver(self, outputs: list[StepOutput]) -> Waker | None:
        """Take all news of one step for the sink's requests; at most once per step.

        A request that fails ends with an output that carries ``error``. A returned waker is called
        after all sinks of the step have been served, once even if many sinks return it.
        """

    def fail(self, error: BaseException) -> Waker | None:
        """The engine has ended (`EngineDead` or `EngineClosed`): nothing more will be delivered.

        For a request that was submitted in that very moment it runs in the submitting thread.
        """


class EngineLike(Protocol):
    """The part of `nanoserve_core.engine.Engine` that an `EngineThread` uses."""

    @property
    def config(self) -> EngineConfig:
        """Frozen options."""

    def validate(self, request: Request) -> None:
        """Raise `InvalidRequest` for a request that can never run; pure, any thread."""

    def add_request(self, request: Request) -> None:
        """Queue a request."""

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored; its ABORT comes with the next step."""

    def has_unfinished_requests(self) -> bool:
        """True while `step` has something to do or to hand out."""

    def step(self) -> list[StepOutput]:
        """Run one step; an exception means that the engine is broken."""

    def check(self) -> None:
        """Raise AssertionError when an invariant of the engine is broken."""

    def stats(self) -> EngineStats:
        """Counters, as a frozen object."""

    def close(self) -> None:
        """Release everything."""
