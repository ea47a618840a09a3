"""`BatchSizes` answers as a plain list of all sizes would, and keeps less."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nanoserve_core.batch_sizes import BatchSizes


@given(sizes=st.lists(st.integers(0, 9), max_size=40), step=st.integers(0, 45))
def test_largest_since_is_the_maximum_of_the_steps_from_there_on(
    sizes: list[int], step: int
) -> None:
    batches = BatchSizes()

    for size in sizes:
        batches.add(size)

    assert batches.largest_since(step) == max(sizes[step:], default=0)
    assert batches.num_steps == len(sizes)
