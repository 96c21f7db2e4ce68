"""Helpers for tests of merges: making a method, and tensors in memory read like files."""

import jax
import jax.numpy as jnp
import numpy as np

from sail_jax import methods
from sail_jax.checkpoint.executor import Limits, execute
from sail_jax.merging import work
from sail_jax.trees import leaf_paths

KEY = jax.random.key(5)
NAMES = [name for name in methods.METHODS if name not in ("fisher", "regmean")]
"""Methods whose hyperparameters are numbers."""
KINDS = ("linear", "ties", "della", "karcher", "tsv_m")
"""One of every kind: arithmetic, a tree's statistic, rows, inner products, matrices."""
REQUIRED = {"slerp": {"t": 0.3}, "nearswap": {"t": 0.5}}


def each_method(names=NAMES, quick=KINDS, slow=()):
    """Parametrises over methods: some quick, some slow, the rest soak."""
    import pytest  # imported here, since processes whose memory is measured do not need it

    def mark(name):
        return [] if name in quick else pytest.mark.slow if name in slow else pytest.mark.soak

    return pytest.mark.parametrize("name", [pytest.param(n, marks=mark(n)) for n in names])


def make(name, **options):
    """Makes the merge of a method, with a key if it is random, and other required arguments."""
    options = {**REQUIRED.get(name, {}), **options}
    if "key" in methods.options_of(name):
        options.setdefault("key", KEY)
    return methods.get(name)(**options)


def tree(seed, dtype=jnp.float32, full=False):
    """Two matrices, a vector and integers; if full, also leaves of rank 0 and 3, thin and empty."""
    shapes = {"embed": (6, 8), "kernel": (6, 8), "bias": (8,)}
    if full:
        shapes |= {"gain": (), "thin": (3, 1), "conv": (2, 3, 8), "empty": (0, 3)}
    random = np.random.default_rng(seed)
    leaves = {name: jnp.asarray(random.normal(size=s), dtype) for name, s in shapes.items()}
    return {"embed": leaves.pop("embed"), "block": leaves, "steps": jnp.arange(3)}


def problem(count=3, dtype=jnp.float32, full=False):
    """Models, and their base."""
    return [tree(1 + k, dtype, full) for k in range(count)], tree(0, dtype, full)


def flat(merged):
    """path -> NumPy array, without the integer leaf."""
    named = dict(zip(leaf_paths(merged), map(np.asarray, jax.tree.leaves(merged)), strict=True))
    named.pop("steps", None)
    return named


def as_many(merge, models):
    """Returns as many of the models as a merge accepts."""
    least, most = merge.models
    return models[: max(least, min(len(models), most or len(models)))]


def compilations(caplog, f):
    """Returns XLA's log of compilations for a call."""
    caplog.clear()
    with jax.log_compiles(True):
        jax.block_until_ready(f())
    return [r for r in caplog.records if "Finished XLA compilation" in r.getMessage()]


class Held:
    """A tensor in memory that is read like one on disk."""

    def __init__(self, name, array):
        self.name, self.dtype, self.shape = name, array.dtype, array.shape
        self.source, self.flat = "memory", np.ascontiguousarray(array).reshape(-1)
        self.reads = 0

    def read(self, out, start=0):
        self.reads += 1
        out[:] = self.flat[start : start + len(out)]


class Sink:
    def __init__(self, finished=()):
        self.finished, self.parts, self.tensors = frozenset(finished), {}, {}

    def write(self, name, array, start=0):
        self.parts.setdefault(name, {})[start] = array.copy()

    def done(self, name):
        parts = self.parts.pop(name, {})
        self.tensors[name] = np.concatenate([parts[k] for k in sorted(parts)] or [np.zeros(0)])


TWO = Limits(2, 1 << 20)


def works(merge, models, base, weights=None, dtype=None):
    like = models[0] if base is None else base
    return [
        merge.work(
            n, x.shape, dtype or x.dtype, [Held(n, m[n]) for m in models],
            None if base is None else Held(n, base[n]), weights,
        )
        for n, x in like.items()
    ]  # fmt: skip


def streamed(merge, models, base, weights=None, limits=TWO, *, dtype=None, finished=(), **options):
    """Returns the merged tensors, flat, and their measurements."""
    sink = Sink(finished)
    records = execute(works(merge, models, base, weights, dtype), sink, limits, **options)
    return sink.tensors, records


def in_small_pieces(monkeypatch):
    """Runs of 16, 8 and 4 entries, rows of at most 8 together, batches of 4 tiny tensors."""
    sizes = {"ENTRIES": 16, "SOME": 8, "FEW": 4, "TINY": 2, "CROWD": 0}
    for name, value in sizes.items():
        monkeypatch.setattr(work, name, value)
