"""Low-rank adapters: extraction is optimal, concatenation exact, and files mean what PEFT means."""

import math
import time

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cells import diagonal
from fake_checkpoints import held
from merge_cases import make

from sail_jax import lora, methods
from sail_jax.checkpoint.sources import adapters as files
from sail_jax.lora import LowRank
from sail_jax.merging.tensors import Tensor, read_whole

EPS = float(jnp.finfo(jnp.float32).eps)


def matrix(seed, shape, rank=None):
    random = np.random.default_rng(seed)
    if rank is None:
        return random.normal(size=shape).astype(np.float32)
    return (random.normal(size=(shape[0], rank)) @ random.normal(size=(rank, shape[1]))).astype("f")


def pair(seed, shape, rank):
    random = np.random.default_rng(seed)
    return LowRank(
        jnp.asarray(random.normal(size=(shape[0], rank)), jnp.float32),
        jnp.asarray(random.normal(size=(rank, shape[1])), jnp.float32),
    )


def product(p):
    return np.asarray(p.B, float) @ np.asarray(p.A, float)


# --- approximation


SMALL = {"oversampling": 2, "powers": 3}  # 2 * 4 * (rank + 2) directions are drawn


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(64, 48), (48, 64)])
def test_approximation_is_nearly_optimal_and_says_how_far_it_is(shape):
    """Independent entries are the worst case: no singular value stands out. No error is below that
    of Eckart and Young; with 3 powers 1 % above it is reached. Matrices of the rank are found."""
    delta = matrix(0, shape)
    assert lora.sketched(shape, 4, **SMALL)
    got, error = lora.approximate(delta, 4, key=jax.random.key(0), **SMALL)
    s = np.linalg.svd(delta.astype(float), compute_uv=False)
    best = math.sqrt(np.sum(s[4:] ** 2))
    tolerance = 20 * EPS * np.linalg.norm(delta)
    assert got.rank == 4
    assert abs(float(error) - np.linalg.norm(delta - product(got))) < tolerance
    assert best - tolerance < float(error) < 1.01 * best
    other, _ = lora.approximate(delta, 4, key=jax.random.key(1), **SMALL)
    assert not np.array_equal(other.B, got.B)
    low = matrix(0, shape, rank=4)
    _, error = lora.approximate(low, 4, key=jax.random.key(0), **SMALL)
    assert float(error) < 20 * EPS * np.linalg.norm(low)


@pytest.mark.slow
def test_gradients_at_equal_singular_values_and_at_zero():
    """Of <C, B A>, which is <C, delta>, the gradient is C. It does not include rotations of
    the vectors of equal singular values, or between those of 0."""
    C = matrix(0, (4, 4))

    def inner(x):
        pair, _ = lora.truncate(x)
        return jnp.sum(C * (pair.B @ pair.A))

    slope = jax.grad(inner)(np.diag(np.float32([3, 1, 1, 0])))
    lacking = np.zeros((4, 4), bool)
    lacking[[1, 2, 3], [2, 1, 3]] = True
    np.testing.assert_allclose(slope, np.where(lacking, 0, C), rtol=0, atol=20 * EPS)


@pytest.mark.slow
def test_approximation_keeps_the_energy_and_falls_back_on_all_singular_values():
    delta = matrix(0, (64, 48))
    delta[:, 3:] /= 50
    s = np.linalg.svd(delta.astype(float), compute_uv=False)
    kept = np.cumsum(s**2) / np.sum(s**2)
    more = {"key": jax.random.key(0), "oversampling": 2, "powers": 0}
    got, error = lora.approximate(delta, energy=0.98, **more)
    assert got.rank == np.searchsorted(kept, 0.98) + 1 == 3
    assert abs(float(error) - np.linalg.norm(delta - product(got))) < 20 * EPS * np.sum(s)
    for k in (-70, 80):  # whose squares are beyond float32
        scaled, off = lora.approximate(np.ldexp(delta, k), energy=0.98, **more)
        assert scaled.rank == 3
        assert math.ldexp(float(off), -k) == pytest.approx(float(error), rel=1e-4)
        _, off = lora.truncate(np.ldexp(delta, k), 3)
        assert math.ldexp(float(off), -k) == pytest.approx(np.linalg.norm(s[3:]), rel=1e-4)
    most = kept[30]
    got, _ = lora.approximate(delta, energy=float(most) - 1e-5, **more)  # more than are drawn
    assert got.rank == 31
    with pytest.raises(ValueError, match="powers: expected an integer >= 0, got -1"):
        lora.approximate(delta, 1, key=jax.random.key(0), powers=-1)


