"""The embedding look-up."""

from __future__ import annotations

import pytest
import torch

from nanoserve_core.layers.embedding import embed


def test_rows_are_looked_up() -> None:
    weight, out = torch.randn(10, 4), torch.empty(3, 4)

    embed(weight, torch.tensor([9, 0, 9]), out=out)

    assert torch.equal(out, weight[[9, 0, 9]])


def test_id_outside_the_vocabulary_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        embed(torch.randn(10, 4), torch.tensor([10]), out=torch.empty(1, 4))
