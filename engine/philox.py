"""Philox-4x32-10, the counter-based generator behind every random decision of a rollout.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
One function of plain operators serves Python integers and int64 arrays or tensors (whose
product wraps modulo 2^64, which leaves the bits right): the same words everywhere.
"""

from __future__ import annotations

M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
ROUNDS = 10

DEPTH_BLOCK = WORD  # vocabulary block reserved for exit depths drawn per position


def philox(counter, key) -> tuple:
    """Four 32-bit words for a counter of four and a key of two 32-bit words.

    Each word may be a Python int or an int64 tensor/array; shapes broadcast. Words come
    back as the same kind, in 0..2^32-1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = c0 * M0, c2 * M1
        c0, c1, c2, c3 = (second >> 32) & WORD ^ c1 ^ k0, second & WORD, (first >> 32) & WORD ^ c3 ^ k1, first & WORD
        k0, k1 = (k0 + W0) & WORD, (k1 + W1) & WORD
    return c0, c1, c2, c3


def split64(value: int) -> tuple[int, int]:
    """The low and the high 32-bit word of a 64-bit number."""
    return value & WORD, (value >> 32) & WORD


def depth_word(seed: int, uid: int, position: int) -> int:
    """The 32-bit word that draws the exit depth of (uid, position)."""
    return philox((*split64(uid), position, DEPTH_BLOCK), split64(seed))[0]
