"""Options of an engine that are wrong by themselves are refused by name and value."""

from __future__ import annotations

from typing import Any

import pytest

from nanoserve_core import EngineConfig
from nanoserve_core.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("long_prefill_token_threshold", -1),
        ("long_prefill_token_threshold", 2.5),
        ("batch_invariant", "yes"),
        ("max_num_seqs", 0),
        ("gpu_memory_utilization", 1.5),
        ("kv_cache_memory_bytes", 0),
    ],
)
def test_a_wrong_value_is_named(name: str, value: Any) -> None:  # noqa: ANN401 - wrong on purpose
    with pytest.raises(ConfigError, match=rf"{name}={value!r} is not valid"):
        EngineConfig(**{name: value})
