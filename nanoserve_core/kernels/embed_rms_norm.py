"""Embedding rows and the first norm: the residual stream begins here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve_core.kernels.launch_errors import shape_error
from nanoserve_core.kernels.rms_norm import check_norm_arguments, normalize, num_warps_for

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit(do_not_specialize=["vocab_size"], do_not_specialize_on_alignment=["token_ptr"])
def embed_rms_norm_kernel(
    token_ptr,
    embedding_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    eps,
    vocab_size,
    embedding_row_stride,
    residual_row_stride,
    out_row_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """grid (tokens,): one row per program, whole."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    in_row = columns < SIZE
    token = tl.load(token_ptr + row).to(tl.int64)
    is_token = (token >= 0) & (token < vocab_size)
    dtype = out_ptr.dtype.element_ty
    embedding_row_ptr = embedding_ptr + tl.where(is_token, token, 0) * embedding_row_stride
    x = tl.load(embedding_row_ptr + columns, mask=in_row, other=0.0)
    x = tl.where(is_token, x, 0.0).to(dtype)
    tl.store(residual_ptr + row * residual_row_stride + columns, x, mask=in_row)
    weight = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
    y = normalize(x.to(tl.float32), eps, SIZE, dtype) * weight
    tl.store(out_ptr + row * out_row_stride + columns, y.to(dtype), mask=in_row)


def embed_rms_norm(
    token_ids: Tensor,
    embedding: Tensor,
    *,
    weight: Tensor,
    eps: float,
    residual: Tensor,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """residual = embedding[token_ids]; out = rms_norm(residual).

    token_ids: [tokens] integers; embedding: [vocab_size, size]; weight: [size]; residual, out:
    [tokens, size]. An id outside the vocabulary gives zeros: padding rows may hold anything.
    ``pdl``: see `rms_norm`.
    """
    op = "embed_rms_norm"
    check_norm_arguments(op, residual, weight=weight, out=out)
    num_tokens, size = residual.shape
    if token_ids.shape != (num_tokens,) or not token_ids.is_contiguous():
        raise shape_error(op, "token_ids", token_ids, (num_tokens,))
    vocab_size, embedding_size = embedding.shape
    if embedding_size != size or embedding.stride(1) != 1:
        raise shape_error(op, "embedding", embedding, ("vocab_size", size))
    embed_rms_norm_kernel[(num_tokens,)](
        token_ids,
        embedding,
        weight,
        residual,
        out,
        eps,
        vocab_size,
        embedding.stride(0),
        residual.stride(0),
        out.stride(0),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        PDL=pdl,
        num_warps=num_warps_for(size),
        launch_pdl=pdl,
    )
