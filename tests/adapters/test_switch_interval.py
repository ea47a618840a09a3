"""The switch interval is claimed while there is work, by the shortest claim, and restored."""

from __future__ import annotations

from nanoserve_adapters.engine_thread import EngineThread
from nanoserve_adapters.switch_interval import SwitchInterval
from nanoserve_adapters.testing import FakeEngine, settle
from nanoserve_core.config import EngineConfig
from tests.adapters.support import new_request, tokens_in


class Interpreter:
    """Stands in for ``sys``: remembers the interval."""

    def __init__(self, seconds: float = 0.005) -> None:
        self.seconds = seconds
        self.history: list[float] = []

    def read(self) -> float:
        """The interval now."""
        return self.seconds

    def write(self, seconds: float) -> None:
        """Set it."""
        self.seconds = seconds
        self.history.append(seconds)

    def owner(self) -> SwitchInterval:
        """An owner of this interpreter's interval."""
        return SwitchInterval(self.read, self.write)


def test_shortest_claim_holds_and_the_last_release_restores() -> None:
    interpreter = Interpreter()
    owner, first, second = interpreter.owner(), object(), object()

    owner.claim(first, 0.001)
    owner.claim(second, 0.0005)
    owner.release(second)
    owner.release(first)

    assert interpreter.history == [0.001, 0.0005, 0.001, 0.005]


def test_claim_never_raises_the_interval() -> None:
    interpreter = Interpreter(0.0001)
    owner = interpreter.owner()

    owner.claim(owner, 0.001)

    assert interpreter.seconds == 0.0001


def test_interval_that_somebody_else_set_stands() -> None:
    interpreter = Interpreter()
    owner = interpreter.owner()
    owner.claim(owner, 0.001)

    interpreter.write(0.02)
    owner.release(owner)

    assert interpreter.seconds == 0.02


def test_release_without_a_claim_changes_nothing() -> None:
    interpreter = Interpreter()

    interpreter.owner().release(object())

    assert interpreter.history == []


def test_engine_claims_while_it_has_work_and_releases_when_idle() -> None:
    interpreter = Interpreter()
    seen: list[float] = []
    engine = FakeEngine(
        config=EngineConfig(switch_interval=0.0005),
        before_step=lambda _: seen.append(interpreter.seconds),
    )

    with EngineThread(engine, switch_interval=interpreter.owner()) as thread:
        tokens_in(thread.stream(new_request(max_tokens=3)))
        settle(thread)

    assert seen == [0.0005] * 3
    assert interpreter.seconds == 0.005


def test_engine_without_the_option_leaves_the_interval_alone() -> None:
    interpreter = Interpreter()

    with EngineThread(FakeEngine(), switch_interval=interpreter.owner()) as thread:
        tokens_in(thread.stream(new_request()))

    assert interpreter.history == []
