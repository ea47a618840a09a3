"""Calls take turns on one thread."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from hf_generate_shim.turns import Turns

PATIENCE_SECONDS = 30


def test_calls_run_in_order_on_a_thread_of_their_own() -> None:
    turns = Turns()
    try:
        threads = [turns.submit(threading.get_ident).result(PATIENCE_SECONDS) for _ in range(3)]
    finally:
        turns.close()

    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


def test_error_belongs_to_its_call() -> None:
    turns = Turns()
    try:
        failed = turns.submit(lambda: 1 // 0)
        fine = turns.submit(lambda: 7)

        assert isinstance(failed.exception(PATIENCE_SECONDS), ZeroDivisionError)
        assert fine.result(PATIENCE_SECONDS) == 7
    finally:
        turns.close()


def test_no_turn_begins_while_the_lock_is_held() -> None:
    turns = Turns()
    try:
        with turns.lock:
            waiting = turns.submit(lambda: 7)
            has_run = waiting.done()

        assert not has_run
        assert waiting.result(PATIENCE_SECONDS) == 7
    finally:
        turns.close()


def test_close_drops_what_waits_and_takes_no_more() -> None:
    turns = Turns()
    with turns.lock:
        turns.submit(lambda: 6)  # it waits for the lock, the next one for it
        waiting = turns.submit(lambda: 7)
        turns.close()
        turns.close()

    with pytest.raises(CancelledError):
        waiting.result(PATIENCE_SECONDS)
    with pytest.raises(RuntimeError):
        turns.submit(lambda: 8)
