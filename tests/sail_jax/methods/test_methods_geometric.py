"""Slerp and its kin, Karcher, Model Stock: against NumPy on the vectors, and laws."""

import functools

import chex
import geometric_reference as reference
import jax
import jax.numpy as jnp
import merge_cases
import numpy as np
import pytest
from cells import of_law, slow, slow_unless
from merge_cases import flat

from sail_jax import methods
from sail_jax.merging.arithmetic import gram

EPS = float(jnp.finfo(jnp.float32).eps)
WEIGHTS = [0.5, 1.0, 2.5]

# label -> method, options, models, base, and the reference: its function, vectors and options
SUBJECTS = {
    "slerp": ("slerp", {"t": 0.3}, 2, False, ("slerp", "tensor", {"t": 0.3})),
    "slerp out": ("slerp", {"t": -0.4}, 2, False, ("slerp", "tensor", {"t": -0.4})),
    "nuslerp": ("nuslerp", {}, 2, False, ("nuslerp", "tensor", {"weights": WEIGHTS[:2]})),
    "nuslerp deltas": ("nuslerp", {}, 2, True, ("nuslerp", "tensor", {"weights": WEIGHTS[:2]})),
    "nuslerp rows": (
        "nuslerp", {"flatten": False}, 2, True, ("nuslerp", "row", {"weights": WEIGHTS[:2]})
    ),
    "nuslerp columns": (
        "nuslerp", {"flatten": False, "row_wise": True}, 2, True,
        ("nuslerp", "column", {"weights": WEIGHTS[:2]}),
    ),
    "multislerp": ("multislerp", {}, 3, True, ("karcher", "tensor", {"weights": WEIGHTS})),
    "multislerp mergekit": (
        "multislerp", {"compat": "mergekit"}, 3, True, ("nlerp", "tensor", {"weights": WEIGHTS})
    ),
    "karcher": ("karcher", {}, 3, False, ("karcher", "tensor", {"weights": WEIGHTS})),
    "stock": ("model_stock", {}, 3, True, ("model_stock", "tensor", {"weights": WEIGHTS})),
    "stock angle": (
        "model_stock", {"average": "angle"}, 3, True,
        ("model_stock", "tensor", {"weights": WEIGHTS, "average": "angle"}),
    ),
    "stock mergekit": (
        "model_stock", {"compat": "mergekit"}, 3, True,
        ("model_stock", "tensor", {"weights": WEIGHTS, "clamp": 1e-6, "signed": True}),
    ),
    "stock rows": (
        "model_stock", {"filter_wise": True}, 3, True,
        ("model_stock", "row", {"weights": WEIGHTS}),
    ),
    "stock columns": (
        "model_stock", {"filter_wise": True, "input_axis": 0}, 3, True,
        ("model_stock", "column", {"weights": WEIGHTS}),
    ),
}  # fmt: skip
# Variants with programs of their own. Their methods have a quick reference with other options.
OPTIONS = {"nuslerp columns", "nuslerp rows", "stock columns", "stock rows"}
each_subject = pytest.mark.parametrize(
    "label", [slow_unless(label not in OPTIONS, label) for label in SUBJECTS]
)
# each method once, for laws of which a subject takes programs of its own, whatever its options
METHODS = ("slerp", "nuslerp columns", "multislerp", "stock")
SLOW = ("nuslerp deltas", "multislerp mergekit", "karcher", "stock rows")


def law(i, among=SUBJECTS):
    """Parametrises the i-th of six laws over subjects."""
    return pytest.mark.parametrize("label", of_law(i, 6, SUBJECTS, among))


def law_of_methods(i):
    """Parametrises the i-th of seven laws over subjects that require separate programs."""
    return pytest.mark.parametrize("label", [*of_law(i, 7, METHODS), *slow(*SLOW)])


WHOLE = [s for s in SUBJECTS if "rows" not in s and "columns" not in s]


