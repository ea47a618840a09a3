"""The same random numbers in every run."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed torch's generator before each test."""
    torch.manual_seed(0)
