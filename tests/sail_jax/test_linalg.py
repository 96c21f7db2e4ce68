"""LAPACK gets one matrix at a time, and every value and derivative is JAX's."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import merge_cases
import numpy as np
import pytest
from cells import one_of_every, soak

from sail_jax import linalg, lora, methods
from sail_jax.transplant import combined

A = np.random.default_rng(0).normal(size=(2, 3, 5, 4)).astype(np.float32)
S = A.mT @ A + 2 * np.eye(4, dtype=np.float32)
L = np.linalg.cholesky(S)
CASES = {
    "cholesky": (S,),
    "det": (S,),
    "eigh": (S,),
    "eigvalsh": (S,),
    "inv": (S,),
    "pinv": (A,),
    "qr": (A,),
    "solve": (S, A.mT),
    "solve_triangular": (S, A.mT),
    "svd": (A,),
}
OPTIONS = {"svd": {"full_matrices": False}, "solve_triangular": {"lower": True}}


def of_jax(name):
    return getattr(jnp.linalg, name, None) or getattr(jax.scipy.linalg, name)


def batches(lowered):
    """The leading axes of the matrices that LAPACK gets in a program."""
    calls = re.findall(r"@lapack_\w+\(.*?\) \{.*?: \((.*?)\) ->", lowered.as_text())
    ranks = [re.findall(r"tensor<((?:\d+x)*)\w+>", call) for call in calls]
    assert calls
    return [axes for call in ranks for axes in call if axes.count("x") > 2]


def total(function, options):
    def loss(*arrays):
        # squares: vectors of a decomposition are unique up to their signs
        return sum(jnp.sum(y**4) for y in jax.tree.leaves(function(*arrays, **options)))

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of_every(2, CASES))
def test_values_and_derivatives_are_those_of_jax(name):
    arrays, options = CASES[name], OPTIONS.get(name, {})
    ours, theirs = getattr(linalg, name), of_jax(name)
    jax.tree.map(
        np.testing.assert_array_equal, ours(*arrays, **options), theirs(*arrays, **options)
    )
    first = [x[0, 0] for x in arrays]
    jax.tree.map(np.testing.assert_array_equal, ours(*first, **options), theirs(*first, **options))
    every = tuple(range(len(arrays)))
    for of in (
        lambda f: jax.vmap(jax.vmap(jax.grad(total(f, options), every))),
        lambda f: jax.grad(lambda *args: jax.vmap(jax.vmap(total(f, options)))(*args).sum(), every),
        lambda f: jax.vmap(jax.vmap(jax.jacfwd(jax.grad(total(f, options))))),
    ):
        got, want = jax.jit(of(ours))(*arrays), jax.jit(of(theirs))(*arrays)
        # the same formulas, which XLA fuses in another order: some roundings of the largest value
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-4 * float(jnp.abs(y).max()))


@pytest.mark.slow
@pytest.mark.skipif(not linalg.SPLITS, reason="this JAX splits no batch of matrices")
@pytest.mark.parametrize("name", CASES)
def test_no_batch_reaches_lapack(name):
    arrays, options = CASES[name], OPTIONS.get(name, {})
    loss = total(getattr(linalg, name), options)
    for f in (loss, jax.vmap(loss), jax.vmap(jax.vmap(jax.grad(loss)))):
        assert batches(jax.jit(f).lower(*arrays)) == []
    # what it is good for
    assert batches(jax.jit(total(of_jax(name), options)).lower(*arrays))


@pytest.mark.slow
def test_right_hand_sides_and_norms():
    B = A.mT[0, 0]
    np.testing.assert_array_equal(
        linalg.cho_solve(L[0, 0], B), jax.scipy.linalg.cho_solve((L[0, 0], True), B)
    )
    np.testing.assert_allclose(
        linalg.cho_solve(L, A.mT), np.linalg.solve(S, A.mT), rtol=1e-4, atol=1e-5
    )
    v = linalg.solve_triangular(L[0, 0], B[:, 0], lower=True)
    np.testing.assert_allclose(L[0, 0] @ v, B[:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        linalg.spectral_norm(A), np.linalg.norm(A, 2, axis=(-2, -1)), rtol=1e-5
    )
    key = jax.random.key(3)
    np.testing.assert_array_equal(linalg.orthogonal(key, 6), jax.random.orthogonal(key, 6))


def test_a_batch_may_vary_along_a_mesh():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(linalg.eigvalsh, mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(jax.jit(mapped)(S), np.linalg.eigvalsh(S), rtol=1e-4)


SPECTRAL = {"tsv_m": {}, "iso_c": {}, "iso_cts": {}, "wudi": {"solution": "exact"}, "opcm": {}}


@pytest.mark.slow
@pytest.mark.skipif(not linalg.SPLITS, reason="this JAX splits no batch of matrices")
@pytest.mark.parametrize("name", SPECTRAL)
def test_merges_call_lapack_for_one_matrix(name):
    merge = merge_cases.make(name, **SPECTRAL[name])
    tree = {"a": np.ones((8, 6), np.float32), "b": np.ones((6, 8), np.float32), "c": A[0, 0]}
    models = [{name: k * x for name, x in tree.items()} for k in range(1, 4)]
    for f in (merge, jax.vmap(merge)):
        given = models if f is merge else [jax.tree.map(lambda x: x[None], m) for m in models]
        base = tree if f is merge else jax.tree.map(lambda x: x[None], tree)
        assert batches(jax.jit(f).lower(given, base)) == []


@pytest.mark.slow
@pytest.mark.skipif(not linalg.SPLITS, reason="this JAX splits no batch of matrices")
def test_regmean_transplants_and_adapters_call_lapack_for_one_matrix():
    rows, anchors = np.ones((9, 6), np.float32), np.ones((7, 6), np.float32)
    pursuit = jax.jit(lambda *x: combined(*x, anchors, "omp", 4))
    assert batches(pursuit.lower(rows, anchors)) == []
    gram = {"w": np.eye(4, dtype=np.float32)}
    merge = methods.regmean(grams=[gram, gram])
    tree = {"w": S[0, 0]}
    assert batches(jax.jit(merge).lower([tree, tree], tree)) == []
    factors = jax.vmap(lambda x: lora.truncate(x, 2))
    assert batches(jax.jit(factors).lower(A[0])) == []


BESIDE = """
import os, threading, jax, jax.numpy as jnp, numpy as np
from sail_jax import linalg, methods
A = np.random.default_rng(0).normal(size=(4, 64, 48, 48)).astype(np.float32)
S = A @ A.mT + 48 * np.eye(48, dtype=np.float32)
roots = jax.jit(lambda S: [linalg.cholesky(x + jnp.roll(x, 1, 0) * 1e-3).sum() for x in S])
base = {name: np.zeros(shape, np.float32) for name, shape in (("a", (64, 48)), ("b", (48, 32)))}
models = [{name: k + A[0, 0, 0, 0] + x for name, x in base.items()} for k in range(4)]
merge = jax.jit(methods.tsv_m())
def run():
    for _ in range(20):
        [float(x) for x in roots(S)]
        jax.block_until_ready(merge(models, base))
threads = [threading.Thread(target=run) for _ in range({threads})]
[t.start() for t in threads]
[t.join() for t in threads]
"""


@pytest.mark.slow
@pytest.mark.parametrize("threads", [4, *soak(1)])
def test_programs_and_merges_in_several_threads_end(threads):
    """With JAX's own functions they stand still: docs/decisions/lapack.md."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": ":".join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", BESIDE.replace("{threads}", str(threads))],
        timeout=120, env=environment, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