def tree(seed, dtype=jnp.float32, shift=0.7, full=False):
    """A matrix and a vector; if full, also a scalar and a leaf with three axes."""
    shapes = {"kernel": (5, 4), "bias": (4,)}
    shapes |= {"gain": (), "conv": (2, 3, 4)} if full else {}
    random = np.random.default_rng(seed)
    leaves = {n: jnp.asarray(random.normal(size=s) + shift, dtype) for n, s in shapes.items()}
    if full:  # on one axis there is no path between opposed directions: all deltas are positive
        leaves["gain"] = (abs(leaves["gain"]) + (4 if shift else 0)).astype(dtype)
    return leaves | {"steps": jnp.arange(3)}


def problem(count, dtype=jnp.float32, full=False):
    models = [tree(1 + k, dtype, full=full) for k in range(count)]
    return models, tree(0, dtype, 0.0, full)


def call(label, models=None, base=None, weights=WEIGHTS):
    name, options, count, with_base, _ = SUBJECTS[label]
    problem_models, problem_base = problem(count)
    models = problem_models if models is None else models
    base = problem_base if base is None else base
    weights = WEIGHTS[: len(models)] if weights is WEIGHTS else weights
    return methods.get(name)(**options)(models, base if with_base else None, weights=weights)


def assert_close(got, want, ulps, size=1.0):
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    chex.assert_trees_all_close(got, want, rtol=0, atol=ulps * EPS * size)


@pytest.mark.parametrize("full", [False, *slow(True)])
@each_subject
def test_agrees_with_the_reference(label, full):
    """A cosine is off by a few eps, a coefficient by that over sin^2 of an angle above 0.1 (the
    directions were drawn so), entries are below 5: 1000 eps, then one rounding to the dtype."""
    assert_agrees_with_the_reference(label, jnp.float32, full)


@law_of_methods(0)
def test_agrees_with_the_reference_in_half_precision(label):
    assert_agrees_with_the_reference(label, jnp.bfloat16)


def assert_agrees_with_the_reference(label, dtype, full=False):
    _, _, count, with_base, (function, vectors, options) = SUBJECTS[label]
    models, base = problem(count, dtype, full)
    want = reference.merged(
        getattr(reference, function), [flat(m) for m in models], flat(base) if with_base else None,
        vectors, **options,
    )  # fmt: skip
    got = call(label, models, base)
    chex.assert_trees_all_equal_structs(got, base)
    for path, leaf in flat(got).items():
        assert leaf.dtype == dtype
        error = np.abs(leaf.astype(float) - want[path])
        assert np.all(error <= float(jnp.finfo(dtype).eps) * np.abs(want[path]) + 1000 * EPS), path


@pytest.mark.slow
def test_methods_differ_by_more_than_the_bound():
    outs = [flat(call(label))["kernel"] for label in SUBJECTS]
    same = [(a, b) for i, x in enumerate(outs) for a, b in [(x, y) for y in outs[:i]]]
    assert sum(np.abs(a - b).max() < 0.01 for a, b in same) <= 2  # stock: average, compat


# --- laws


@law(0)
def test_copies_give_the_copy(label):
    """base + (theta - base), coefficients that sum to 1 within a few eps."""
    count = SUBJECTS[label][2]
    models, base = problem(1)
    assert_close(call(label, models * count, base), models[0], 16, size=4)


def test_slerp_ends_at_its_ends_to_the_bit():
    models, _ = problem(2)
    for compat in ("paper", "mergekit"):
        for t, want in ((0.0, models[0]), (1.0, models[1])):
            got = methods.slerp(t=t, compat=compat)(models)
            if compat == "paper":
                chex.assert_trees_all_equal(got, want)
            else:
                assert_close(got, want, 4, size=4)


def test_slerp_of_a_path_is_halved_by_its_middle():
    """Half of the way and half of the rest is three quarters."""
    models, _ = problem(2)
    middle = methods.slerp(t=0.5)(models)
    got = methods.slerp(t=0.5)([middle, models[1]])
    assert_close(got, methods.slerp(t=0.75)(models), 100, size=4)


