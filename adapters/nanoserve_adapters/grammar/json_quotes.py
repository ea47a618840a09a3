"""`QuoteState`: whether JSON text, read so far, ends inside a string.

In other texts it means nothing, and does no harm: closing only prefers other tokens then.
"""

from __future__ import annotations

from enum import IntEnum

_QUOTE, _BACKSLASH = b'"\\'


class QuoteState(IntEnum):
    """Where the next byte stands."""

    OUTSIDE = 0
    INSIDE = 1
    ESCAPED = 2

    def after(self, text: bytes) -> QuoteState:
        """The state when ``text`` has been read too."""
        state = self
        for byte in text:
            if state is QuoteState.ESCAPED:
                state = QuoteState.INSIDE
            elif byte == _QUOTE:
                state = QuoteState.OUTSIDE if state is QuoteState.INSIDE else QuoteState.INSIDE
            elif byte == _BACKSLASH and state is QuoteState.INSIDE:
                state = QuoteState.ESCAPED
        return state
