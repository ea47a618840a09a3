"""What every test gets: few threads, no hub, hypothesis profiles, no thread left behind."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
NUM_TORCH_THREADS = 1  # the models are tiny: a second thread only waits
LEAK_GRACE_SECONDS = 2.0

hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True
)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2_000, print_blob=True)
hypothesis.settings.load_profile("default")  # `pytest --hypothesis-profile=thorough` wins over this


def set_environment() -> None:
    """Set what torch and the hub client read from the environment when a test first imports them.

    The environment and not `torch.set_num_threads`, so that tests which need no torch do not load
    it, and a Python that a test starts gets the same settings.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(NUM_TORCH_THREADS)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # its thread outlives the test that starts it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(NUM_TORCH_THREADS)


set_environment()  # before other conftest files, which import torch and transformers


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """The folder of the trained Qwen3 checkpoint that the repository ships."""
    return ROOT / "examples" / "tiny_qwen3"


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fail a test after which a thread runs that did not run before it.

    Engines, streams and executors end with the test that made them, at most `LEAK_GRACE_SECONDS`
    after it. Fixtures of a wider scope are set up before this one, so threads that they start at
    set-up are not counted.
    """
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + LEAK_GRACE_SECONDS
    while left := [thread for thread in threading.enumerate() if thread not in before]:
        left = [thread for thread in left if not is_foreign(thread)]
        if not left:
            return
        if time.monotonic() > deadline:
            names = ", ".join(thread.name for thread in left)
            pytest.fail(f"threads outlived the test: {names}; close what started them")
        left[0].join(timeout=0.01)


def is_foreign(thread: threading.Thread) -> bool:
    """Whether `thread` is a library's helper that lives as long as the process or its loop."""
    return (
        thread.name.startswith("asyncio_")  # the loop's default executor: ended with the loop
        or thread.name.startswith("nanoserve-grammar")  # as old as the first grammar of an engine
        or type(thread).__name__
        == "TMonitor"  # tqdm's monitor: one daemon per process, never ended
        or type(thread).__name__
        == "_DummyThread"  # a native thread (autograd's) that ran Python once
    )
