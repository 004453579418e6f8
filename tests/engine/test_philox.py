"""Philox-4x32-10 against the published vectors (Random123, kat_vectors), in three number systems."""

import numpy as np
import pytest
import torch

from engine.philox import DEPTH_BLOCK, depth_word, philox, split64

ONES = 0xFFFFFFFF
VECTORS = [  # counter, key, words
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize("counter, key, words", VECTORS)
def test_published_vectors_in_python_integers(counter, key, words):
    assert philox(counter, key) == words


@pytest.mark.parametrize("make", [
    lambda values: torch.tensor(values, dtype=torch.int64),
    lambda values: np.array(values, dtype=np.int64),
], ids=["torch", "numpy"])
def test_published_vectors_as_one_batch(make):
    """Counters as int64 columns, whose products wrap; keys as columns too."""
    counter = [make([vector[0][word] for vector in VECTORS]) for word in range(4)]
    key = [make([vector[1][word] for vector in VECTORS]) for word in range(2)]
    found = [column.tolist() for column in philox(counter, key)]
    assert list(zip(*found, strict=True)) == [vector[2] for vector in VECTORS]


def test_the_three_number_systems_agree_on_random_words():
    generator = np.random.default_rng(0)
    counter = generator.integers(0, 2**32, (4, 300), dtype=np.int64)
    key = (int(generator.integers(2**32)), int(generator.integers(2**32)))
    arrays = philox(tuple(counter), key)
    tensors = philox(tuple(torch.from_numpy(counter)), key)
    for column in range(300):
        plain = philox(tuple(counter[:, column].tolist()), key)
        assert plain == tuple(int(words[column]) for words in arrays)
        assert plain == tuple(int(words[column]) for words in tensors)


def test_counters_broadcast():
    """A column of rows against a row of blocks, as the sampler uses them."""
    rows, blocks = np.array([[3], [4]]), np.array([[0, 1, 2]])
    found = philox((rows, 7, 9, blocks), (1, 2))[0]
    assert found.shape == (2, 3)
    assert found[1, 2] == philox((4, 7, 9, 2), (1, 2))[0]


def test_split64_and_depth_word_use_every_bit():
    assert split64(0x0123456789ABCDEF) == (0x89ABCDEF, 0x01234567)
    assert DEPTH_BLOCK == ONES  # no vocabulary has a block of that number
    base = depth_word(5, 6, 7)
    assert base == philox((6, 0, 7, DEPTH_BLOCK), (5, 0))[0]
    for other in ((5 + 2**32, 6, 7), (5, 6 + 2**32, 7), (5, 6 + 2**63, 7), (4, 6, 7), (5, 6, 8)):
        assert depth_word(*other) != base