def test_the_residual_counts_every_row_once():
    """300 rows, in blocks of 256."""
    delta, p = matrix(0, (300, 3)), pair(1, (300, 3), 1)
    want = np.linalg.norm(delta - product(p))
    assert math.isclose(float(lora.residual(delta, p)), want, rel_tol=50 * EPS)


# --- core space


def in_core(pairs, merged):
    """Merges core matrices in float64, by the singular vectors of all B and of all A."""
    U = np.linalg.svd(np.concatenate([p.B for p in pairs], 1, dtype=float), full_matrices=False)[0]
    Vt = np.linalg.svd(np.concatenate([p.A for p in pairs], 0, dtype=float), full_matrices=False)[2]
    cores = [U.T @ product(p) @ Vt.T for p in pairs]
    for p, core in zip(pairs, cores, strict=True):
        np.testing.assert_allclose(U @ core @ Vt, product(p), atol=1e-12)  # nothing is lost
    return U @ merged(cores) @ Vt


@pytest.mark.slow
def test_core_space_is_the_dense_merge_where_it_commutes_with_rotations():
    """Task arithmetic, with one adapter that leaves the matrix alone."""
    pairs = [pair(k, (7, 5), 2) for k in range(2)]
    adapters, weights = [{"w": pairs[0]}, {}, {"w": pairs[1]}], [0.5, 1.0, -2.0]
    got = lora.core_space(methods.task_arithmetic(), adapters, 3, weights=weights)["w"]
    want = 0.5 * product(pairs[0]) - 2 * product(pairs[1])
    s = np.linalg.svd(want, compute_uv=False)
    assert got.rank == 3
    # The best of that rank, though the dense matrix, of rank 4, was not formed.
    error = np.linalg.norm(want - product(got))
    assert abs(error - np.linalg.norm(s[3:])) < 50 * EPS * np.linalg.norm(s)


@pytest.mark.slow
def test_a_method_of_entries_sees_those_of_core_matrices():
    pairs = [pair(k, (7, 5), 2) for k in range(2)]
    got = lora.core_space(methods.magmax(), [{"w": p} for p in pairs])["w"]
    want = in_core(pairs, lambda cores: np.where(abs(cores[0]) >= abs(cores[1]), *cores))
    np.testing.assert_allclose(product(got), want, atol=50 * EPS * float(np.linalg.norm(want)))
    entries = np.where(abs(product(pairs[0])) >= abs(product(pairs[1])), *map(product, pairs))
    assert np.linalg.norm(want - entries) > 0.1 * np.linalg.norm(want)  # another merge


# --- truncation


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "shape"), diagonal([1, 3, 5, 9], [(7, 5), (5, 7)]))
def test_truncation_is_optimal(rank, shape):
    """Eckart-Young: the error is the root of the sum of the discarded squares, and nothing of that
    rank found by alternating least squares from random starts is nearer. SVD in float32: 20 eps
    |delta|."""
    delta = matrix(0, shape)
    got, error = lora.truncate(delta, rank)
    s = np.linalg.svd(delta.astype(float), compute_uv=False)
    want = math.sqrt(np.sum(s[rank:] ** 2))
    tolerance = 20 * EPS * np.linalg.norm(delta)
    assert got.rank == min(rank, 5)
    assert abs(float(error) - want) < tolerance
    assert abs(np.linalg.norm(delta - product(got)) - want) < tolerance
    for seed in range(3):
        A = matrix(seed, (min(rank, 5), shape[1])).astype(float)
        for _ in range(30):
            B = np.linalg.lstsq(A.T, delta.T.astype(float), rcond=None)[0].T
            A = np.linalg.lstsq(B, delta.astype(float), rcond=None)[0]
        assert np.linalg.norm(delta - B @ A) > want - tolerance


