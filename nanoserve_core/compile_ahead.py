"""Kernels compiled in threads, before a step needs them.

Compiled one after the other, each at its first launch, those of a first token take many times as
long (0.2 to 2.5 s each). It knows neither model nor step: whoever wants its kernels compiled makes
the launches, which then do not run.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from triton.runtime.jit import JITFunction

MAX_THREADS = 16
_OURS = "nanoserve_core.kernels."
_TURN = threading.Lock()
"""One thread at a time compiles ahead: it puts something between our kernels and their launches."""


@contextmanager
def compiling_only() -> Iterator[None]:
    """Within it, launches of our kernels by this thread compile, side by side, and do not run; at
    its end all are ready. Other threads launch as ever, and so do kernels of others.

    What cannot be compiled is left to the launch that needs it, which raises the compiler's error.
    """
    from triton import AsyncCompileMode

    num_threads = min(os.cpu_count() or 1, MAX_THREADS)
    with (
        _TURN,
        ThreadPoolExecutor(num_threads, thread_name_prefix="nanoserve-compile") as pool,
        _launches_compile(),
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        yield


@contextmanager
def _launches_compile() -> Iterator[None]:
    kernels = our_kernels()
    for kernel in kernels:
        kernel.run = _compile_in_this_thread(kernel, threading.get_ident())
    try:
        yield
    finally:
        for kernel in kernels:
            del kernel.run  # the class's own is there again


def our_kernels() -> list[JITFunction[Any]]:  # Any: a kernel's signature
    """The kernels of the modules that are imported, each once."""
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in sys.modules.items() if name.startswith(_OURS)]
    found = [value for module in modules for value in vars(module).values()]
    kernels = {id(value): value for value in found if isinstance(value, JITFunction)}
    return [kernel for kernel in kernels.values() if kernel.module.startswith(_OURS)]


def _compile_in_this_thread(
    kernel: JITFunction[Any],
    thread_id: int,  # Any: as above
) -> Callable[..., object]:
    launch = type(kernel).run

    def run(*args: Any, warmup: bool, **options: Any) -> object:  # Any: the kernel's own
        warmup = warmup or threading.get_ident() == thread_id
        return launch(kernel, *args, warmup=warmup, **options)

    return run
