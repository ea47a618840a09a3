"""One planned decode step over a `PagedCase`, for the tests in the interpreter and on the card."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanoserve_core.kernels.decode_attention import decode_attention
from nanoserve_core.kernels.decode_plan import DecodePlan, decode_plan

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.kernels.decode_config import DecodeConfig
    from tests.kernels.paged_cases import PagedCase


def plan_for(case: PagedCase, config: DecodeConfig) -> DecodePlan:
    """Memory for the steps of ``case``."""
    num_rows, num_heads, head_dim = case.query.shape
    return DecodePlan.allocate(
        config,
        max_rows=num_rows,
        max_kv_len=int(case.kv_lens.max()),
        num_heads=num_heads,
        num_kv_heads=case.key_cache.shape[2],
        head_dim=head_dim,
        device=case.query.device,
    )


def run_decode(
    case: PagedCase,
    config: DecodeConfig,
    *,
    shared: int = 0,
    plan: DecodePlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Plan and run one step; with ``shared``, all rows are one group that shares so many tokens.

    Fails unless the plan can be used again.
    """
    plan = plan_for(case, config) if plan is None else plan
    out = torch.full_like(case.query, torch.nan) if out is None else out
    lead = torch.zeros_like(case.kv_lens) if shared else None
    decode_plan(
        case.kv_lens,
        plan=plan,
        config=config,
        lead=lead,
        shared=None if lead is None else lead + shared,
    )
    decode_attention(
        case.query,
        key_cache=case.key_cache,
        value_cache=case.value_cache,
        block_tables=case.block_tables,
        kv_lens=case.kv_lens,
        plan=plan,
        config=config,
        out=out,
    )
    assert not plan.tickets.any()
    return out
