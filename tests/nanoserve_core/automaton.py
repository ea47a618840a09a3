"""Grammars for tests: finite automata over token ids, and matchers that misbehave."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from nanoserve_core.request import Request
from tests.tiny_qwen3_models import EOS, tiny_qwen3

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nanoserve_core.grammar import Bitmask, GrammarMatcher
    from nanoserve_core.sampling_params import SamplingParams


def set_bit(row: Bitmask, token: int) -> None:
    """Allow a token."""
    row.view("uint32")[token // 32] |= 1 << token % 32


@dataclass(frozen=True)
class Automaton:
    """A grammar: ``moves[state][token]`` is the next state; the states in ``ends`` may end.

    In a state without moves the matcher is finished. In the states of ``free`` anything may come
    and the matcher is not active; a token without a move stays.
    """

    moves: Mapping[int, Mapping[int, int]]
    ends: frozenset[int] = frozenset()
    free: frozenset[int] = frozenset()
    eos_token_id: int = EOS
    shortest: int = 0
    made: list[AutomatonMatcher] = field(default_factory=list)

    def matcher(self) -> GrammarMatcher:
        """A fresh one, also remembered in ``made``."""
        self.made.append(AutomatonMatcher(self))
        return self.made[-1]

    def min_tokens(self) -> int:
        """As it was told."""
        return self.shortest


class AutomatonMatcher:
    """State of an `Automaton`, and what it was asked."""

    def __init__(self, grammar: Automaton) -> None:
        self.grammar = grammar
        self.state = 0
        self.accepted: list[int] = []
        self.remaining: list[int | None] = []

    def is_active(self, remaining: int | None) -> bool:
        """See `GrammarMatcher`."""
        del remaining
        return self.state not in self.grammar.free

    def fill_bitmask(self, row: Bitmask, remaining: int | None) -> None:
        """See `GrammarMatcher`."""
        assert not row.any()
        self.remaining.append(remaining)
        for token in self.grammar.moves.get(self.state, ()):
            set_bit(row, token)
        if self.state in self.grammar.ends:
            set_bit(row, self.grammar.eos_token_id)

    def accept(self, token_id: int) -> None:
        """See `GrammarMatcher`."""
        self.accepted.append(token_id)
        moves = self.grammar.moves.get(self.state, {})
        if token_id not in moves and self.is_active(None):
            raise ValueError(f"token {token_id} in state {self.state}")
        self.state = moves.get(token_id, self.state)

    def is_finished(self) -> bool:
        """See `GrammarMatcher`."""
        return self.state not in self.grammar.free and not self.grammar.moves.get(self.state)


class RaisingMatcher:
    """Raises from the method it is told, from the ``after``-th token on."""

    def __init__(self, method: str, after: int = 0) -> None:
        self._method = method
        self._after = after
        self._num_accepted = 0

    def matcher(self) -> GrammarMatcher:
        """It is its own grammar."""
        self._fail_in("matcher")
        return self

    def min_tokens(self) -> int:
        """Promises nothing."""
        return 0

    def is_active(self, remaining: int | None) -> bool:
        """Always, if it does not raise."""
        del remaining
        self._fail_in("is_active")
        return True

    def fill_bitmask(self, row: Bitmask, remaining: int | None) -> None:
        """Everything, nothing, or an exception."""
        del remaining
        self._fail_in("fill_bitmask")
        if self._method != "nothing" or self._num_accepted < self._after:
            row[:] = -1

    def accept(self, token_id: int) -> None:
        """Counts."""
        del token_id
        self._num_accepted += 1
        self._fail_in("accept")

    def is_finished(self) -> bool:
        """Never."""
        self._fail_in("is_finished")
        return False

    def _fail_in(self, method: str) -> None:
        if method == self._method and self._num_accepted >= self._after:
            raise OSError(f"{method} is broken")


def constrained(
    request_id: str, grammar: object, sampling: SamplingParams, prompt: tuple[int, ...] = (1, 2, 3)
) -> Request:
    """A request with a grammar."""
    return Request(
        request_id=request_id, prompt_token_ids=prompt, sampling=sampling, grammar=grammar
    )


def masked_greedy(grammar: Automaton, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Transformers' most likely tokens among those that the automaton allows, one prompt alone."""
    model, state, tokens = tiny_qwen3(), 0, list[int]()
    while len(tokens) < max_tokens:
        with torch.no_grad():
            scores = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
        moves = grammar.moves.get(state, {})
        if state not in grammar.free:
            allowed = [*moves, *([EOS] if state in grammar.ends else [])]
            mask = torch.full_like(scores, -torch.inf)
            mask[allowed] = 0
            scores = scores + mask
        tokens.append(int(scores.argmax()))
        if tokens[-1] == EOS:
            break
        state = moves.get(tokens[-1], state)
        if state not in grammar.free and not grammar.moves.get(state):
            break
    return tuple(tokens)
