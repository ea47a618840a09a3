"""`Preparation`: a call of `generate` as transformers prepared it, stopped before its first step.

transformers has no function that only prepares. So its `generate` runs up to the seam, and leaves
there by an exception.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_generate_shim.explanation import Explanation

if TYPE_CHECKING:
    from hf_generate_shim.call import SampleCall
    from hf_generate_shim.route import Route


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What the seam would get, and the way it would go."""

    route: Route
    call: SampleCall | None = None
    """None when transformers would use another decoding loop than `_sample`."""

    @property
    def explanation(self) -> Explanation:
        """The route in words."""
        return Explanation(path=self.route.path, reasons=self.route.reasons)


class Prepared(BaseException):
    """Ends a `generate` that was only to be prepared, at the seam; never leaves this package.

    Not an `Exception`: nothing between the seam and `Handle.prepare` may take it for a failure.
    """

    def __init__(self, preparation: Preparation) -> None:
        super().__init__(str(preparation.explanation))
        self.preparation = preparation


class SilentStreamer:
    """Takes the place of the caller's streamer while a call is prepared."""

    def put(self, value: object) -> None:
        """Ignore the prompt."""

    def end(self) -> None:
        """Ignore the end."""
