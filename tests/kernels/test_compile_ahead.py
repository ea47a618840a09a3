"""Inside `compiling_only` kernels are compiled, once each, and nothing runs."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.house.source_tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64",
    reason="the compiler of the triton wheel runs on Linux x86_64",
)
def test_launches_compile_once_and_do_not_run_and_other_threads_launch(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}

    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_ahead_launches"],
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads(result.stdout)
    assert found["counts"] == [2, 2, 4], "two kernels, each once for each size"
    assert "NoDevice" in found["elsewhere"], "a launch would need the device"
    assert found["is_restored"]
