"""Thresholds guessed from a sample against sorted keys."""

import jax.numpy as jnp
import numpy as np
import pytest

from sail_jax.merging import counting
from sail_jax.merging.guessing import GUESSES, guess
from sail_jax.merging.steps import Piece, fingerprint, kernel

SIZE, PIECES, TASKS = 1 << 10, 4, 2


def _plain(piece, keys, weight):
    return keys


class Keys:
    """A walk over keys `[piece, task, entry]`, with a given sample."""

    tasks, bits = TASKS, 16

    def __init__(self, keys, sample):
        self.pieces, self.drawn, self.counts = keys, sample, 0

    def sample(self, summary):
        every = summary(Piece(fingerprint("a")), jnp.asarray(self.pieces[0]), 1)
        assert set(np.asarray(every).flat) <= set(self.pieces[0].flat)
        if self.drawn is None:
            return None
        return self.drawn, self.drawn.shape[1] / (self.pieces.size / TASKS)

    def keep(self, summary, add):
        self.counts += 1
        place = Piece(fingerprint("a"), 0, np.uint32(SIZE))
        parts = [summary(place, jnp.asarray(keys), 1) for keys in self.pieces]
        total = parts[0][0]
        for part, _ in parts[1:]:
            total = add(total, part)
        return total, [own for _, own in parts]


def _number(wide):
    return (np.asarray(wide.hi, int) << 16) + np.asarray(wide.lo, int)


def _found(keys, sample, ranks):
    visit = Keys(keys.astype(np.uint32), None if sample is None else sample.astype(np.uint32))
    return guess(visit, kernel(_plain), [counting.wide(np.array(r)) for r in ranks]), visit.counts


@pytest.mark.slow
@pytest.mark.parametrize("least", [0, SIZE])
def test_a_guess_is_the_key_of_the_rank(least):
    """This holds if the smallest keys are missing in the sample; the guess is then corrected."""
    rng = np.random.default_rng(0)
    keys = rng.geometric(0.2, (PIECES, TASKS, SIZE))
    flat = keys.swapaxes(0, 1).reshape(TASKS, -1)
    ranks = [[0, 1000], [500, 2000]]
    found, counts = _found(keys, np.sort(flat)[:, least::3], ranks)
    assert found is not None
    assert counts == 1 if not least else 1 < counts <= GUESSES
    for rank, key, left in zip(ranks, found[0], found[1], strict=True):
        for task, k in enumerate(rank):
            want = np.sort(flat[task])[-k] if k else np.iinfo(np.uint32).max
            assert key[task] == want
            assert _number(left)[task] == k - (flat[task] > want).sum()
    for piece, ties in zip(keys, found[2], strict=True):
        for key, own in zip(found[0], ties, strict=True):
            equal = (piece == key[:, None]).sum(1)
            assert (_number(own.count) == equal).all()
            assert (own.rows.sum(1) == equal).all()


@pytest.mark.slow
def test_what_repeats_no_key_is_not_guessed():
    rng = np.random.default_rng(1)
    keys = rng.permutation(PIECES * TASKS * SIZE).reshape(PIECES, TASKS, SIZE)
    sample = keys.swapaxes(0, 1).reshape(TASKS, -1)[:, ::4]
    assert _found(keys, sample, [[100, 900]]) == (None, 0)
    assert _found(keys, None, [[100, 900]]) == (None, 0)
    # A sample of something else never shows a key that is proven.
    found, counts = _found(keys, np.zeros((TASKS, 64)), [[100, 900]])
    assert found is None
    assert counts <= GUESSES
