"""Launches kernels inside `compiling_only` on a machine without a GPU; prints what was compiled.

A program of its own, because it replaces Triton's driver. Nothing could run here, so a launch that
is not held back fails.

    python -m tests.kernels.compile_ahead_launches       one JSON object
"""

from __future__ import annotations

import json
import sys
import threading

from triton.runtime import driver

from nanoserve_core.compile_ahead import compiling_only, our_kernels
from nanoserve_core.kernels import triton_ops as ops
from tests.kernels.cross_compile import NoDevice, meta


def launch(num_columns: int) -> None:
    """Two kernels, the first of them twice."""
    x, weight = meta(4, num_columns), meta(num_columns)
    for _ in range(2):
        ops.rms_norm(x, weight, eps=1e-6, out=x)
    ops.silu_mul(x, x, out=x)


def num_compiled() -> int:
    """Variants of our kernels that are ready to be launched."""
    caches = [kernel.device_caches[0][0] for kernel in our_kernels()]
    return sum(hasattr(compiled, "asm") for cache in caches for compiled in cache.values())


def launched_elsewhere() -> str:
    """What happens to a launch of another thread meanwhile: it is a launch."""
    errors: list[str] = []

    def run() -> None:
        try:
            launch(512)
        except AttributeError as error:  # the driver without a device cannot load it
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return ", ".join(errors)


def main() -> None:
    """Compile ahead, twice the same and once more."""
    driver.set_active(NoDevice())
    counts = []
    for num_columns in (256, 256, 1024):
        with compiling_only():
            launch(num_columns)
        counts.append(num_compiled())
    with compiling_only():
        elsewhere = launched_elsewhere()
    is_restored = not any("run" in vars(kernel) for kernel in our_kernels())
    found = {"counts": counts, "elsewhere": elsewhere, "is_restored": is_restored}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
