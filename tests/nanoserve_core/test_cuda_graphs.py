"""Buckets, and what a graph is replaced by where nothing is captured."""

from __future__ import annotations

import pytest

from nanoserve_core.cuda_graphs import BUCKETS, PlainCalls, bucket_of, buckets_for


@pytest.mark.parametrize("max_num_rows", [1, 2, 3, 7, 40, 184, 256, 511, 512, 513, 600, 1024])
def test_every_number_of_rows_has_the_next_larger_bucket(max_num_rows: int) -> None:
    buckets = buckets_for(max_num_rows)

    assert buckets[-1] == max_num_rows
    assert list(buckets) == sorted(set(buckets))
    for num_rows in range(1, max_num_rows + 1):
        bucket = bucket_of(num_rows, buckets)
        assert bucket >= num_rows
        assert not [other for other in buckets if num_rows <= other < bucket]


def test_padding_costs_at_most_a_sixth_of_the_products_where_they_are_bound_by_arithmetic() -> None:
    large = [rows for rows in buckets_for(1024) if rows > 184]

    for before, rows in zip([BUCKETS[12], *large], large, strict=False):
        assert (rows - before - 1) / (before + 1) <= 0.17


def test_plain_calls_call_each_time() -> None:
    calls: list[str] = []
    plain = PlainCalls()

    for key in ("a", "b", "a"):
        plain.run(key, lambda key=key: calls.append(key))  # type: ignore[misc]  # a default binds it
    plain.clear()

    assert calls == ["a", "b", "a"]
