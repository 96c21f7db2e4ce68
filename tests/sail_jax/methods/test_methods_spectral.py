"""TSV-M, Iso-C, Iso-CTS, WUDI, OPCM against NumPy on each matrix, and laws."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import spectral_reference as reference
from cells import of_law, slow

from sail_jax import methods

EPS = float(jnp.finfo(jnp.float32).eps)

# label -> method and options
SUBJECTS = {
    "tsv_m": ("tsv_m", {}),
    "tsv_m ratio": ("tsv_m", {"ratio": 0.6}),
    "iso_c": ("iso_c", {}),
    "iso_cts": ("iso_cts", {"common_fraction": 0.5}),
    "wudi": ("wudi", {"rate": 1e-3, "steps": 50}),
    "wudi exact": ("wudi", {"solution": "exact"}),
    "opcm": ("opcm", {}),
}
each_subject = pytest.mark.parametrize("label", SUBJECTS)
# each method once, for laws of which a subject takes programs of its own, whatever its options
METHODS = ("tsv_m", "iso_cts", "opcm")
SLOW = ("iso_c", "wudi", "wudi exact")


def law(i, among=SUBJECTS):
    """Parametrises the i-th of five laws over subjects."""
    return pytest.mark.parametrize("label", of_law(i, 5, SUBJECTS, among))


def law_of_methods(i):
    """Parametrises the i-th of five laws over subjects that require separate programs."""
    return pytest.mark.parametrize("label", [*of_law(i, 5, METHODS), *slow(*SLOW)])


def tree(seed, dtype=jnp.float32):
    random = np.random.default_rng(seed)
    shapes = {"tall": (7, 5), "wide": (5, 6), "bias": (4,), "conv": (2, 3, 2)}
    return {n: jnp.asarray(random.normal(size=s), dtype) for n, s in shapes.items()}


def problem(dtype=jnp.float32, tasks=3):
    return [tree(1 + k, dtype) for k in range(tasks)], tree(0, dtype)


def call(label, models, base, weights=None, **overrides):
    name, options = SUBJECTS[label]
    return methods.get(name)(**{**options, **overrides})(models, base, weights=weights)


def minimum(deltas, damping=1e-6):
    """WUDI's minimum by least squares over all rows at once, stacked, in float64."""
    blocks = [(d.T / np.linalg.norm(d)).T for d in deltas if d.any()]
    targets = [d @ b.T for d, b in zip([d for d in deltas if d.any()], blocks, strict=True)]
    pull = np.sqrt(damping * len(deltas))
    A = np.concatenate([*blocks, pull * np.eye(deltas[0].shape[1])], 0)  # A x^T = targets^T
    y = np.concatenate([*[t.T for t in targets], pull * sum(deltas).T], 0)
    return np.linalg.lstsq(A, y, rcond=None)[0].T


def expected(label, models, base):
    name, options = SUBJECTS[label]
    deltas = {
        p: [np.asarray(m[p], float) - np.asarray(base[p], float) for m in models] for p in base
    }
    if name == "opcm":
        changes = reference.opcm(deltas, **options)
    else:
        matrix = {"wudi exact": minimum}.get(label)
        changes = {}
        for path, d in deltas.items():
            if path in ("tall", "wide"):
                changes[path] = matrix(d) if matrix else getattr(reference, name)(d, **options)
            else:
                changes[path] = np.mean(d, 0)
    return {p: np.asarray(base[p], float) + changes[p] for p in base}


@pytest.mark.parametrize("full", [False, *slow(True)])
@each_subject
def test_agrees_with_the_reference(label, full):
    """Singular vectors are off by eps |delta| / gap, gaps here are above |delta| / 100, and Adam
    divides by gradients: 2000 eps times entries below 8, then one rounding to the dtype."""
    models, base = problem()
    if not full:
        *models, base = ({n: tree[n] for n in ("tall", "bias")} for tree in (*models, base))
    assert_agrees_with_the_reference(label, models, base)


@law_of_methods(0)
def test_agrees_with_the_reference_in_half_precision(label):
    models, base = problem(jnp.bfloat16)
    models, base = [{"tall": m["tall"]} for m in models], {"tall": base["tall"]}
    assert_agrees_with_the_reference(label, models, base)