@pytest.mark.slow
def test_truncation_is_exact_at_the_rank_and_shares_singular_values():
    delta = matrix(1, (7, 5), rank=2)
    got, error = lora.truncate(delta, 2)
    assert float(error) < 20 * EPS * np.linalg.norm(delta)
    np.testing.assert_allclose(product(got), delta, rtol=0, atol=20 * EPS * np.linalg.norm(delta))
    np.testing.assert_allclose(
        np.linalg.norm(got.B, axis=0), np.linalg.norm(got.A, axis=1), rtol=1e-5
    )


def test_energy_is_the_least_rank_that_has_it():
    delta = np.diag([3.0, 2.0, 1.0]).astype("f")  # squares 9, 4, 1 of 14
    ranks = [lora.truncate(delta, energy=e)[0].rank for e in (0.1, 9 / 14, 0.65, 13 / 14, 1.0)]
    assert ranks == [1, 1, 2, 2, 3]
    assert lora.truncate(delta, rank=1, energy=1.0)[0].rank == 1
    assert lora.truncate(np.zeros((3, 2), "f"), energy=0.9)[0].rank == 1
    with pytest.raises(TypeError, match="energy: the rank depends on values"):
        jax.jit(lambda x: lora.truncate(x, energy=0.5)[1])(delta)


@pytest.mark.slow
def test_truncation_under_jit_and_gradient():
    """The squared error's gradient is the residual (Eckart-Young again), twice."""
    delta = jnp.asarray(matrix(2, (6, 4)))
    f = jax.jit(jax.grad(lambda x: lora.truncate(x, 2)[1] ** 2))
    residual = np.asarray(delta, float) - product(lora.truncate(delta, 2)[0])
    np.testing.assert_allclose(f(delta), 2 * residual, rtol=0, atol=1e-4)


# --- trees


@pytest.mark.slow
def test_extract_and_add_are_inverse():
    base = {"q": jnp.asarray(matrix(0, (6, 5))), "b": jnp.zeros(5), "same": jnp.ones((3, 3))}
    delta = jnp.asarray(matrix(1, (6, 5), rank=2))
    model = base | {"q": base["q"] + delta, "b": jnp.ones(5)}
    for axis in (-1, 0):
        adapter, rest = lora.extract(model, base, rank=2, input_axis=axis)
        assert list(adapter) == ["q"]
        assert list(rest) == ["b"]
        assert adapter["q"].B.shape == ((6, 2) if axis == -1 else (5, 2))
        got = lora.add(base, adapter, input_axis=axis)
        np.testing.assert_allclose(got["q"], model["q"], rtol=0, atol=100 * EPS)
        chex.assert_trees_all_equal(got["b"], base["b"])
    none, rest = lora.extract(model, base, rank=2, matrices=lambda path: path != "q")
    assert (list(none), sorted(rest)) == ([], ["b", "q"])


