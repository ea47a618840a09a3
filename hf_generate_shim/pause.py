"""`EnginePause`: keeps an engine between two steps while its model is used, or changed in place."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

from nanoserve_core.errors import EngineClosed, EngineDead, UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hf_generate_shim.turns import Turns
    from nanoserve_adapters.engine_thread import EngineThread
    from nanoserve_core.engine import Engine


class _OwnPauses(threading.local):
    count = 0


class EnginePause:
    """Any number of threads may hold it at once; the engine goes on when the last one is done.

    What runs by turns does not run meanwhile either. Requests of other doors of the same engine
    wait too.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._lock = threading.Lock()
        self._num_holders = 0
        self._parked: _Parked | None = None
        self._own = _OwnPauses()

    @property
    def is_own(self) -> bool:
        """Whether the calling thread holds it: what it asks of the engine would never come."""
        return self._own.count > 0

    @contextmanager
    def hold(self, thread: EngineThread, device: torch.device) -> Iterator[None]:
        """For the block, the engine launches nothing and the device has done what was launched.

        Raises `EngineDead` or `EngineClosed` when the engine ends before it could be held. What is
        cached under the weights of before is dropped.
        """
        self._acquire(thread, device)
        self._own.count += 1
        try:
            yield
        finally:
            self._own.count -= 1
            self._release()

    def end(self) -> None:
        """Let the engine go, whoever holds it: it is about to be closed."""
        parked = self._parked
        if parked is not None:
            parked.leave.set()

    def _acquire(self, thread: EngineThread, device: torch.device) -> None:
        with self._lock:
            if self._num_holders == 0:
                self._turns.lock.acquire()
                try:
                    self._parked = _park(thread, device)
                except BaseException:
                    self._turns.lock.release()
                    raise
            self._num_holders += 1

    def _release(self) -> None:
        with self._lock:
            self._num_holders -= 1
            if self._num_holders > 0:
                return
            parked, self._parked = self._parked, None
            assert parked is not None, "the first holder parked it"
            parked.unpark()
            self._turns.lock.release()


class _Parked:
    """An engine's thread waiting inside one action."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.arrived = threading.Event()
        self.leave = threading.Event()
        self.error: EngineClosed | EngineDead | None = None
        self.helper: threading.Thread | None = None

    def stay(self, engine: Engine) -> None:
        """On the engine's thread."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # steps were launched ahead
        self.arrived.set()
        self.leave.wait()
        with suppress(UnsupportedOption):  # the next request meets it, and says so
            engine.weights_changed()

    def run(self, call: Callable[[Callable[[Engine], None]], None]) -> None:
        """On a thread of its own, since a call into the engine blocks until it is done."""
        try:
            call(self.stay)
        except (EngineClosed, EngineDead) as error:
            self.error = error
        finally:
            self.arrived.set()

    def unpark(self) -> None:
        """Returns when the engine has noted that weights may have changed."""
        self.leave.set()
        if self.helper is not None:
            self.helper.join()


def _park(thread: EngineThread, device: torch.device) -> _Parked:
    parked = _Parked(device)
    parked.helper = threading.Thread(
        target=parked.run, args=(thread.call,), name="nanoserve-pause", daemon=True
    )
    parked.helper.start()
    parked.arrived.wait()
    if parked.error is not None:
        raise parked.error
    return parked
