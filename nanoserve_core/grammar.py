"""`Grammar` and `GrammarMatcher`: what a request's output must match, whoever compiles it.

The engine asks a matcher which tokens may come next and tells it which one came. It knows no JSON,
no regular expression and no tokenizer; `nanoserve_adapters.grammar` compiles those, and hook
``nanoserve_grammar`` may bring others. No torch at run time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    Bitmask = np.ndarray[Any, np.dtype[np.int32]]  # Any: the shape


@runtime_checkable
class Grammar(Protocol):
    """Compiled once, shared by requests; any thread may call it."""

    def matcher(self) -> GrammarMatcher:
        """A fresh state for one sample; made on the engine's thread when a request is submitted."""
        ...

    def min_tokens(self) -> int:
        """Fewest tokens in which the matcher can end its output by itself, the end-of-sequence
        token included where it needs one.

        A request that may generate fewer is refused when it is submitted. 0: no such promise, or
        nothing need be matched. Any thread.
        """
        ...


class GrammarMatcher(Protocol):
    """How far one sample has come in its grammar. What it raises fails its request only.

    ``remaining`` counts the tokens the sample may still generate, the next one included; None: no
    limit is known. A matcher that closes its output in time needs it.
    """

    def is_active(self, remaining: int | None) -> bool:
        """Whether the next token is constrained; if not, it costs no mask. On the engine's thread,
        once or twice a step: must be cheap.
        """
        ...

    def fill_bitmask(self, row: Bitmask, remaining: int | None) -> None:
        """Set the bits of the tokens that may come next, in a row of zeros.

        ``row``: [ceil(vocab_size / 32)] int32; token ``t`` is bit ``t % 32`` of word ``t // 32``.
        Where the output may end, one of the model's end-of-sequence ids is set; the engine adds the
        others. Called only while active; may run on a pool's thread while the forward runs, never
        beside another call to the same matcher.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Take in the sampled token; engine's thread, every token in order, also while inactive.

        Only an end-of-sequence or stop id that ended the sample is not told.
        """
        ...

    def is_finished(self) -> bool:
        """Whether nothing may follow but an end-of-sequence token; asked after `accept`. The engine
        then ends the sample with reason ``stop``, also before ``min_tokens`` or with
        ``ignore_eos``.
        """
        ...
