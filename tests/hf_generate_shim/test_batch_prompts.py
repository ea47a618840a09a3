"""What counts as a prompt of continuous batching."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_generate_shim import TokenIdOutOfRange
from hf_generate_shim.batch_prompts import read_prompt
from nanoserve_core.errors import InvalidRequest


@pytest.mark.parametrize(
    "given",
    [[3, 0, 9], (3, 0, 9), torch.tensor([3, 0, 9]), np.array([3, 0, 9]), list(np.array([3, 0, 9]))],
    ids=["list", "tuple", "tensor", "array", "numpy integers"],
)
def test_flat_integers_are_read(given: object) -> None:
    assert read_prompt(given, 10) == (3, 0, 9)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ([], InvalidRequest, "0 tokens"),
        ([1, 10], TokenIdOutOfRange, "token 1 of the prompt is 10"),
        ([-1], TokenIdOutOfRange, "expected 0 <= id < 10"),
        ([1.0], InvalidRequest, "expected a list of integers"),
        ([[1, 2]], InvalidRequest, "not a batch"),
        (torch.tensor([[1, 2]]), InvalidRequest, "not a batch"),
        ("text", InvalidRequest, "expected a list of integers"),
        (5, InvalidRequest, "expected a list of integers"),
    ],
    ids=["empty", "too large", "negative", "float", "batch", "2-d", "text", "number"],
)
def test_everything_else_is_refused(
    given: object,
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        read_prompt(given, 10)