@pytest.mark.slow
def test_concatenation_is_exact_and_refactoring_finds_its_rank():
    adapters = [{"w": pair(k, (6, 5), 1 + k)} for k in range(3)]
    weights = [0.5, -1.0, 2.0]
    want = sum(w * product(a["w"]) for w, a in zip(weights, adapters, strict=True))
    got = lora.concatenate(adapters, weights)
    assert got["w"].rank == 6
    np.testing.assert_allclose(product(got["w"]), want, rtol=0, atol=8 * EPS * 10)
    twice = lora.concatenate([adapters[1], adapters[1]])
    small = lora.refactor(twice, energy=1 - 1e-9)
    assert small["w"].rank == 2
    np.testing.assert_allclose(
        product(small["w"]), 2 * product(adapters[1]["w"]), atol=50 * EPS * 10
    )
    one, _ = lora.truncate(want, 2)
    cut = lora.refactor(got, rank=2)["w"]
    np.testing.assert_allclose(product(cut), product(one), rtol=0, atol=200 * EPS * 10)
    other = {"v": pair(7, (3, 2), 1)}
    assert set(lora.concatenate([adapters[0], other])) == {"w", "v"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "ties", "tsv_m", "slerp"])
def test_any_method_merges_adapters(name):
    """On the products: the method on B A as deltas from 0, at full rank."""
    adapters = [{"w": pair(k, (6, 5), 2)} for k in range(2)]
    merge = make(name)
    got = lora.merge_adapters(merge, adapters, rank=5)
    deltas = [{"w": jnp.asarray(product(a["w"]), jnp.float32)} for a in adapters]
    want = merge(deltas, {"w": jnp.zeros((6, 5))})["w"]
    np.testing.assert_allclose(product(got["w"]), want, rtol=0, atol=200 * EPS * 10)
    assert lora.merge_adapters(merge, adapters)["w"].rank == 2


@pytest.mark.slow
def test_merging_factors_is_not_merging_products():
    """Why products: the mean of B times the mean of A is off by a quarter of (B1-B2)(A1-A2)."""
    a, b = (pair(k, (6, 5), 2) for k in range(2))
    got = product(lora.merge_adapters(methods.linear(), [{"w": a}, {"w": b}], rank=4)["w"])
    naive = np.asarray((a.B + b.B) / 2, float) @ np.asarray((a.A + b.A) / 2, float)
    cross = np.asarray(a.B - b.B, float) @ np.asarray(a.A - b.A, float) / 4
    np.testing.assert_allclose(got - naive, cross, rtol=0, atol=100 * EPS * 10)


def test_refusals():
    p = {"w": pair(0, (3, 2), 1)}
    with pytest.raises(ValueError, match=r"'w' is not a leaf of the base \(known: v\)"):
        lora.add({"v": jnp.zeros((3, 2))}, p)
    with pytest.raises(ValueError, match=r"'w': expected B A of shape \(2, 3\), got \(3, 2\)"):
        lora.add({"w": jnp.zeros((2, 3))}, p)
    with pytest.raises(ValueError, match=r"'w': expected B \[out, rank\] and A"):
        lora.dense({"w": LowRank(jnp.ones((3, 2)), jnp.ones((3, 2)))})
    with pytest.raises(ValueError, match="'w': expected one shape of B A"):
        lora.concatenate([p, {"w": pair(0, (2, 2), 1)}])
    with pytest.raises(ValueError, match="adapters: expected at least one"):
        lora.concatenate([])
    for bad in (0, 1.5, True):
        with pytest.raises(ValueError, match="rank: expected an integer >= 1"):
            lora.truncate(np.ones((2, 2)), bad)
    for bad in (0.0, 1.5, "all"):
        with pytest.raises(ValueError, match=r"energy: expected a number in \(0, 1\]"):
            lora.truncate(np.ones((2, 2)), energy=bad)
    with pytest.raises(ValueError, match="delta: expected a matrix"):
        lora.truncate(np.ones(3))
    with pytest.raises(ValueError, match="delta: expected real numbers, got complex64"):
        lora.truncate(np.ones((2, 2), np.complex64))
    with pytest.raises(ValueError, match="'w': expected real numbers, got complex64"):
        lora.add({"w": jnp.ones((2, 2))}, {"w": LowRank(*np.ones((2, 2, 2), np.complex64))})


# --- files


CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 8}
BASE = {
    "model.layers.0.q.weight": matrix(10, (6, 5)),
    "model.layers.1.q.weight": matrix(11, (6, 5)),
    "model.embed_tokens.weight": matrix(12, (9, 4)),
    "score.weight": matrix(13, (3, 4)),
    "score.bias": matrix(14, (3,)),
    "lm_head.weight": matrix(15, (9, 4)),
}
A, B = matrix(20, (2, 5)), matrix(21, (6, 2))
NAME = "model.layers.0.q.weight"
Q = "base_model.model.model.layers.0.q"


def factors(a=A, b=B, module=Q, infix=""):
    return {f"{module}.lora_A{infix}.weight": a, f"{module}.lora_B{infix}.weight": b}


def change(tensors, name="model.layers.0.q.weight", base=BASE, **config):
    got = files.adapted(held(base), held(tensors), CONFIG | config)
    return read_whole(got[name]).astype(float) - base[name].astype(float)


def test_adapted_adds_the_scaled_product():
    """8 float32 ulp of sums below 40."""
    tolerance = {"rtol": 0, "atol": 8 * EPS * 40}
    BA = B.astype(float) @ A.astype(float)
    np.testing.assert_allclose(change(factors()), 4 * BA, **tolerance)
    np.testing.assert_allclose(change(factors(infix=".default")), 4 * BA, **tolerance)
    rs = change(factors(), use_rslora=True)
    np.testing.assert_allclose(rs, 8 / math.sqrt(2) * BA, **tolerance)
    pattern = change(factors(), alpha_pattern={"0.q": 2, "q": 100})
    np.testing.assert_allclose(pattern, BA, **tolerance)
    ranked = change(factors(), r=7, rank_pattern={"layers.0.q": 2})
    np.testing.assert_allclose(ranked, 4 * BA, **tolerance)
    a, b = matrix(1, (2, 6)), matrix(2, (5, 2))
    flipped = change(factors(a, b), fan_in_fan_out=True)
    np.testing.assert_allclose(flipped, 4 * (b.astype(float) @ a).T, **tolerance)
    untouched = files.adapted(held(BASE), held(factors()), CONFIG)
    np.testing.assert_array_equal(
        read_whole(untouched["model.layers.1.q.weight"]), BASE["model.layers.1.q.weight"]
    )


def test_an_adapted_tensor_has_the_dtype_that_is_asked_for():
    """A sum in float32; the memory that it takes holds both factors."""
    base = {NAME: BASE[NAME].astype(ml_dtypes.bfloat16)}
    narrow, wide = (
        files.adapted(held(base), held(factors()), CONFIG, dtype)[NAME]
        for dtype in (None, np.dtype(np.float32))
    )
    assert isinstance(narrow, Tensor)
    assert narrow.needs >= A.nbytes + B.nbytes
    assert (narrow.dtype, wide.dtype) == (ml_dtypes.bfloat16, np.float32)
    np.testing.assert_array_equal(read_whole(wide).astype(narrow.dtype), read_whole(narrow))
    with pytest.raises(ValueError, match=r"q.weight of memory \+ memory: cannot read entries"):
        narrow.read(np.empty(10, narrow.dtype), 25)


def rows():
    key = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    return {key: matrix(0, (2, 4))}


