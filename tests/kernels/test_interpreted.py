"""Every kernel in Triton's interpreter, on the CPU, against float64.

By hand, for one file or one test: TRITON_INTERPRET=1 pytest tests/kernels/interpreted -k silu
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys

import pytest

from tests.house.source_tree import ROOT

INTERPRETED = ROOT / "tests" / "kernels" / "interpreted"
LIMIT_SECONDS = 600

HAS_TRITON = importlib.util.find_spec("triton") is not None
NEEDS_TRITON = platform.system() == "Linux" and platform.machine() == "x86_64"


@pytest.mark.skipif(
    not HAS_TRITON and not NEEDS_TRITON, reason="no triton wheel exists for this platform"
)
@pytest.mark.timeout(LIMIT_SECONDS + 10)
def test_kernels_agree_with_float64_in_the_interpreter() -> None:
    assert HAS_TRITON, "triton is not installed, the kernels cannot be tested. Run `make setup`."

    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )

    assert result.returncode == 0, f"\n{result.stdout[-8000:]}\n{result.stderr[-2000:]}"