def assert_agrees_with_the_reference(label, models, base):
    got, want = call(label, models, base), expected(label, models, base)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, base)
    for path, x in want.items():
        bound = float(jnp.finfo(base[path].dtype).eps) * np.abs(x) + 2000 * EPS * 8
        assert np.all(np.abs(np.asarray(got[path], float) - x) <= bound), path


@pytest.mark.slow
def test_methods_differ_by_more_than_the_bound():
    outs = [np.asarray(call(label, *problem())["tall"]) for label in SUBJECTS]
    for i, x in enumerate(outs):
        assert all(np.abs(x - y).max() > 0.02 for y in outs[:i])


# --- laws


@pytest.mark.slow
@law(0)
def test_order_of_models_does_not_matter_but_in_opcm(label):
    models, base = problem()
    a, b = (call(label, [models[k] for k in order], base) for order in ([0, 1, 2], [2, 0, 1]))
    if label == "opcm":
        assert not np.allclose(a["tall"], b["tall"], atol=0.01)
    else:
        chex.assert_trees_all_close(a, b, rtol=0, atol=2000 * EPS * 8)


@law(2, [s for s in SUBJECTS if s != "wudi"])
def test_rotations_and_scales_commute(label):
    """P delta Q^T for all deltas gives P change Q^T; Adam's steps know the axes and no scale."""
    random = np.random.default_rng(5)
    P, Q = (jnp.asarray(np.linalg.qr(random.normal(size=(n, n)))[0], jnp.float32) for n in (7, 5))
    zero = {"a": jnp.zeros((7, 5))}
    deltas = [m["tall"] for m in problem()[0]]
    want = call(label, [{"a": d} for d in deltas], zero)["a"]
    got = call(label, [{"a": P @ d @ Q.T} for d in deltas], zero)["a"]
    np.testing.assert_allclose(got, P @ want @ Q.T, rtol=0, atol=2000 * EPS * 8)
    for scale in (2.0**-17, -4.0):
        got = call(label, [{"a": scale * d} for d in deltas], zero)["a"]
        np.testing.assert_allclose(got, scale * want, rtol=0, atol=2000 * EPS * 8 * abs(scale))


@pytest.mark.slow
@pytest.mark.parametrize("label", ["wudi exact", "iso_cts", "wudi"])
def test_input_axis_transposes(label):
    """For iso_cts and wudi it matters which side is the input; the others commute by themselves."""
    models, base = problem()
    flip = lambda tree: {"a": tree["tall"].T}  # noqa: E731
    got = call(label, [flip(m) for m in models], flip(base), input_axis=0)["a"]
    want = call(label, models, base)["tall"]
    np.testing.assert_allclose(got.T, want, rtol=0, atol=2000 * EPS * 8)
    other = call(label, [flip(m) for m in models], flip(base))["a"].T
    assert np.abs(np.asarray(other - want)).max() > 0.01