def test_slerp_takes_its_time_from_weights_when_there_is_none():
    models, _ = problem(2)
    got = methods.slerp()(models, weights=[3.0, 1.0])
    assert_close(got, methods.slerp(t=0.25)(models), 4, size=4)


@law(1)
def test_order_of_models_does_not_matter(label):
    if label.startswith("slerp"):
        a, b = problem(2)[0]
        t = SUBJECTS[label][1]["t"]
        got, want = methods.slerp(t=1 - t)([b, a]), methods.slerp(t=t)([a, b])
    else:
        count = SUBJECTS[label][2]
        models, base = problem(count)
        order = [1, 0] if count == 2 else [2, 0, 1]
        got = call(label, [models[k] for k in order], base, weights=[WEIGHTS[k] for k in order])
        want = call(label)
    assert_close(got, want, 200, size=4)


@law(2, WHOLE)
def test_rotations_and_scales_commute(label):
    """Rotating or scaling all inputs rotates or scales the outcome; condition numbers as above."""
    # mergekit's constants are absolute: they count below deltas of 1e-3, and of 1e-5
    absolute = label in ("stock mergekit", "multislerp mergekit")
    scales = [4.0] if absolute else [4.0, 2.0**-20]
    count = SUBJECTS[label][2]
    random = np.random.default_rng(5)
    Q = np.linalg.qr(random.normal(size=(20, 20)))[0].astype(np.float32)
    turned = lambda x: (Q @ np.asarray(x).reshape(-1)).reshape(5, 4)  # noqa: E731
    xs = [np.float32(random.normal(size=(5, 4)) + 0.7) for _ in range(count)]
    start = np.float32(random.normal(size=(5, 4)))
    want = np.asarray(call(label, [{"a": x} for x in xs], {"a": start})["a"])
    got = call(label, [{"a": turned(x)} for x in xs], {"a": turned(start)})["a"]
    np.testing.assert_allclose(got, turned(want), rtol=0, atol=1000 * EPS)
    for scale in scales:
        scaled = [np.float32(scale * x) for x in xs]
        got = call(label, [{"a": x} for x in scaled], {"a": np.float32(scale * start)})["a"]
        np.testing.assert_allclose(got, scale * want, rtol=0, atol=1000 * EPS * scale)


@pytest.mark.slow
@law_of_methods(1)
def test_jit_equals_eager(label):
    _, _, count, _, _ = SUBJECTS[label]
    models, base = problem(count)
    jitted = jax.jit(lambda ms, b, w: call(label, ms, b, weights=w))
    got = jitted(models, base, jnp.array(WEIGHTS[:count]))
    assert_close(got, call(label), 100, size=4)


def test_time_may_be_traced():
    models, _ = problem(2)
    got = jax.jit(lambda t: methods.slerp(t=t)(models))(0.3)
    assert_close(got, methods.slerp(t=0.3)(models), 100, size=4)


@pytest.mark.slow
@law_of_methods(2)
def test_gradient(label):
    """In the weights (t of slerp) and in a model, central differences in float64: truncation h^2
    times third derivatives below 100, rounding 1e-16 / h."""
    with jax.enable_x64(True):
        name, options, count, with_base, _ = SUBJECTS[label]
        models, base = problem(count, jnp.float64)
        models, base = [{"kernel": m["kernel"]} for m in models], {"kernel": base["kernel"]}
        probe = np.asarray(tree(9, jnp.float64)["kernel"])

        @jax.jit
        @functools.partial(jax.value_and_grad, argnums=(0, 1))
        def loss(w, first):
            ms = [{"kernel": first}, *models[1:]]
            time = {"t": w[0]} if name == "slerp" else {}
            merge = methods.get(name)(**{**options, **time})
            merged = merge(ms, base if with_base else None, weights=None if time else w)
            return jnp.vdot(jnp.sin(merged["kernel"]), probe)

        at = np.array(WEIGHTS[:count]), np.asarray(models[0]["kernel"])
        got = loss(*at)[1]
        h = 1e-5
        for i in range(2):
            size = at[i].size
            for j in range(min(size, 2)):
                step = (h * np.eye(size)[j]).reshape(at[i].shape)
                moved = [[*at], [*at]]
                moved[0][i], moved[1][i] = at[i] + step, at[i] - step
                want = (loss(*moved[0])[0] - loss(*moved[1])[0]) / (2 * h)
                np.testing.assert_allclose(got[i].reshape(-1)[j], want, rtol=1e-6, atol=1e-7)
            assert np.abs(np.asarray(got[i])).max() > 1e-3 or name == "karcher"


