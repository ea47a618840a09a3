"""Tests that need a CUDA device: `pytest -m gpu tests/gpu`. They never skip for want of one."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def cuda() -> None:
    """Fail at once, and clearly, where there is no device."""
    import torch

    if not torch.cuda.is_available():
        pytest.fail("tests marked gpu need a CUDA device and torch built for it; none was found")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed torch's generators before each test."""
    import torch

    torch.manual_seed(0)
