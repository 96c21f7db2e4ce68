"""Thresholds guessed from a sample against sorted keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from merge_cases import compilations

from sail_jax import methods
from sail_jax.merging import counting, streaming
from sail_jax.merging.engine import InMemory
from sail_jax.merging.guessing import GUESSES, guess
from sail_jax.merging.steps import Piece, fingerprint, kernel
from sail_jax.merging.work import FEW, SOME, Work

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


@pytest.mark.parametrize(
    ("size", "sampled"), [(SOME, [0]), (SOME - 1, []), (SOME + FEW + 1, []), (2 * SOME, [0, 1])]
)
def test_a_single_piece_is_sampled_and_counted_if_it_is_whole(size, sampled):
    x = InMemory.of("a", "base", np.zeros(size, np.float32))
    work = Work("a", x.shape, x.dtype, (x,), x, np.ones(1), methods.ties())
    (unit,) = streaming.units([work], crowded=False)
    assert streaming.Tree([unit], lambda _: None, 16).sampled() == [(0, k) for k in sampled]
    if len(unit.runs) == 1:
        assert unit.is_counted(unit.steps[0]) == bool(sampled)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_tensor_of_one_whole_piece_runs_the_programs_of_several(caplog, dtype):
    rng = np.random.default_rng(2)
    base = {"one": rng.normal(size=SOME) / 50, "two": rng.normal(size=2 * SOME) / 50}
    noise = [{k: rng.normal(size=x.shape) / 1000 for k, x in base.items()} for _ in range(2)]
    models = [{k: (x + tuned[k]).astype(dtype) for k, x in base.items()} for tuned in noise]
    start = {k: x.astype(dtype) for k, x in base.items()}
    method = methods.ties(scope="tensor")
    several = [{"two": tree["two"]} for tree in (start, *models)]
    method(several[1:], several[0])
    compiled = [r.getMessage() for r in compilations(caplog, lambda: method(models, start))]
    assert not [x for x in compiled if "jit(parts)" in x or "jit(_outcomes)" in x]
    merged = method(models, start)
    both = jax.jit(method)(models, start)
    for name, leaf in both.items():
        np.testing.assert_array_equal(merged[name], leaf)