@pytest.mark.slow
@pytest.mark.parametrize(
    "label",
    [
        *("slerp", "stock"),
        "nuslerp",
        "multislerp",
        "karcher",
    ],
)
def test_gradients_at_copies_and_zeros_are_finite(label):
    count = SUBJECTS[label][2]

    @jax.jit
    @jax.grad
    def gradient(x, value):
        return call(label, [{"a": x}, *[{"a": value}] * (count - 1)], {"a": 0 * x})["a"].sum()

    for value in (np.ones(3, np.float32), np.zeros(3, np.float32)):
        chex.assert_tree_all_finite(gradient(value, value))


@pytest.mark.slow
@law_of_methods(3)
def test_pieces_equal_the_whole(label, monkeypatch):
    """Merges runs of rows or entries, padded with zeros, as when files are read."""
    name, options, count, with_base, _ = SUBJECTS[label]
    models, base = problem(count)
    merge, weights = methods.get(name)(**options), WEIGHTS[:count]
    base = flat(base) if with_base else None
    models = [flat(m) for m in models]
    whole = flat(merge(models, base, weights=weights))
    merge_cases.in_small_pieces(monkeypatch)
    got, _ = merge_cases.streamed(merge, models, base, weights)
    for path, leaf in whole.items():
        np.testing.assert_allclose(got[path], leaf.reshape(-1), rtol=0, atol=100 * EPS)


# --- accuracy


@pytest.mark.slow
def test_gram_of_long_vectors():
    """Of 2^22 entries with a mean, whose squares all add up: within 8 eps of |a| |b|, where one sum
    from left to right would be off by thousands of eps."""
    x = np.random.default_rng(0).normal(size=(3, 2**22)).astype(np.float32) + np.float32(0.3)
    want = x.astype(float) @ x.astype(float).T
    got = np.asarray(jax.jit(gram)(jnp.asarray(x)))
    size = np.sqrt(np.outer(np.diag(want), np.diag(want)))
    assert np.max(np.abs(got - want) / size) < 8 * EPS


@pytest.mark.parametrize("angle", [1e-1, 1e-2, 1e-4, 1e-6, 0.0])
def test_nearly_parallel_vectors_lose_nothing(angle):
    """Coefficients are smooth in theta^2, so that rounding of a cosine near 1 is not magnified:
    4 ulp of entries below 3, where arccos alone would be off by 1e-4."""
    random = np.random.default_rng(4)
    a, b = np.linalg.qr(random.normal(size=(64, 2)))[0].T
    b = np.cos(angle) * a + np.sin(angle) * b
    vectors = [x.astype(np.float32) for x in (2 * a, 3 * b)]
    want = reference.slerp([x.astype(float) for x in vectors], 0.3)
    got = methods.slerp(t=0.3)([{"a": jnp.asarray(x)} for x in vectors])["a"]
    assert np.abs(np.asarray(got) - want).max() < 4 * EPS * 3


