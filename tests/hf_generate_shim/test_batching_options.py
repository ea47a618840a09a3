"""What is read from a `ContinuousBatchingConfig`."""

from __future__ import annotations

import logging

import pytest
from transformers.generation import ContinuousBatchingConfig

from hf_generate_shim.batching_options import BatchingOptions, BatchingOptionsReader
from nanoserve_core.errors import ConfigError

LOGGER = "hf_generate_shim.batching_options"


def test_seed_and_logprobs_are_read() -> None:
    config = ContinuousBatchingConfig(seed=3, return_logprobs=True)

    found = BatchingOptionsReader().read(config)

    assert found == BatchingOptions(seed=3, return_logprobs=True)


def test_no_config_means_defaults() -> None:
    assert BatchingOptionsReader().read(None) == BatchingOptions()


def test_what_is_left_alone_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = BatchingOptionsReader()

    with caplog.at_level(logging.INFO, LOGGER):
        reader.read(ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256, seed=1))
        reader.read(ContinuousBatchingConfig(num_blocks=32, scheduler_type="prefill_first"))
        reader.read(ContinuousBatchingConfig(num_blocks=64))

    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "max_batch_tokens=256, num_blocks=64 " in lines[0]
    assert "seed" not in lines[0]
    assert "scheduler_type='prefill_first'" in lines[1]
    assert "num_blocks" not in lines[1]


def test_defaults_are_not_worth_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        BatchingOptionsReader().read(ContinuousBatchingConfig())

    assert not caplog.records


def test_another_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="dict: expected a ContinuousBatchingConfig"):
        BatchingOptionsReader().read({"num_blocks": 64})
