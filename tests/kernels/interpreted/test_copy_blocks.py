"""copy_blocks."""

from __future__ import annotations

import pytest
import torch

from nanoserve_core.kernels import reference
from nanoserve_core.kernels.copy_blocks import copy_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_copy_blocks_copies_k_and_v_of_every_layer(dtype: torch.dtype) -> None:
    cache = torch.randn(2, 3, 7, 16, 2, 16).to(dtype)
    sources, destinations = torch.tensor([4, 0]), torch.tensor([1, 6])
    expected = cache.clone()
    reference.copy_blocks(expected, sources=sources, destinations=destinations)

    copy_blocks(cache, sources=sources, destinations=destinations)

    assert torch.equal(cache, expected)


def test_copy_blocks_takes_sizes_that_fill_no_tile_and_caches_with_gaps() -> None:
    cache = torch.randn(2, 2, 4, 48, 3, 64)[:, :, ::2, :17]
    sources, destinations = torch.tensor([1], dtype=torch.int32), torch.tensor([0])
    expected = cache.clone()
    expected[:, :, 0] = expected[:, :, 1]

    copy_blocks(cache, sources=sources, destinations=destinations)

    assert torch.equal(cache, expected)


@pytest.mark.parametrize(("sources", "destinations"), [([], []), ([-1], [1]), ([1], [-1])])
def test_copy_blocks_copies_nothing(sources: list[int], destinations: list[int]) -> None:
    cache = torch.randn(2, 1, 3, 16, 1, 16)
    expected = cache.clone()

    copy_blocks(
        cache,
        sources=torch.tensor(sources, dtype=torch.int64),
        destinations=torch.tensor(destinations, dtype=torch.int64),
    )

    assert torch.equal(cache, expected)


def test_copy_blocks_names_the_argument_that_does_not_fit() -> None:
    cache, ids = torch.zeros(2, 1, 3, 16, 2, 16), torch.tensor([0])

    with pytest.raises(ValueError, match="cache has strides"):
        copy_blocks(cache.transpose(3, 4), sources=ids, destinations=ids)
    with pytest.raises(ValueError, match="destinations has shape"):
        copy_blocks(cache, sources=ids, destinations=torch.tensor([0, 1]))
