"""Outputs reach the handler of their request, or wait for a reader."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from hf_generate_shim.outbox import Outbox

PATIENCE_SECONDS = 30


def output(request_id: str, num_tokens: int = 1, *, is_last: bool = False) -> GenerationOutput:
    """An output of that many tokens."""
    status = RequestStatus.FINISHED if is_last else RequestStatus.DECODING
    return GenerationOutput(request_id, generated_tokens=[0] * num_tokens, status=status)


def never() -> bool:
    """More may come."""
    return False


def test_outputs_wait_in_order_for_any_reader() -> None:
    outbox = Outbox()
    outbox.deliver([output("a"), output("b"), output("a", 2)])

    taken = [outbox.take(None, timeout_seconds=0, is_over=never) for _ in range(4)]

    found = [(o.request_id, len(o.generated_tokens)) for o in taken if o is not None]
    assert found == [("a", 1), ("b", 1), ("a", 2)]
    assert taken[3] is None


def test_reader_of_some_requests_leaves_the_others() -> None:
    outbox = Outbox()
    outbox.deliver([output("a"), output("b"), output("c")])

    first = outbox.take({"c", "b"}, timeout_seconds=0, is_over=never)
    second = outbox.take({"c", "b"}, timeout_seconds=0, is_over=never)
    third = outbox.take({"c", "b"}, timeout_seconds=0, is_over=never)

    assert (first.request_id, second.request_id, third) == ("b", "c", None)


def test_waiting_reader_gets_what_is_delivered_later() -> None:
    outbox = Outbox()
    with ThreadPoolExecutor(1) as executor:
        reader = executor.submit(outbox.take, {"b"}, timeout_seconds=None, is_over=never)
        outbox.deliver([output("a")])
        outbox.deliver([output("b")])

        assert reader.result(PATIENCE_SECONDS).request_id == "b"


def test_reader_is_released_when_nothing_more_will_come() -> None:
    outbox = Outbox()
    ends: list[bool] = []
    with ThreadPoolExecutor(1) as executor:
        reader = executor.submit(
            outbox.take, None, timeout_seconds=None, is_over=lambda: bool(ends)
        )
        ends.append(True)
        outbox.wake()

        assert reader.result(PATIENCE_SECONDS) is None


async def test_loop_is_called_once_for_all_its_handlers() -> None:
    outbox = Outbox()
    loop = asyncio.get_running_loop()
    calls: list[tuple[str, int]] = []
    for name in ("a", "b"):
        outbox.register(name, lambda o, n=name: calls.append((n, len(o.generated_tokens))), loop)
    num_posted = 0
    post = loop.call_soon_threadsafe

    def count(*arguments: object) -> object:
        nonlocal num_posted
        num_posted += 1
        return post(*arguments)  # type: ignore[arg-type]  # as given

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_soon_threadsafe", count)
        outbox.deliver([output("a"), output("b"), output("a", 2)])
    await asyncio.sleep(0)

    assert calls == [("a", 1), ("b", 1), ("a", 2)]
    assert num_posted == 1


async def test_handler_is_forgotten_after_the_last_output() -> None:
    outbox = Outbox()
    calls: list[GenerationOutput] = []
    outbox.register("a", calls.append, asyncio.get_running_loop())

    outbox.deliver([output("a", is_last=True)])
    outbox.deliver([output("a", 7)])
    await asyncio.sleep(0)

    assert [len(call.generated_tokens) for call in calls] == [1]
    assert outbox.take({"a"}, timeout_seconds=0, is_over=never).generated_tokens == [0] * 7


def test_requests_of_a_closed_loop_are_named() -> None:
    outbox = Outbox()
    loop = asyncio.new_event_loop()
    outbox.register("a", print, loop)
    loop.close()

    gone = outbox.deliver([output("a"), output("b")])

    assert gone == ["a"]
