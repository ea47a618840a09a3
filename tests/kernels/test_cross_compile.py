"""The kernels compiled for an H200 on any machine: nothing spills, and the pipelines are as deep as
they were asked to be (a page-table look-up in the wrong place halves decode attention's, silently).
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from typing import Any

import pytest

from nanoserve_core.kernels.decode_config import decode_config
from tests.house.source_tree import ROOT

KERNELS = ROOT / "nanoserve_core" / "kernels"
IMPORTED = re.compile(r"from nanoserve_core\.kernels\.(\w+) import")
LIMIT_SECONDS = 600
HEAD_DIM = 128
ELEMENT_NBYTES = 2
NUM_MULTIPROCESSORS = 132
SHARED_NBYTES = 233_472  # of a multiprocessor
RESERVED_NBYTES = 1_024  # of that, per program
NUM_REGISTERS = 65_536

pytestmark = [
    pytest.mark.skipif(
        platform.system() != "Linux" or platform.machine() != "x86_64",
        reason="the compiler of the triton wheel runs on Linux x86_64",
    ),
    pytest.mark.timeout(LIMIT_SECONDS + 10),
]


@pytest.fixture(scope="module")
def usages() -> list[dict[str, Any]]:
    """One `Usage` per launch, as JSON. Any: numbers and strings."""
    assert importlib.util.find_spec("triton"), "triton is not installed. Run `make setup`."
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cross_compile"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_nothing_spills(usages: list[dict[str, Any]]) -> None:
    spilled = [usage for usage in usages if usage["stack_nbytes"] > 0]

    assert not spilled


def test_every_kernel_of_triton_ops_is_compiled(usages: list[dict[str, Any]]) -> None:
    source = (KERNELS / "triton_ops.py").read_text(encoding="utf-8")
    files = [KERNELS / f"{name}.py" for name in IMPORTED.findall(source)]
    kernels = {path.stem for path in files if "@triton.jit" in path.read_text(encoding="utf-8")}

    compiled = {usage["kernel"].removesuffix("_kernel") for usage in usages}

    assert compiled >= kernels
    assert len(kernels) > 9


@pytest.mark.parametrize("block_n", [32, 64])
def test_decode_attention_keeps_all_its_stages_but_one_in_flight(
    usages: list[dict[str, Any]], block_n: int
) -> None:
    num_stages = decode_config(256, num_multiprocessors=NUM_MULTIPROCESSORS).num_stages
    tile_nbytes = 2 * block_n * HEAD_DIM * ELEMENT_NBYTES  # K and V
    decode = [
        usage
        for usage in usages
        if "decode_attention" in usage["launch"] and usage["launch"].endswith(f"tile {block_n}")
    ]

    buffers = {usage["launch"]: usage["shared_nbytes"] // tile_nbytes for usage in decode}

    assert buffers
    assert set(buffers.values()) == {num_stages - 1}


def test_all_programs_of_decode_attention_fit_at_once(usages: list[dict[str, Any]]) -> None:
    config = decode_config(256, num_multiprocessors=NUM_MULTIPROCESSORS)
    programs = config.num_programs // NUM_MULTIPROCESSORS
    decode = [
        usage
        for usage in usages
        if "decode_attention" in usage["launch"]
        and usage["launch"].endswith(f"tile {config.block_n}")
    ]

    registers = max(usage["registers"] for usage in decode) * 32 * config.num_warps
    shared = max(usage["shared_nbytes"] for usage in decode) + RESERVED_NBYTES

    assert programs * registers <= NUM_REGISTERS
    assert programs * shared <= SHARED_NBYTES
