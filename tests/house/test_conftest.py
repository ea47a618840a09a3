"""The checks that conftest.py puts on every test do bite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.house.source_tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path

LEAKY = """
import threading

def test_that_leaves_a_thread():
    threading.Thread(target=threading.Event().wait, name="forgotten-engine", daemon=True).start()

def test_that_joins_its_thread():
    thread = threading.Thread(target=print)
    thread.start()
    thread.join()
"""


def test_thread_that_outlives_its_test_fails_that_test_only(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_leaky.py").write_text(LEAKY)

    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "threads outlived the test: forgotten-engine" in result.stdout
    assert "2 passed, 1 error" in result.stdout


def test_torch_takes_two_threads_at_most() -> None:
    import torch

    assert torch.get_num_threads() <= 2
