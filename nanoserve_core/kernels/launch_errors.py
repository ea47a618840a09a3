"""The errors of the launchers. Only made when a check has failed: the checks themselves are single
comparisons in the launchers, because a prefill step makes some hundred launches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


def shape_error(op: str, name: str, tensor: Tensor, expected: Sequence[object]) -> ValueError:
    """``name`` has a shape that does not go with the other arguments of ``op``."""
    wanted = ", ".join(str(size) for size in expected)
    return ValueError(
        f"{op}: {name} has shape {list(tensor.shape)}, expected [{wanted}] to go with the other "
        f"arguments. Pass a tensor of that shape."
    )


def stride_error(op: str, name: str, tensor: Tensor, expected: str) -> ValueError:
    """``name`` is laid out in a way that ``op`` cannot read."""
    return ValueError(
        f"{op}: {name} has strides {list(tensor.stride())}, expected {expected}. "
        f"Pass {name}.contiguous(), or a view that keeps that order."
    )


def dtype_error(op: str, name: str, tensor: Tensor, *expected: torch.dtype) -> TypeError:
    """``name`` holds another kind of number than ``op`` reads."""
    wanted = " or ".join(str(dtype) for dtype in expected)
    return TypeError(
        f"{op}: {name} has dtype {tensor.dtype}, expected {wanted}. Convert it where it is made."
    )


def value_error(op: str, name: str, value: object, expected: str, remedy: str) -> ValueError:
    """``name`` has a value that ``op`` was not written for."""
    return ValueError(f"{op}: {name}={value}, expected {expected}. {remedy}")
