"""The stream of random bits: what its number stands for, and the draws by their definition."""

import numpy as np
import pytest

from sail_jax.merging import random_bits, transforms
from sail_jax.merging.steps import Piece, fingerprint

# The first draws of each number of the stream, times 2^24. Whoever changes a draw adds a number.
DRAWS = {1: [[7079345, 5899174, 3514160, 11715893], [13372225, 5612539, 8476568, 322610]]}


def mix(x):
    """The permutation of 32-bit words, in Python's integers."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def by_definition(words, index):
    """A draw of the stream with these words (of the key, then of its name), times 2^24."""
    low, high = 0x9E3779B9, 0x85EBCA6B
    for word in words:
        low = mix(low ^ word)
        high = mix((high + word * 0xC2B2AE35 + low) % 2**32)
    return mix((mix(index ^ low) + high) % 2**32) >> 8


def drawn(seed, path, models, entries):
    key = random_bits.key_words(random_bits.key(seed), "a test")
    draw = transforms.uniform(key, Piece(fingerprint(path)), (models, entries))
    return [(np.asarray(draw(k)) * 2**24).astype(int).tolist() for k in range(models)]


@pytest.mark.slow
def test_the_number_of_the_stream_stands_for_its_draws():
    assert [*DRAWS] == [random_bits.STREAM]
    assert drawn(7, "a/b", 2, 4) == DRAWS[random_bits.STREAM]


@pytest.mark.slow
def test_draws_follow_their_definition():
    words = [*divmod(7, 1 << 32), *map(int, fingerprint("a/b"))]
    found = drawn(7, "a/b", 2, 4)
    assert found == [[by_definition([*words, k], i) for i in range(4)] for k in range(2)]


def test_the_example_of_the_module():
    (draws,) = drawn(0, "block/kernel", 1, 4)
    assert [f"{draw / 2**24:.4f}" for draw in draws] == ["0.3716", "0.6387", "0.5454", "0.0765"]
    assert all(f"{draw / 2**24:.4f}" in random_bits.__doc__ for draw in draws)
