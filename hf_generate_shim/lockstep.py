"""`LockstepSampler`: one step of transformers' decoding loop, for all rows of a call at once.

The engine computes the logits of the rows that have not ended; here transformers' own processors
and criteria see what its loop would show them: the whole padded batch, step after step. Rows that
have ended stay in it. Their logits are zeros, where transformers computes them over pads.
"""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING

import torch

from nanoserve_core.errors import RequestFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_generate_shim.call import HFObject, SampleCall
    from hf_generate_shim.call_options import CallOptions
    from hf_generate_shim.pickers import TokenPicker


class LockstepSampler:
    """The `GroupSampler` of one call. Runs on the engine's thread, in the caller's context; read
    by the caller when all rows have ended.
    """

    def __init__(self, call: SampleCall, options: CallOptions, pick: TokenPicker) -> None:
        self._call = call
        self._options = options
        self._pick = pick
        self._context = copy_context()
        num_rows, device, limits = call.num_rows, call.input_ids.device, options.row_max_tokens
        has_eos = any(hasattr(criterion, "eos_token_id") for criterion in call.stopping_criteria)
        self._has_pads = has_eos or limits is not None
        self._limits = None if limits is None else torch.tensor(limits, device=device)
        self._unfinished = torch.ones(num_rows, dtype=torch.long, device=device)
        self._has_ended = [False] * num_rows
        self._num_steps = 0
        self.sequences = call.input_ids
        """[num_rows, width + steps] int64; rows that have ended hold pads, as transformers' do."""
        self.scores: tuple[torch.Tensor, ...] = ()
        """Per step float32 [num_rows, vocab_size], after the processors; empty if not asked for."""
        self.logits: tuple[torch.Tensor, ...] = ()
        """Per step float32 [num_rows, vocab_size], as the processors left them."""
        self.logprobs: tuple[torch.Tensor, ...] = ()
        """Per step float32 [num_rows], of the chosen tokens; empty if not asked for."""
        self.error: BaseException | None = None
        """What a processor or criterion raised."""

    def __call__(self, logits: torch.Tensor, members: Sequence[int]) -> torch.Tensor:
        """See `GroupSampler`; ``members`` are the rows that have not ended."""
        try:
            return self._context.run(self._step, logits, list(members))
        except Exception as error:
            self.error = error
            raise
        except BaseException as error:  # SystemExit or the like must end the call, not the engine
            self.error = error
            raise RequestFailed(f"a processor or criterion raised {error!r}") from error

    def has_ended(self, row: int, num_tokens: int) -> bool:
        """Whether the token number ``num_tokens`` of a row was its last; asked once a step."""
        if num_tokens != self._num_steps:
            raise RequestFailed(
                f"row {row} has {num_tokens} tokens, but {self._num_steps} were chosen for it: "
                "expected the engine's sampler to ask the row's group. Is a plugin with "
                "nanoserve_sampler installed that does not? Remove it, or install without rng='hf' "
                "and call generate without processors and criteria of your own."
            )
        return self._has_ended[row]

    def _step(self, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        call = self._call
        processors: HFObject = call.logits_processor
        criteria: HFObject = call.stopping_criteria
        logits = self._with_ended_rows(logits.to(call.input_ids.device), rows)
        mode = self._options.logprobs
        logprobs = logits.log_softmax(-1) if mode == "raw_logprobs" else None
        scores = processors(self.sequences, logits)
        if call.wants_scores:
            self.scores += (scores,)
        if call.wants_logits:
            self.logits += (logits,)
        tokens = self._pick(scores, rows)
        if self._has_pads:
            pad = call.pad_token_id or 0
            tokens = tokens * self._unfinished + pad * (1 - self._unfinished)
        self.sequences = torch.cat([self.sequences, tokens[:, None]], dim=-1)
        shown = self.scores if call.wants_scores else None
        if mode is not None:
            self._keep_logprobs(scores.log_softmax(-1) if logprobs is None else logprobs, tokens)
        self._unfinished = self._unfinished & ~criteria(self.sequences, shown)
        self._note_ends()
        return tokens[rows]

    def _with_ended_rows(self, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        if len(rows) == self._call.num_rows:
            return logits
        whole = logits.new_zeros((self._call.num_rows, logits.shape[1]))
        whole[rows] = logits
        return whole

    def _keep_logprobs(self, logprobs: torch.Tensor, tokens: torch.Tensor) -> None:
        chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
        self.logprobs += (torch.where(self._unfinished.bool(), chosen, 0.0),)

    def _note_ends(self) -> None:
        """Without an end-of-sequence id rows go on until the last one has stopped."""
        self._num_steps += 1
        if self._limits is not None:
            self._unfinished = self._unfinished & (self._limits > self._num_steps)
        if not self._unfinished.any():
            self._has_ended = [True] * self._call.num_rows
        elif self._has_pads and self._unfinished.ndim == 1:  # a criterion may give [num_rows, 1]
            self._has_ended = [not unfinished for unfinished in self._unfinished.tolist()]