@pytest.mark.slow
def test_karcher_of_two_is_slerp_and_minimises():
    models, _ = problem(2)
    got = methods.karcher()(models, weights=[3.0, 1.0])
    assert_close(got, methods.slerp(t=0.25)(models), 200, size=4)
    models, _ = problem(3)
    x = np.asarray(methods.karcher()(models, weights=WEIGHTS)["kernel"], float).reshape(-1)
    vectors = [np.asarray(m["kernel"], float).reshape(-1) for m in models]
    spread = lambda u: sum(  # noqa: E731
        w * reference.angle(u, v) ** 2 for w, v in zip(WEIGHTS, vectors, strict=True)
    )
    for k in range(20):
        other = x + 0.05 * np.random.default_rng(k).normal(size=20)
        assert spread(x) < spread(other)


def test_filter_wise_columns_are_rows_of_the_transpose():
    models, base = problem(3)
    pick = lambda tree, f: {"kernel": f(tree["kernel"])}  # noqa: E731
    flipped = [pick(m, jnp.transpose) for m in models], pick(base, jnp.transpose)
    plain = [pick(m, jnp.asarray) for m in models], pick(base, jnp.asarray)
    got = methods.model_stock(filter_wise=True, input_axis=0)(*plain)
    want = methods.model_stock(filter_wise=True)(*flipped)
    assert_close(got["kernel"], want["kernel"].T, 8, size=4)


def test_model_stock_recovers_the_centre_of_noisy_models():
    """Jang et al.'s geometry: theta_k = mu + noise of equal size at right angles; the point of the
    hyperplane nearest to mu. Exact geometry, so 16 ulp."""
    eye = np.eye(5, dtype=np.float32)
    mu, noise = eye[0], 2.0
    models = [{"a": jnp.asarray(mu + noise * eye[k + 1])} for k in range(3)]
    got = methods.model_stock()(models, {"a": jnp.zeros(5)})["a"]
    mean = mu + noise * eye[1:4].mean(0)
    nearest = mean @ mu / (mean @ mean) * mean  # of the segment from base to mean, to mu
    np.testing.assert_allclose(got, nearest, rtol=0, atol=16 * EPS)


# --- degenerate inputs


def two(label, a, b, base=0.0, **options):
    models = [{"a": jnp.asarray(a)}, {"a": jnp.asarray(b)}]
    models += models[1:] * (SUBJECTS[label][2] - 2)
    return call(label, models, {"a": jnp.full(np.shape(a), base, models[0]["a"].dtype)}, **options)[
        "a"
    ]


@law(3)
def test_deltas_of_zero(label):
    """A frozen tensor is unchanged by every method."""
    start = np.array([1.0, -2.0, 3.0, 0.5], np.float32)
    got = call(label, [{"a": start}] * SUBJECTS[label][2], {"a": start})["a"]
    np.testing.assert_allclose(got, start, rtol=4 * EPS)
    zero = call(label, [{"a": 0 * start}] * SUBJECTS[label][2], {"a": 0 * start})["a"]
    assert zero.tolist() == [0.0] * 4


@law_of_methods(4)
def test_tiny_shapes(label):
    """There is only one direction: results lie within the range of the models, except for slerp."""
    count, shapes = SUBJECTS[label][2], [(), (1,), (3, 1), (1, 3), (0, 3), (2, 0)]
    models = [[jnp.full(shape, 1.0 + k) for shape in shapes] for k in range(count)]
    for shape, got in zip(shapes, call(label, models, [0 * x for x in models[0]]), strict=True):
        assert got.shape == shape
        chex.assert_tree_all_finite(got)
        assert np.all((np.asarray(got) > 0.5) & (np.asarray(got) < 3.1))


@law(4)
def test_antipodal_vectors_are_interpolated_linearly(label):
    """Two opposed vectors have no mean direction: the result is the weighted mean of the vectors,
    or the base (stock).
    """
    a = np.array([1.0, 2.0, 2.0, 4.0], np.float32)
    got = two(label, a, -a, weights=None)
    chex.assert_tree_all_finite(got)
    if SUBJECTS[label][2] == 2:
        t = SUBJECTS[label][1].get("t", 0.5)
        np.testing.assert_allclose(got, (1 - 2 * t) * a, rtol=0, atol=8 * EPS)
    opposed = methods.get(SUBJECTS[label][0])
    if label in ("karcher", "multislerp", "multislerp mergekit"):
        models = [{"a": x} for x in (a, -3 * a)]
        got = opposed(**SUBJECTS[label][1])(models)["a"]
        np.testing.assert_allclose(got, -a, rtol=0, atol=8 * EPS)


