"""Libraries that are not installed with the development tools; ``make wild`` installs them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest


def optional(name: str) -> Any:  # noqa: ANN401 - these libraries publish no types
    """The module, or skip the tests of the file that asks; what its import warns of is its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason="not installed; `make wild` installs it")
