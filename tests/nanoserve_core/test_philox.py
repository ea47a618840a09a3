"""Philox against the published vectors of Random123; draws and derived seeds."""

from __future__ import annotations

import numpy as np
import pytest

from nanoserve_core.philox import derive_seed, philox4x32, uniform

ONES = 0xFFFFFFFF
MAX_SEED = 2**64 - 1

# counter, key, expected: the philox4x32-10 lines of kat_vectors in DEShawResearch/random123.
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def seeds_of(*seeds: int) -> np.ndarray:
    return np.array(seeds, dtype=np.uint64)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_words_are_those_of_the_published_vectors(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    words = philox4x32(seeds_of(*counter)[:, None], seeds_of(*key)[:, None])

    assert words[:, 0].tolist() == expected


def test_columns_do_not_depend_on_each_other() -> None:
    counters, keys, expected = (
        seeds_of(*np.ravel(each)) for each in zip(*KNOWN_ANSWERS, strict=True)
    )

    words = philox4x32(counters.reshape(3, 4).T, keys.reshape(3, 2).T)

    assert words.T.ravel().tolist() == expected.tolist()


def test_draw_is_made_of_the_first_52_bits() -> None:
    words = [0x6627E8D5, 0xE169C58D]  # of the all-zero vector above
    bits = (words[0] << 32 | words[1]) >> 12

    draw = uniform(seeds_of(0), np.array([0]))

    assert draw.tolist() == [(bits + 0.5) / 2**52]


def test_seed_is_the_key_and_position_the_counter() -> None:
    seed, position = 0x299F31D0A4093822, 0x85A308D3243F6A88 >> 1
    words = philox4x32(
        seeds_of(position & ONES, position >> 32, 0, 0)[:, None],
        seeds_of(0xA4093822, 0x299F31D0)[:, None],
    )

    draw = uniform(seeds_of(seed), np.array([position]))

    assert draw.tolist() == [
        (int(words[0, 0] << np.uint64(20) | words[1, 0] >> np.uint64(12)) + 0.5) / 2**52
    ]


def test_draws_are_strictly_between_0_and_1_and_uniform() -> None:
    num_draws, num_bins = 100_000, 50

    draws = uniform(np.full(num_draws, 7, dtype=np.uint64), np.arange(num_draws))

    assert draws.min() > 0
    assert draws.max() < 1
    counts = np.histogram(draws, bins=num_bins, range=(0, 1))[0]
    expected = num_draws / num_bins
    assert ((counts - expected) ** 2 / expected).sum() < 49 + 5 * np.sqrt(2 * 49)


def test_largest_possible_draw_is_below_1() -> None:
    assert (2**52 - 1 + 0.5) * 2.0**-52 < 1


def test_draw_is_the_same_alone_and_in_any_company() -> None:
    seeds, positions = seeds_of(3, MAX_SEED, 2**63, 0), np.array([0, 5, 2**40, 1])

    together = uniform(seeds, positions)

    alone = [uniform(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone


def test_first_sample_keeps_the_seed_and_others_get_their_own() -> None:
    seeds = [derive_seed(42, index) for index in range(1_000)]

    assert seeds[0] == 42
    assert len(set(seeds)) == 1_000
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


def test_derived_seed_is_the_same_every_time() -> None:
    counter = seeds_of(1, 0, 0, 1)[:, None]
    words = philox4x32(counter, seeds_of(42, 0)[:, None])

    seed = derive_seed(42, 1)

    assert seed == int(words[0, 0]) | int(words[1, 0]) << 32


def test_derived_seed_takes_the_largest_seed_and_index() -> None:
    assert 0 <= derive_seed(MAX_SEED, MAX_SEED) <= MAX_SEED