BAD = {
    "type": ({}, {"peft_type": "IA3"}, "peft_type: expected LORA, got 'IA3'"),
    "dora": ({}, {"use_dora": True}, "has no lora_magnitude_vector, but .*'use_dora': True"),
    "dora's shape": (
        {f"{Q}.lora_magnitude_vector": A[0]}, {"use_dora": True}, r"expected 6 magnitudes, got.*5"
    ),
    "quantised": ({}, {"use_qalora": True}, "'use_qalora' is not supported, got True"),
    "replicated": ({}, {"layer_replication": [[0, 1]]}, "'layer_replication' is not supp"),
    "activated": ({}, {"alora_invocation_tokens": [1]}, "'alora_invocation_tokens' is not supp"),
    "blocks": ({}, {"use_bdlora": {"nblocks": 2}}, "'use_bdlora' is not supported, got a mapping"),
    "a later version": ({}, {"use_something": "new"}, "'use_something' is not supp.*'new'"),
    "a hostile key": ({}, {"resume=True\x1b": 1}, r"'resume=True\\x1b' is not supported, got 1"),
    "pissa": ({}, {"init_lora_weights": "pissa_niter_4"}, "changes the base"),
    "lora_ga": ({}, {"init_lora_weights": "lora_ga"}, "changes the base"),
    "one as a start": ({}, {"init_lora_weights": [1]}, "init_lora_weights: a list changes"),
    "rank": ({}, {"r": 3}, "has rank 2, but its config has 3"),
    "zero rank": ({}, {"r": 0}, "r: expected an integer >= 1"),
    "alpha": ({}, {"lora_alpha": None}, "lora_alpha: expected a number"),
    "huge alpha": ({}, {"lora_alpha": 10**400}, "lora_alpha: expected a number of float32, got 1"),
    "alpha beyond float32": ({}, {"lora_alpha": 1e39}, "lora_alpha: expected a number"),
    "boolean rank": ({}, {"r": True}, "r: expected an integer >= 1, got True"),
    "no rank": ({}, {"r": None}, "r: expected an integer >= 1, got nothing"),
    "no expression": ({}, {"rank_pattern": {"(": 1}}, r"rank_pattern.\(: '\(' is not a regular"),
    "closed outside": ({}, {"alpha_pattern": {"a)|(b": 1}}, "alpha_pattern.*is not a regular"),
    "patterns as a list": ({}, {"rank_pattern": [1]}, "rank_pattern: expected a .*, got a list"),
    "patterns as text": ({}, {"alpha_pattern": "x"}, "alpha_pattern: expected a .*, got 'x'"),
    "rank in a pattern": ({}, {"rank_pattern": {"x": "8"}}, "rank_pattern.x: expected an integer"),
    "alpha in a pattern": ({}, {"alpha_pattern": {"x": math.nan}}, "alpha_pattern.x: expected a n"),
    "modules as a number": ({}, {"modules_to_save": 5}, "modules_to_save: expected .*list, got 5"),
    "modules as text": ({}, {"modules_to_save": "score"}, "modules_to_save: .*, got 'score'"),
    "a module as a number": ({}, {"modules_to_save": [5]}, "modules_to_save.0: expected .* got 5"),
    "flag as text": ({}, {"use_rslora": "false"}, "use_rslora: .* true or false, got 'false'"),
    "orientation as text": ({}, {"fan_in_fan_out": "no"}, "fan_in_fan_out: expected .*got 'no'"),
    "bias as a number": ({}, {"bias": 3}, "bias: expected .* got 3"),
    "start as a list": ({}, {"peft_type": []}, "peft_type: expected LORA, got an empty list"),
    "key": ({"model.w": A}, {}, "expected keys 'base_model.model"),
    "unknown": ({"base_model.model.score.weight": A}, {}, "unknown key .*modules_to_save"),
    "magnitude": ({f"{Q}.lora_magnitude_vector": A}, {}, "has a lora_magnitude_vector, but"),
    "lora bias": ({f"{Q}.lora_B.bias": A}, {}, "has a lora_B.bias, but its config has 'lora_b"),
    "lora bias without a bias": (
        {f"{Q}.lora_B.bias": B[:, 0]}, {"lora_bias": True}, "no bias in the base to add it to"
    ),
    "bias of A": ({f"{Q}.lora_A.bias": A}, {}, "is not a factor A or B"),
    "half": ({f"{Q}x.lora_A.weight": A}, {}, "lora_B of 'model.layers.0.qx' is missing"),
    "stranger": (factors(module=f"{Q}x"), {}, "'model.layers.0.qx.weight' is not in the base.*q"),
    "two": (factors(infix=".other"), {}, "several adapters"),
    "convolution": (
        factors(A[..., None], B, "base_model.model.score"), {}, r"expected A \[rank, in\]"
    ),
    "shape": (
        factors(A, matrix(0, (4, 2)), "base_model.model.model.layers.1.q"), {},
        r"expected a change of shape \(6, 5\), got \(4, 5\)",
    ),
    "complex": (
        factors(A + 1j * A, B), {}, "'model.layers.0.q': expected factors of a floating dtype"
    ),
    "transposed": (
        factors(matrix(0, (2, 6)), matrix(0, (5, 2))), {}, r"got \(5, 6\) \(fan_in_fan_out\?\)"
    ),
    "twice, as factors and whole": (
        {f"{Q}.weight": BASE["model.layers.0.q.weight"]}, {"modules_to_save": ["q"]},
        r"'model.layers.0.q.weight' is changed in several ways",
    ),
    "twice, as two copies": (
        {"base_model.model.score.weight": matrix(0, (3, 4)),
         "base_model.model.score.modules_to_save.default.weight": matrix(1, (3, 4))},
        {"modules_to_save": ["score"]}, "are the same weight, but differ",
    ),
    "twice, under two names": (
        factors(module="base_model.model.x.score")
        | factors(matrix(1, (2, 4)), matrix(1, (3, 2)), "base_model.model.score"),
        {}, "'score.weight' occurs twice",
    ),
    "another width": (
        {"base_model.model.score.weight": matrix(0, (3, 5))}, {"modules_to_save": ["score"]},
        r"expected 'score.weight' of shape \(3, 4\), got \(3, 5\)",
    ),
    "rows without tokens": (
        {}, {"trainable_token_indices": [1]}, "has trainable_token_indices, but it holds no rows"
    ),
    "tokens without rows": (rows(), {}, "expected each row of 'model.embed_tokens' once"),
    "rows twice": (rows(), {"trainable_token_indices": [1, 1]}, "expected each row"),
    "other rows": (rows(), {"trainable_token_indices": [1]}, "expected 1 rows of"),
    "rows beyond": (rows(), {"trainable_token_indices": [1, 9]}, "expected 2 rows of"),
    "rows below": (rows(), {"trainable_token_indices": [-1]}, "expected an integer >= 0"),
    "parameters": (
        {}, {"target_parameters": ["0.q.weight"], "rank_pattern": {"q.weight": 3}},
        r"expected one pair of factors for each of weight .6, 5. of 'model.layers.0.q', got others",
    ),
    "nested": (
        factors(module=f"{Q}.base_layer"), {}, r"has factors of several parameters, but \[\]"
    ),
    "a resized side": (
        {"base_model.model.model.embed_tokens.weight": matrix(0, (11, 4))}, {},
        "'model.embed_tokens.weight' has 11 rows, but 'lm_head.weight' has 9",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refuses_adapters_that_mean_something_else(case):
    tensors, config, message = BAD[case]
    with pytest.raises(files.CheckpointError, match=message) as caught:
        files.adapted(held(BASE), held(factors() | tensors), CONFIG | config)
    assert len(str(caught.value)) < 300


def test_an_adapter_of_nothing_and_one_of_slow_patterns():
    with pytest.raises(files.CheckpointError, match="got no tensors at all"):
        files.adapted(held(BASE), {}, CONFIG)
    name = "a" * 30 + "b"
    began = time.process_time()
    tensors, base = factors(module=f"base_model.model.{name}"), {f"{name}.weight": BASE[NAME]}
    slow = {"alpha_pattern": {"(a+)+$": 1}}
    found = change(tensors, f"{name}.weight", base, **slow)
    np.testing.assert_array_equal(found, change(factors()))
    assert time.process_time() - began < 1


@pytest.mark.slow
def test_codes_of_a_quantised_base_take_no_change():
    codes = {name: array.astype(np.int8) for name, array in BASE.items()}
    with pytest.raises(files.CheckpointError, match="a base of a floating dtype, got int8"):
        files.adapted(held(codes), held(factors()), CONFIG)