@pytest.mark.slow
@law(1)
def test_one_model_and_copies(label):
    """WUDI and OPCM (of matrices) give the model; the others what they say of its spectrum."""
    models, base = problem(tasks=1)
    models, base = [{"tall": models[0]["tall"]}], {"tall": base["tall"]}
    delta = np.asarray(models[0]["tall"] - base["tall"], float)
    s = np.linalg.svd(delta, compute_uv=False)
    for count in (1, 3):
        got = np.asarray(call(label, models * count, base)["tall"] - base["tall"], float)
        t = np.linalg.svd(got, compute_uv=False)
        k = {"tsv_m": max(1, 5 // count), "tsv_m ratio": 3}.get(label)
        if k is not None:
            want = np.where(np.arange(5) < k, s, 0)
        elif label.startswith("iso_c") and count == 1:
            want = np.full(5, s.mean())
        elif label == "iso_c":
            want = np.full(5, count * s.mean())
        elif label in ("opcm", "wudi exact") or (label == "wudi" and count == 1):
            want = s
            np.testing.assert_allclose(got, delta, rtol=0, atol=1e-3 if count > 1 else 1e-5)
        else:
            continue
        np.testing.assert_allclose(t, want, rtol=0, atol=1e-3 if label == "wudi exact" else 1e-4)


@pytest.mark.slow
def test_wudi_exact_is_where_adam_goes():
    """The exact minimum has the smallest loss and no gradient; Adam at a rate that lets it arrive
    ends within a step of it, for deltas of few columns, whose objective is well conditioned."""
    models, base = problem()
    zero = {"a": jnp.zeros((7, 3))}
    deltas = [np.asarray(m["tall"] - base["tall"], float)[:, :3] for m in models]
    ms = [{"a": jnp.asarray(d, jnp.float32)} for d in deltas]
    x = np.asarray(methods.wudi(solution="exact", damping=1e-7)(ms, zero)["a"], float)
    assert np.abs(reference.wudi_gradient(x, deltas)).max() < 1e-4
    y = np.asarray(methods.wudi(steps=4000, rate=3e-3)(ms, zero)["a"], float)
    assert np.abs(x - y).max() < 3e-3
    assert reference.wudi_loss(x, deltas) <= reference.wudi_loss(y, deltas) + 1e-6
    few = np.asarray(methods.wudi()(ms, zero)["a"], float)
    assert np.abs(few - sum(deltas)).max() < 3.1e-3  # as published, it hardly moves


@pytest.mark.slow
@law_of_methods(1)
def test_jit_equals_eager(label):
    """Several factorisations in one program do not cause a deadlock."""
    models, base = problem()
    pick = lambda tree: {n: tree[n] for n in ("tall", "wide", "bias")}  # noqa: E731
    models, base = [*map(pick, models)], pick(base)
    got = jax.jit(lambda ms, b: call(label, ms, b))(models, base)
    chex.assert_trees_all_close(got, call(label, models, base), rtol=0, atol=2000 * EPS * 8)


@pytest.mark.slow
@law_of_methods(2)
def test_gradient(label):
    """In a weight and in a model, central differences in float64: truncation 1e-10 times third
    derivatives (below 1e3), rounding 1e-16 / h."""
    with jax.enable_x64(True):
        models, base = problem(jnp.float64)
        models = [{"tall": m["tall"]} for m in models]
        base, probe = {"tall": base["tall"]}, np.random.default_rng(9).normal(size=(7, 5))

        @jax.jit
        @functools.partial(jax.value_and_grad, argnums=(0, 1))
        def loss(w, x):
            merged = call(label, [{"tall": x}, *models[1:]], base, weights=w)
            return jnp.vdot(merged["tall"], probe)

        at = [np.array([1.0, 0.8, 1.3]), np.asarray(models[0]["tall"])]
        got, h = loss(*at)[1], 1e-5
        for i, index in ((0, (0,)), (0, (2,)), (1, (2, 3)), (1, (6, 0))):
            moved = []
            for sign in (1, -1):
                x = list(at)
                x[i] = x[i].copy()
                x[i][index] += sign * h
                moved.append(loss(*x)[0])
            want = (moved[0] - moved[1]) / (2 * h)
            np.testing.assert_allclose(got[i][index], want, rtol=1e-5, atol=1e-6)
            assert abs(want) > 1e-3


BORDERS = {
    "no delta": np.zeros((3, 4, 3)),
    "one model moved": np.eye(3)[:, :1, None] * np.arange(12.0).reshape(4, 3) ** 2,
    "copies of low rank": np.ones((3, 1, 1)) * np.outer(np.arange(4), np.arange(3)),
    "equal singular values": np.ones((3, 1, 1)) * np.eye(4, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "label",
    [
        "tsv_m",
        "iso_cts",
        "wudi exact",
        "opcm",
    ],
)
def test_gradients_at_borders_are_finite(label):
    """Singular vectors turn at any speed where singular values are equal, or 0; those do not count
    in the outcome. Where no model moved, the outcome is 0 times them, but for WUDI's plain sum."""
    base = {"a": jnp.ones((4, 3), jnp.float32)}

    @jax.jit
    @jax.grad
    def gradient(models):
        merged = call(label, [{"a": x} for x in models], base)["a"]
        return (merged * jnp.arange(12.0).reshape(4, 3)).sum()

    for case, deltas in BORDERS.items():
        got = gradient(1 + jnp.asarray(deltas, jnp.float32))
        assert bool(jnp.isfinite(got).all()), case
        if case == "no delta" and label != "wudi exact":
            assert not got.any()


@pytest.mark.slow
def test_scale_and_matrices():
    models, base = problem()
    for label in SUBJECTS:
        chex.assert_trees_all_equal(call(label, models, base, scale=0.0), base)
        got = call(label, models, base, matrices="t*", scale=0.5)
        whole = call(label, models, base, scale=0.5)
        if label != "opcm":
            chex.assert_trees_all_close(got["tall"], whole["tall"], rtol=0, atol=1e-5)
            mean = methods.task_arithmetic(scale=0.5, normalize=True)(models, base)
            chex.assert_trees_all_close(got["wide"], mean["wide"], rtol=0, atol=8 * EPS * 4)
    only = call("iso_c", models, base, matrices=lambda path: path == "wide")
    chex.assert_trees_all_equal(only["wide"], call("iso_c", models, base)["wide"])


@pytest.mark.soak
def test_iso_cts_without_room_is_iso_c():
    """4 of 5 directions are common, and the last one cannot be shared by 3 models."""
    models, base = problem()
    got, want = (m()(models, base)["tall"] for m in (methods.iso_cts, methods.iso_c))
    np.testing.assert_allclose(got, want, rtol=0, atol=100 * EPS)


@pytest.mark.slow
def test_opcm_scopes():
    """One leaf alone is the tree; each leaf has the mean norm of its deltas."""
    models, base = problem()
    got = methods.opcm(scope="tensor")(models, base)
    for path in base:
        ms, b = [{path: m[path]} for m in models], {path: base[path]}
        alone = methods.opcm()(ms, b)
        chex.assert_trees_all_close(alone[path], got[path], rtol=0, atol=16 * EPS * 4)
        norms = [float(jnp.linalg.norm(m[path] - b[path])) for m in ms]
        size = float(jnp.linalg.norm(got[path] - b[path]))
        assert abs(size - np.mean(norms)) < 1e-5 * np.mean(norms)


# --- degenerate inputs


@pytest.mark.slow
@law(3)
def test_deltas_of_zero(label):
    """All frozen: the base, to the bit. One frozen: nothing is undefined, and the frozen model
    neither adds nor disturbs (TSV-M, Iso-C, WUDI's objective)."""
    models, base = problem()
    chex.assert_trees_all_equal(call(label, [base] * 3, base), base)
    got = call(label, [models[0], base, models[1]], base)
    chex.assert_tree_all_finite(got)
    want = expected(label, [models[0], base, models[1]], base)
    for path, x in want.items():
        assert np.abs(np.asarray(got[path], float) - x).max() <= 2000 * EPS * 8, path


@pytest.mark.slow
@law_of_methods(3)
def test_tiny_shapes(label):
    """Leaves other than matrices are averaged; more models than rows are allowed."""
    shapes = [(), (1,), (1, 1), (3, 1), (1, 3), (0, 3), (2, 2)]
    models = [[jnp.full(shape, 1.0 + k) for shape in shapes] for k in range(3)]
    for shape, got in zip(shapes, call(label, models, [0 * x for x in models[0]]), strict=True):
        assert got.shape == shape
        chex.assert_tree_all_finite(got)
        if shape != (2, 2) and label != "opcm":
            np.testing.assert_allclose(got, jnp.full(shape, 2.0), rtol=4 * EPS)


@pytest.mark.slow
@law_of_methods(4)
def test_low_rank_antipodal_and_tiny_deltas(label):
    """For opposed deltas of rank 1 and size 1e-5, the result is finite, and in their span."""
    u, v = np.arange(1.0, 8), np.array([1.0, -1, 0, 2, 0])
    delta = jnp.asarray(1e-5 * np.outer(u, v), jnp.float32)
    zero = {"a": jnp.zeros((7, 5))}
    opposed = call(label, [{"a": delta}, {"a": -delta}], zero)["a"]
    chex.assert_tree_all_finite(opposed)
    P, Q = np.outer(u, u) / (u @ u), np.outer(v, v) / (v @ v)
    for got in (opposed, call(label, [{"a": delta}, {"a": 2 * delta}], zero)["a"]):
        if label != "wudi":
            np.testing.assert_allclose(P @ got @ Q, got, rtol=0, atol=100 * EPS * 1e-4)


@law(4)
def test_weights_that_sum_to_zero_and_one_of_zero(label):
    """Weights multiply; nothing is divided by their sum but the mean of other leaves, 0 there."""
    models, base = problem()
    got = call(label, models, base, weights=[1.0, 1.0, -2.0])
    chex.assert_tree_all_finite(got)
    without = call(label, models, base, weights=[1.0, 1.0, 0.0])
    frozen = call(label, [*models[:2], base], base)
    assert np.abs(np.asarray(without["tall"] - frozen["tall"])).max() < 2000 * EPS * 8


@each_subject
def test_refuses_matrices_that_are_none_of_the_leaves(label):
    good = {"w": jnp.ones((4, 3))}
    with pytest.raises(ValueError, match="chooses none of the leaves"):
        call(label, [good], good, matrices="x*")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tsv_m", {"ratio": 0.0}, r"ratio: expected a number in \(0, 1\]"),
        ("iso_cts", {"common_fraction": 1.5}, r"common_fraction: expected a number in \[0, 1\]"),
        ("iso_cts", {"input_axis": 2}, "input_axis: expected one of -1, 0; got"),
        ("wudi", {"steps": 1.5}, "steps: expected an integer"),
        ("wudi", {"rate": -1.0}, "rate: expected a finite number >= 0"),
        ("wudi", {"damping": 0.0}, "damping: expected a finite number > 0"),
        ("wudi", {"solution": "newton"}, "solution: expected one of"),
        ("opcm", {"alpha": 2.0}, r"alpha: expected a number in \[0, 1\]"),
        ("opcm", {"scope": "leaf"}, "scope: expected one of"),
    ],
)
def test_refuses_bad_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        methods.get(name)(**options)


# --- what popular code gets wrong


@pytest.mark.slow
def test_defect_tsv_rank_of_zero():
    """fusion_bench: int(49 * (1 / 49)) is 0, and so is k for more models than rows: no change."""
    assert int(49 * (1 / 49)) == 0
    zero = {"a": jnp.zeros((4, 4))}
    models = [{"a": jnp.diag(jnp.arange(4.0)).at[0, 0].set(10.0 + k)} for k in range(6)]
    got = methods.tsv_m()(models, zero)["a"]
    np.testing.assert_allclose(got[0, 0], 12.5, rtol=1e-4)  # rank 1 of each, one direction: mean
    many = [{"a": jnp.ones((49, 49)) * (1 + k)} for k in range(49)]
    got = methods.tsv_m()(many, {"a": jnp.zeros((49, 49))})["a"]
    np.testing.assert_allclose(got, 25.0, rtol=1e-3)


@pytest.mark.slow
def test_defect_tsv_copies_and_frozen_models():
    """Duplicate or missing singular vectors leave the polar factor's null space to chance, in which
    fusion_bench then multiplies by singular values that are not 0."""
    models, base = problem(tasks=1)
    delta = np.asarray(models[0]["tall"] - base["tall"], float)
    got = np.asarray(methods.tsv_m()(models * 2, base)["tall"] - base["tall"], float)
    U, S, Vt = np.linalg.svd(delta)
    np.testing.assert_allclose(got, U[:, :2] * S[:2] @ Vt[:2], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_defect_iso_cts_negative_common_rank():
    """fusion_bench: (r - c) / M rounded up, times M, exceeds r: for c = 0, M = 3, r = 5
    it is round(5 / 3) * 3 = 6."""
    models, base = problem()
    got = methods.iso_cts(common_fraction=0.0)(models, base)["tall"] - base["tall"]
    s = np.linalg.svd(np.asarray(got), compute_uv=False)
    np.testing.assert_allclose(s, s.mean(), rtol=1e-4)  # all five directions, equal


@pytest.mark.slow
@pytest.mark.parametrize("solution", ["exact", "adam"])
def test_defect_wudi_of_a_frozen_tensor(solution):
    """0 / 0 in the published code."""
    _, base = problem()
    chex.assert_trees_all_equal(methods.wudi(solution=solution)([base] * 2, base), base)


@pytest.mark.slow
def test_defect_opcm_after_a_frozen_first_model():
    """The published code zeroes the diagonal in an arbitrary basis of what has not moved yet."""
    models, base = problem(tasks=1)
    got = methods.opcm()([base, models[0]], base)
    half = jax.tree.map(lambda x, y: (x - y) / 2, models[0], base)  # the mean norm
    want = jax.tree.map(lambda x, y: x + y, base, half)
    chex.assert_trees_all_close(got, want, rtol=0, atol=16 * EPS * 4)
