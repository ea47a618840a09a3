"""`RequestValidator`: refuses what can never run, before any work starts, naming the numbers.

Pure and thread-safe: doors call it in the caller's thread, so that the caller gets the exception.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoserve_core.errors import InvalidRequest, RequestTooLong
from nanoserve_core.grammar import Grammar

if TYPE_CHECKING:
    from collections.abc import Collection

    from nanoserve_core.request import Request
    from nanoserve_core.request_group import RequestGroup


@dataclass(frozen=True, kw_only=True)
class RequestValidator:
    """The limits a request is checked against. Calling it with a request raises `InvalidRequest` or
    returns None.
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    """Sequences that can run in one step: the most that a group may have."""

    def __call__(self, request: Request) -> None:
        """Raise `InvalidRequest` (or its `RequestTooLong`) when ``request`` is malformed or can
        never fit.
        """
        self._check_prompt(request)
        self._check_sampling_ids(request)
        self._check_doors_work(request)
        self._check_length(request)
        self._check_grammar(request)
        if request.group is not None:
            self._check_group(request, request.group)

    def max_total_tokens(self, request: Request) -> int:
        """Prompt plus the most tokens ``request`` may generate."""
        prompt_len, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        return self._longest if max_tokens is None else prompt_len + max_tokens

    @property
    def _longest(self) -> int:
        # The last sampled token ends its sequence before its K/V is computed: it needs no place in
        # the pool.
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)

    def _check_prompt(self, request: Request) -> None:
        if not request.prompt_token_ids:
            raise InvalidRequest(
                f"request {request.request_id}: the prompt has 0 tokens: expected at least 1. "
                "Start it with a BOS token or text."
            )
        self._check_ids(request, "prompt_token_ids", request.prompt_token_ids)

    def _check_sampling_ids(self, request: Request) -> None:
        sampling = request.sampling
        self._check_ids(request, "stop_token_ids", sampling.stop_token_ids)
        self._check_ids(request, "logit_bias", sampling.logit_bias)
        for word in sampling.bad_words_ids:
            self._check_ids(request, "bad_words_ids", word)
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(sampling, name)
            if number is not None and number > self.vocab_size:
                raise InvalidRequest(
                    f"request {request.request_id}: {name}={number} exceeds the vocabulary of "
                    f"{self.vocab_size} tokens."
                )

    def _check_ids(self, request: Request, name: str, token_ids: Collection[int]) -> None:
        if not token_ids or (
            set(map(type, token_ids)) == {int}
            and min(token_ids) >= 0
            and max(token_ids) < self.vocab_size
        ):
            return  # no Python code per id: it would cost half a millisecond for 2,000 of them
        for token_id in token_ids:
            if not hasattr(token_id, "__index__") or isinstance(token_id, bool):
                raise InvalidRequest(
                    f"request {request.request_id}: {name} contains {token_id!r} "
                    f"({type(token_id).__name__}): "
                    "expected integer token ids."
                )
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"request {request.request_id}: {name} contains {token_id}, which is not in "
                    "the vocabulary: expected "
                    f"0 <= id < {self.vocab_size}. Was it made with another model's tokenizer?"
                )

    def _check_doors_work(self, request: Request) -> None:
        sampling = request.sampling
        if sampling.stop and request.should_stop is None:
            raise InvalidRequest(
                f"request {request.request_id}: stop={sampling.stop!r} needs text, and the engine "
                "knows token ids only. "
                "Give the request should_stop=TextStop(tokenizer, sampling), or use stop_token_ids."
            )
        if sampling.bad_words:
            raise InvalidRequest(
                f"request {request.request_id}: bad_words={sampling.bad_words!r} needs a "
                "tokenizer. "
                "Turn them into bad_words_ids with nanoserve_core.text.bad_words_to_ids."
            )

    def _check_grammar(self, request: Request) -> None:
        if request.grammar is None or not isinstance(request.grammar, Grammar):
            return  # none (asking a Protocol costs 40 us), or one that a plugin is to make
        num_prompt = len(request.prompt_token_ids)
        needed = request.grammar.min_tokens()
        available = self.max_total_tokens(request) - num_prompt
        if 0 < available < needed:
            raise InvalidRequest(
                f"request {request.request_id}: the shortest output found for its grammar takes "
                f"{needed} tokens, but it may generate {available} (max_tokens="
                f"{request.sampling.max_tokens}, prompt of {num_prompt}): expected at least "
                f"{needed}. Raise max_tokens, shorten the prompt, or ask for less."
            )

    def _check_length(self, request: Request) -> None:
        prompt_len, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        self._check_pool(request, prompt_len, f"the prompt of {prompt_len} tokens")
        self._check_context(request, prompt_len, f"the prompt of {prompt_len} tokens")
        if max_tokens is None:
            self._check_context(
                request, prompt_len + 1, f"the prompt of {prompt_len} tokens and one new token"
            )
        elif max_tokens > 0:
            what = f"the prompt of {prompt_len} tokens and max_tokens={max_tokens}"
            self._check_context(request, prompt_len + max_tokens, what)
            self._check_pool(request, prompt_len + max_tokens - 1, what)

    def _check_group(self, request: Request, group: RequestGroup) -> None:
        sampling, size = request.sampling, len(group.request_ids)
        if sampling.n > 1 or not sampling.max_tokens or sampling.prompt_logprobs is not None:
            raise InvalidRequest(
                f"request {request.request_id}: n={sampling.n}, max_tokens={sampling.max_tokens}, "
                f"prompt_logprobs={sampling.prompt_logprobs} in a group: expected n=1, at least "
                "one token and no prompt_logprobs. Make a member for each sample."
            )
        if size > self.max_num_seqs:
            raise RequestTooLong(
                f"request {request.request_id}: its group has {size} members, which sample in the "
                f"same step: expected at most {self.max_num_seqs} (max_num_seqs, and "
                "max_num_batched_tokens). Split the batch, or raise them."
            )
        need = sum(-(-(total - 1) // self.block_size) for total in group.num_total_tokens)
        if need > self.num_blocks:
            raise RequestTooLong(
                f"request {request.request_id}: the {size} members of its group, which run "
                f"together, need {need} KV blocks of {self.block_size} tokens, but the pool has "
                f"{self.num_blocks}. Split the batch or give the engine more kv_cache_memory_bytes."
            )

    def _check_context(self, request: Request, num_tokens: int, what: str) -> None:
        if num_tokens > self.max_model_len:
            raise RequestTooLong(
                f"request {request.request_id}: {what} need {num_tokens} positions, but "
                "max_model_len is "
                f"{self.max_model_len}. Shorten the prompt, lower max_tokens, or start the engine "
                "with a larger max_model_len."
            )

    def _check_pool(self, request: Request, num_kv_tokens: int, what: str) -> None:
        need = -(-num_kv_tokens // self.block_size)
        if need > self.num_blocks:
            raise RequestTooLong(
                f"request {request.request_id}: {what} need {need} KV blocks of {self.block_size} "
                "tokens, but the pool has "
                f"{self.num_blocks}. Shorten the request or give the engine more "
                "kv_cache_memory_bytes."
            )