def test_one_model():
    models, base = problem(1)
    for name in ("multislerp", "karcher"):
        assert_close(methods.get(name)()(models), models[0], 4, size=4)
    for name, least in (("slerp", "2"), ("nuslerp", "2"), ("model_stock", "at least 2")):
        with pytest.raises(ValueError, match=f"models: expected {least}, got 1"):
            methods.get(name)()(models, base)
    with pytest.raises(ValueError, match="models: expected 2, got 3"):
        methods.slerp(t=0.5)(models * 3)


@pytest.mark.parametrize("name", ["multislerp", "karcher", "model_stock"])
def test_weights_that_sum_to_zero_are_refused(name):
    models, base = problem(2)
    with pytest.raises(ValueError, match="sum to 0"):
        methods.get(name)()(models, base, weights=[1.0, -1.0])


def test_weights_that_sum_to_zero_mean_the_middle_in_nuslerp():
    models, _ = problem(2)
    got = methods.nuslerp()(models, weights=[1.0, -1.0])
    chex.assert_trees_all_equal(got, methods.nuslerp()(models))


@law(5)
def test_tiny_deltas_are_treated_as_larger_ones(label):
    assert_tiny_deltas_are_treated_as_larger_ones(label, jnp.float32)


@pytest.mark.slow
@law_of_methods(5)
def test_tiny_deltas_in_half_precision_are_treated_as_larger_ones(label):
    assert_tiny_deltas_are_treated_as_larger_ones(label, jnp.bfloat16)


def assert_tiny_deltas_are_treated_as_larger_ones(label, dtype):
    """Deltas of 1e-5, up to mergekit's absolute threshold in Model Stock."""
    count = SUBJECTS[label][2]
    models = [{"a": x["kernel"]} for x in problem(count, dtype)[0]]
    small = jax.tree.map(lambda x: x * 2.0**-17, models)
    zero = {"a": jnp.zeros_like(models[0]["a"])}
    got, want = call(label, small, zero)["a"], call(label, models, zero)["a"]
    if label == "stock mergekit":
        assert float(np.abs(got).max()) < 0.1 * 2.0**-17 * float(np.abs(want).max())
    else:
        np.testing.assert_allclose(got.astype(float) * 2.0**17, want.astype(float), rtol=0.01)


@pytest.mark.slow
@law_of_methods(6)
def test_huge_values_in_half_precision(label):
    """60000 in float16 and 1e30 in bfloat16 have squares beyond float16 and float32."""
    count = SUBJECTS[label][2]
    huge = [{"a": jnp.array([[6e4, k], [k, 6e4]], jnp.float16)} for k in range(count)]
    chex.assert_tree_all_finite(call(label, huge, {"a": jnp.zeros((2, 2), jnp.float16)}))
    beyond = [{"a": jnp.full((2, 2), 1e30, jnp.bfloat16)}] * count
    got = call(label, beyond, {"a": jnp.zeros((2, 2), jnp.bfloat16)})["a"]
    factor = sum(WEIGHTS[:count]) if label == "multislerp sum" else 1
    np.testing.assert_allclose(got.astype(float), factor * 1e30, rtol=2.0**-7)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("slerp", {"t": [0.1, 0.2]}, ValueError, "t: expected a finite number"),
        ("slerp", {"t": np.nan}, ValueError, "t: expected a finite number"),
        ("slerp", {"compat": "mergkit"}, ValueError, "compat: expected"),
        ("karcher", {"max_iterations": 2.5}, ValueError, "max_iterations: expected an integer"),
        ("karcher", {"tolerance": -1.0}, ValueError, "tolerance: expected a number >= 0"),
        ("model_stock", {"input_axis": 1}, ValueError, "input_axis: expected one of -1, 0; got"),
        ("model_stock", {"average": "mean"}, ValueError, "average: expected one of"),
    ],
)
def test_refuses_bad_options(name, options, error, message):
    models, base = problem(2)
    with pytest.raises(error, match=message):
        methods.get(name)(**options)(models, base)


