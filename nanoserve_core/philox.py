"""Philox4x32-10: random numbers that are a pure function of (seed, position).

A token's draw depends on its request's seed and its absolute position alone: not on batch mates, on
the order of steps, on preemption or on run-ahead. No state, nothing to save. Source: Salmon,
Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11); constants and
known-answer vectors as in DEShawResearch/random123. Triton's `tl.randint4x(seed, position)`
computes the same words, so a kernel on a GPU can draw what the host draws.

No torch: seeds and positions are known to the host, also when tokens are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = TypeVar("Words", np.uint64, NDArray[np.uint64])

_MASK_32 = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_NUM_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.arange(_NUM_ROUNDS, dtype=np.uint64)[:, None, None] * np.array(
    [[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64
)
"""[rounds, 2, 1]: what is added to the two key words before each round."""

# Last counter word of derived seeds: draws of tokens have 0 there, so the two never meet.
_SEED_DOMAIN = np.uint64(1)


def philox4x32(counters: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Four random 32-bit words for each counter and key: [4, n], [2, n] -> [4, n].

    All words are uint64 below 2**32, the least significant first.
    """
    even, odd = counters[0::2], counters[1::2]
    for key in keys + _KEY_STEPS & _MASK_32:
        # Both products of a round at once; each word's products feed the other half.
        products = (even * _MULTIPLIERS)[::-1]
        even, odd = products >> _WORD ^ odd ^ key, products & _MASK_32
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number strictly between 0 and 1 for each (seed, position): [n], [n] -> [n].

    Made of the first 52 of Philox's bits and half a unit, so neither 0 nor 1 can come out.
    """
    unused = np.zeros_like(seeds)
    counters = np.stack((*_words(positions.astype(np.uint64)), unused, unused))
    words = philox4x32(counters, np.stack(_words(seeds)))
    bits = words[0] << np.uint64(20) | words[1] >> np.uint64(12)
    draws: NDArray[np.float64] = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return draws


def derive_seed(seed: int, index: int) -> int:
    """The seed of sample ``index`` of a request with ``seed``: both in [0, 2**64).

    Sample 0 has the seed itself; further ones take the first 64 bits of Philox with key ``seed``
    and counter (index's low word, its high word, 0, 1).
    """
    if index == 0:
        return seed
    counter = (*_words(np.uint64(index)), np.uint64(0), _SEED_DOMAIN)
    words = philox4x32(np.array([counter]).T, np.array([_words(np.uint64(seed))]).T)
    return int(words[0, 0]) | int(words[1, 0]) << 32


def _words(values: Words) -> tuple[Words, Words]:
    """The low and the high 32 bits."""
    return values & _MASK_32, values >> _WORD
