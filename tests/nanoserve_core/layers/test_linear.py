"""Linear layers, fused or not, against `torch.nn.functional.linear`."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from nanoserve_core.kernels import reference
from nanoserve_core.layers.linear import Linear, SplitLinear


def test_linear_has_weight_and_bias() -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    out = torch.empty(3, 5)

    Linear(weight, bias)(x, ops=reference, out=out)

    torch.testing.assert_close(out, linear(x, weight, bias))


def test_weight_is_shared_and_not_copied() -> None:
    weight, out = torch.zeros(5, 8), torch.empty(1, 5)
    layer = Linear(weight)

    weight.fill_(1.0)
    layer(torch.ones(1, 8), ops=reference, out=out)

    assert (out == 8).all()


def test_split_linear_puts_its_parts_side_by_side() -> None:
    x, weights = torch.randn(3, 8), [torch.randn(size, 8) for size in (4, 2, 2)]
    biases = [torch.randn(len(weight)) for weight in weights]
    out = torch.empty(3, 8)
    parts = [Linear(weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    SplitLinear(*parts)(x, ops=reference, out=out)

    torch.testing.assert_close(out, linear(x, torch.cat(weights), torch.cat(biases)))