# --- what popular code gets wrong, and what compat="mergekit" keeps of it


def test_defect_slerp_of_a_zero_tensor():
    """mergekit: .707 b at the middle of 0 and b. Here .5 b."""
    b = jnp.array([3.0, 4.0])
    models = [{"a": 0 * b}, {"a": b}]
    np.testing.assert_allclose(methods.slerp(t=0.5)(models)["a"], 0.5 * b, rtol=4 * EPS)
    kept = methods.slerp(t=0.5, compat="mergekit")(models)["a"]
    np.testing.assert_allclose(kept, np.sqrt(0.5) * b, rtol=4 * EPS)


def test_defect_slerp_does_not_interpolate_lengths():
    """mergekit: of lengths 1 and 10 at 60 degrees the middle has length 6.08, not 5.5."""
    a, b = jnp.array([1.0, 0.0]), 10 * jnp.array([0.5, np.sqrt(0.75)], jnp.float32)
    models = [{"a": a}, {"a": b}]
    length = lambda **k: float(jnp.linalg.norm(methods.slerp(t=0.5, **k)(models)["a"]))  # noqa: E731
    assert abs(length() - 5.5) < 1e-5
    assert abs(length(compat="mergekit") - np.sqrt(111 / 3)) < 1e-5


def test_defect_slerp_is_linear_below_two_degrees():
    """mergekit: cos > .9995 is interpolated linearly, 6e-5 short of the arc."""
    theta = 0.03
    models = [{"a": jnp.array([1.0, 0.0])}, {"a": jnp.array([np.cos(theta), np.sin(theta)])}]
    length = lambda **k: float(jnp.linalg.norm(methods.slerp(t=0.5, **k)(models)["a"]))  # noqa: E731
    assert abs(length() - 1) < 4 * EPS
    assert abs(length(compat="mergekit") - np.cos(theta / 2)) < 4 * EPS


@pytest.mark.slow
def test_defect_multislerp_is_not_on_the_arc():
    """mergekit's tangent step is 0: at t = 1/4 and a right angle 18.4 degrees, not 22.5."""
    models = [{"a": jnp.array([1.0, 0.0])}, {"a": jnp.array([0.0, 1.0])}]
    angle = lambda **k: float(  # noqa: E731
        jnp.arctan2(*methods.multislerp(**k)(models, weights=[3.0, 1.0])["a"][::-1])
    )
    assert abs(angle() - np.pi / 8) < 4 * EPS
    assert abs(angle(compat="mergekit") - np.arctan(1 / 3)) < 4 * EPS


@pytest.mark.parametrize("compat", ["paper", "mergekit"])
def test_defect_multislerp_of_a_frozen_tensor(compat):
    """mergekit raises for three models that share a tensor with the base."""
    base = {"a": jnp.arange(4.0)}
    got = methods.multislerp(compat=compat)([base] * 3, base)
    chex.assert_trees_all_equal(got, base)


@pytest.mark.slow
def test_defect_model_stock_of_small_copies():
    """mergekit: two copies of a delta of 1e-4 have "cosine" .04 and are nearly reverted."""
    base, model = {"a": jnp.zeros(4)}, {"a": jnp.full(4, 1e-4)}
    got = methods.model_stock()([model, model], base)["a"]
    np.testing.assert_allclose(got, 1e-4, rtol=8 * EPS)
    kept = methods.model_stock(compat="mergekit")([model, model], base)["a"]
    np.testing.assert_allclose(kept, 1e-4 * 2 * 0.04 / 1.04, rtol=16 * EPS)


