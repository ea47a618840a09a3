"""Many inputs at once: as many callers in flight as the engine can run, results as they come.

LangChain's own ``batch`` runs on a pool as large as the machine has cores, which is what the
engine's batch then is. It knows runnables' configs; it knows no model.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_llm.call_scope import CallScope, context_in, registered

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

    from langchain_core.runnables import RunnableConfig

Item = TypeVar("Item")
Result = TypeVar("Result")

MIN_WINDOW = 64
"""Callers in flight when the engine would run fewer: waiting in the engine is cheaper than outside.
"""


def window_size(configs: Sequence[RunnableConfig], max_num_seqs: int) -> int:
    """How many inputs are in flight at a time: the user's ``max_concurrency``, else the engine's
    size.
    """
    return configs[0].get("max_concurrency") or max(MIN_WINDOW, max_num_seqs)


def run_window(
    call: Callable[[Item], Result], items: Sequence[Item], *, size: int
) -> Generator[tuple[int, Future[Result]], None, None]:
    """Run ``call(item)`` for all items on up to `size` threads; yields (position, done future) as
    they end.

    Each call has its own copy of the context. When the iteration is left early, by an exception or
    by closing it, running calls are cancelled in the engine and the others never start.
    """
    scope = CallScope()
    with registered(scope), ThreadPoolExecutor(min(size, len(items)), "nanoserve-batch") as pool:
        try:
            futures = {
                pool.submit(context_in(scope).run, call, item): position
                for position, item in enumerate(items)
            }
            for future in as_completed(futures):
                yield futures[future], future
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            scope.close()
            raise


def batch_in_window(
    call: Callable[[Item], Result], items: Sequence[Item], *, size: int, return_exceptions: bool
) -> list[Result | Exception]:
    """Results of `run_window` in the order of the items; the first exception ends it, unless they
    are to be returned.
    """
    results: dict[int, Result | Exception] = {}
    with closing(run_window(call, items, size=size)) as ended:
        for position, future in ended:
            result = result_of(future, return_exceptions=return_exceptions)
            results[position] = result
    return [results[position] for position in range(len(items))]


def result_of(future: Future[Result], *, return_exceptions: bool) -> Result | Exception:
    """The result, or the exception raised or returned; an interrupt is always raised."""
    error = future.exception()
    if return_exceptions and isinstance(error, Exception):
        return error
    return future.result()


async def gather_in_window(
    call: Callable[[Item], Awaitable[Result]],
    items: Sequence[Item],
    *,
    size: int | None,
    return_exceptions: bool,
) -> list[Result | Exception]:
    """`batch_in_window` for coroutines; ``size`` None starts all at once.

    The first exception cancels the others (and waits for them), as does cancelling the caller.
    """
    gate = asyncio.Semaphore(size or len(items))

    async def run(item: Item) -> Result:
        async with gate:
            return await call(item)

    tasks = [asyncio.ensure_future(run(item)) for item in items]
    try:
        results: list[Any] = await asyncio.gather(*tasks, return_exceptions=return_exceptions)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return [_no_interrupt(result) for result in results]


def _no_interrupt(result: Result | BaseException) -> Result | Exception:
    if isinstance(result, BaseException) and not isinstance(result, Exception):
        raise result
    return result