@pytest.mark.slow
@pytest.mark.parametrize("compat", ["paper", "mergekit"])
def test_defect_model_stock_at_its_pole(compat):
    """mergekit: -inf for two opposed deltas. Here the base."""
    base = {"a": jnp.array([1.0, 2.0])}
    models = [{"a": base["a"] + x} for x in (1.0, -1.0)]
    chex.assert_trees_all_equal(methods.model_stock(compat=compat)(models, base), base)


def test_defect_model_stock_goes_backwards():
    """mergekit: at an obtuse angle t < 0 leaves the base away from the mean."""
    base = {"a": jnp.zeros(2)}
    models = [{"a": jnp.array([1.0, 0.0])}, {"a": jnp.array([-0.6, 0.8])}]
    assert methods.model_stock()(models, base)["a"].tolist() == [0.0, 0.0]
    kept = methods.model_stock(compat="mergekit")(models, base)["a"]
    np.testing.assert_allclose(kept, -3 * np.array([0.2, 0.4]), rtol=8 * EPS)


@pytest.mark.slow
def test_defect_karcher_ignores_weights_and_stops_early():
    """mergekit supports only equal weights, and takes the first model if directions cancel."""
    models, _ = problem(3)
    equal = methods.karcher(compat="mergekit")(models)
    chex.assert_trees_all_equal(methods.karcher(compat="mergekit")(models, weights=WEIGHTS), equal)
    # ten steps, each of which shortens the rest to less than 0.35 of it; lengths below 10
    chex.assert_trees_all_close(equal, methods.karcher()(models), rtol=0, atol=10 * 0.35**10)
    a = jnp.array([1.0, 2.0])
    opposed = [{"a": a}, {"a": -a}]
    np.testing.assert_allclose(methods.karcher(compat="mergekit")(opposed)["a"], a, rtol=8 * EPS)
    assert methods.karcher()(opposed)["a"].tolist() == [0.0, 0.0]


def test_defect_nuslerp_of_a_cropped_tensor():
    """mergekit flattens by a view, which fails for a cropped embedding; arrays have no strides."""
    big = jnp.arange(12.0).reshape(4, 3)
    got = methods.nuslerp()([{"a": big[:2, :2]}, {"a": big[1:3, 1:]}])["a"]
    assert got.shape == (2, 2)


def test_defect_half_precision_output():
    """fusion_bench's slerp returns float32 for bfloat16."""
    models = [{"a": jnp.ones(2, jnp.bfloat16)}, {"a": jnp.arange(2, dtype=jnp.bfloat16)}]
    assert methods.slerp(t=0.5)(models)["a"].dtype == jnp.bfloat16


@pytest.mark.slow
def test_eps_of_multislerp():
    """By the definition, in float64: lengths near eps, and a mean of directions shorter than it."""
    random = np.random.default_rng(7)
    xs = random.normal(size=(2, 6)) * [[1.0], [0.2]]
    models = [{"a": jnp.asarray(x, jnp.float32)} for x in xs]
    lengths = np.linalg.norm(xs, axis=1)
    for eps, weights in ((0.4, [0.6, 0.3]), (0.4, [0.2, -0.1]), (0.0, [0.6, 0.3])):
        w = np.array(weights)
        mean = w @ (xs / (lengths[:, None] + eps))
        size = np.linalg.norm(mean)
        arc = mean / size * np.cos(eps) * (w @ lengths)
        want = arc if size >= eps else w @ xs
        assert (size >= eps) == (weights != [0.2, -0.1])
        merge = methods.multislerp(normalize=False, eps=eps, compat="mergekit")
        np.testing.assert_allclose(merge(models, weights=weights)["a"], want, atol=10 * EPS)
    alone = merge(models[:1], weights=[0.3])
    np.testing.assert_array_equal(alone["a"], models[0]["a"])
    with pytest.raises(ValueError, match="eps: expected None unless compat"):
        methods.multislerp(eps=1e-8)
