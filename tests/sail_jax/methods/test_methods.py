"""What holds for named methods beyond the laws: precision, moments of masks, refusals."""

import functools
from typing import Literal

import chex
import elementwise_reference
import geometric_reference
import jax
import jax.numpy as jnp
import merge_reference as reference
import numpy as np
import pytest
import spectral_reference
from cells import slow
from merge_cases import NAMES, flat, make, problem

from sail_jax import Merge, merge_checkpoints, methods, transforms
from sail_jax.checkpoint import load_checkpoint, save_checkpoint
from sail_jax.merging.combining import chain, masked
from sail_jax.merging.reductions import weighted_mean, weighted_sum
from sail_jax.merging.task_vectors import TaskVectors, apply, task_vectors

EPS = float(jnp.finfo(jnp.float32).eps)
KEY = jax.random.key(7)
WEIGHTS = [0.5, 1.0, 1.5]
M = len(WEIGHTS)


def assert_close(got, want, ulps, size=1.0):
    """|got - want| within `ulps` float32 ulps of `size` (the largest intermediate value)."""
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    chex.assert_trees_all_close(got, want, rtol=0, atol=ulps * EPS * size)


# --- the reference


def test_every_method_has_a_reference():
    """A reference of the same name, one with arrays as in `test_data_driven`, or that of
    another method."""
    references = (reference, elementwise_reference, geometric_reference, spectral_reference)
    known = {name for module in references for name in vars(module)}
    assert methods.METHODS.keys() - known == {"fisher", "regmean", "multislerp"}


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["tree", "tensor"])
def test_density_one_is_no_trimming(scope):
    models, base = problem()
    untrimmed = Merge(transforms.elect(), weighted_mean)(models, base, weights=WEIGHTS)
    whole = methods.ties(density=1.0, scope=scope)(models, base, weights=WEIGHTS)
    assert_close(whole, untrimmed, 4, size=8)  # weights normalised first or not
    chex.assert_trees_all_equal(
        methods.dare_linear(density=1.0, key=KEY)(models, base, weights=WEIGHTS),
        methods.task_arithmetic()(models, base, weights=WEIGHTS),
    )
    # Sums of multiples of 1/64 are exact: programs that fuse them differently give equal bits.
    *models, base = (jax.tree.map(lambda x: jnp.round(64 * x) / 64, m) for m in (*models, base))
    weights = [0.5, 1.0, 0.5]
    chex.assert_trees_all_equal(
        methods.dare_ties(density=1.0, key=KEY)(models, base, weights=weights),
        methods.ties(density=1.0, scope=scope)(models, base, weights=weights),
    )


@pytest.mark.slow
def test_gradient_of_the_soup_in_closed_form():
    """d/dw_k sum_j w_j theta_j / sum_j w_j = (theta_k - soup) / sum_j w_j."""
    models, base = problem()
    w = jnp.array(WEIGHTS)
    got = jax.jacobian(lambda w: methods.linear()(models, base, weights=w)["embed"])(w)
    soup = methods.linear()(models, base, weights=w)["embed"]
    want = jnp.stack([(m["embed"] - soup) / w.sum() for m in models], -1)
    assert_close(got, want, 16, size=4)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        models, base = problem(dtype=jnp.float64)
        want = reference.task_arithmetic([flat(m) for m in models], flat(base), WEIGHTS, None)
        got = flat(methods.task_arithmetic()(models, base, weights=WEIGHTS))
        # 1e-5 is what the reference's float32 deltas cost; float32 sums could not pass the second
        chex.assert_trees_all_close(got, want, atol=1e-5)
        assert got["embed"].dtype == np.float64
        copies = methods.linear()([base] * 3)
        chex.assert_trees_all_close(copies, base, rtol=0, atol=1e-15)


@pytest.mark.slow
def test_numbers_of_numpy_are_not_narrowed(monkeypatch):
    """Without float64 and int64 in JAX, which is the default. Sums of three float64 numbers
    are off by 3 of their ulp, those of float32 by 2^29 times that."""
    with jax.enable_x64(False):
        rng, big = np.random.default_rng(0), np.array([2**40 + 1])
        x, y = rng.normal(size=(2, 9))
        models, want = [{"w": x, "n": big}, {"w": y, "n": big}], (x + 2 * y) / 3
        merge = methods.linear()
        for place in ("one CPU", "elsewhere"):
            if place == "elsewhere":
                monkeypatch.setattr("sail_jax.merging.merge.on_one_cpu", lambda *trees: False)
            got = merge(models, weights=[1, 2])
            assert [(type(v), v.dtype.name) for v in (got["w"], got["n"])] == [
                (np.ndarray, "float64"),
                (np.ndarray, "int64"),
            ]
            np.testing.assert_allclose(got["w"], want, rtol=0, atol=3 * 2.0**-52)
            assert got["n"] == big
            assert not np.shares_memory(got["n"], big)
            # a base of float32 decides on the outcome, not on the sums
            small = merge(models, {"w": x.astype(np.float32), "n": big}, weights=[1, 2])["w"]
            np.testing.assert_array_equal(small, want.astype(np.float32))
            assert isinstance(small, jax.Array)
            with jax.enable_x64(True):
                arrays = [{"w": jnp.asarray(m["w"])} for m in models]
            wide = merge(arrays, weights=[1, 2])["w"]
            assert isinstance(wide, jax.Array)
            np.testing.assert_array_equal(np.asarray(wide), got["w"])
        traced = jax.jit(merge)([{"w": x}, {"w": y}])["w"]
        assert traced.dtype == jnp.float32
        weighted = jax.jit(lambda w: merge([{"w": x}, {"w": y}], weights=w))(jnp.ones(2))["w"]
        np.testing.assert_array_equal(weighted, traced)


@pytest.mark.slow
def test_nothing_that_takes_models_narrows_numbers_of_numpy():
    """Changes of 2^-40 in numbers near 1 are lost in float32, and these Fishers become 0."""
    rng = np.random.default_rng(1)
    base = {"w": rng.uniform(1, 2, (3, 2)), "n": np.arange(2)}
    models = [base | {"w": base["w"] + 2.0**-40 * rng.normal(size=(3, 2))} for _ in range(2)]
    first, second = (m["w"] for m in models)
    with jax.enable_x64(False):
        vectors = task_vectors(models, base)
        delta = np.stack([first, second]) - base["w"]
        np.testing.assert_array_equal(vectors.delta["w"], delta)
        update = weighted_sum(vectors)
        np.testing.assert_array_equal(update["w"], delta[0] + delta[1])
        got = [apply(base, update, 0.5)]
        wants = [base["w"] + 0.5 * (delta[0] + delta[1])]
        fishers = [{"w": 1e-50 * np.abs(rng.normal(size=(3, 2)))} for _ in models]
        F, G = (f["w"] for f in fishers)
        got.append(methods.fisher(fishers=fishers)(models))
        wants.append((F * first + G * second) / (F + G))
        assert_wide(got, wants)
        with pytest.raises(ValueError, match="expected finite values >= 0 that fit float32"):
            methods.fisher(fishers=[{"w": np.full((3, 2), 1e300)}])
        # what is traced is as JAX has decided
        assert jax.jit(lambda s: apply(base, update, s))(1.0)["w"].dtype == jnp.float32


def assert_wide(got, wants):
    for tree, want in zip(got, wants, strict=True):
        assert isinstance(tree["w"], np.ndarray)
        np.testing.assert_allclose(tree["w"], want, rtol=1e-13)


@pytest.mark.slow
def test_learned_merges_do_not_narrow_numbers_of_numpy():
    """Nor do methods that use data, or give each task a separate model."""
    rng = np.random.default_rng(1)
    base = {"w": np.array([[1.0, 2.0]])}
    model = {"w": base["w"] + 2.0**-40}
    W, X = rng.normal(size=(2, 3, 2)), rng.normal(size=(2, 5, 3))
    A, B = (x.T @ x for x in X)
    with jax.enable_x64(False):
        regmean = methods.regmean(grams=[{"w": A}, {"w": B}], off_diagonal=1, damping=1e-15)
        fitted = regmean([{"w": x} for x in W])
        own = methods.emr([model], base).model(base, 0)
        want = np.linalg.solve(A + B, A @ W[0] + B @ W[1])
        assert_wide([fitted, own], [want, model["w"]])
        got = methods.adamerging(
            [model], base, lambda p, x: x @ p["w"], [np.ones((1, 1, 1))], steps=1
        )
        assert isinstance(got.params["w"], np.ndarray)
        np.testing.assert_array_equal(got.params["w"], base["w"] + got.coefficients * 2.0**-40)
        soup = methods.learned_soup(
            [model],
            predict=lambda p, x: x @ p["w"],
            batches=(np.ones((1, 1, 1)), np.ones((1, 1), int)),
            steps=0,
        )
        np.testing.assert_array_equal(soup.params["w"], model["w"])


@pytest.fixture
def own_methods():
    """Methods that a test registers; they are gone after it."""
    known = dict(methods.METHODS)
    yield methods.method
    methods.METHODS.clear()
    methods.METHODS.update(known)


def test_recipes_hold_whole_numbers_and_words_without_defaults(own_methods, tmp_path):
    """The values of an argument follow from its type: an integer, a number, a word, one of
    some words. An error contains a type that is too general."""

    @own_methods
    def counted(*, times: int, by: Literal["twice", "once"], note: str, factor: float) -> Merge:
        if by not in ("twice", "once"):
            raise ValueError(f"by: got {by!r}")
        return Merge(scale=times * factor * (2 if by == "twice" else 1), base="unused")

    @own_methods
    def vague(*, by: str) -> Merge:
        raise ValueError(f"by: expected 'twice', got {by!r}")

    save_checkpoint(tmp_path / "model.npz", {"w": np.ones(3, np.float32)})
    merge = functools.partial(merge_checkpoints, [tmp_path / "model.npz"], tmp_path / "out.npz")
    options = {"times": 3, "by": "twice", "note": "any", "factor": 0.5}
    with pytest.raises(ValueError, match="times"):
        merge(method="counted", **options | {"times": 2.5})
    with pytest.raises(ValueError, match="counted needs 'by'"):
        merge(method="counted", times=3, note="", factor=1.0)
    merge(method="counted", **options)
    assert load_checkpoint(tmp_path / "out.npz")["w"].tolist() == [3, 3, 3]
    with pytest.raises(ValueError, match="vague: by: expected 'twice', got ''; annotations"):
        merge(method="vague", by="twice")


@pytest.mark.slow
def test_float64_is_merged_as_in_files(tmp_path):
    models = [{"w": row} for row in np.random.default_rng(0).normal(size=(2, 9))]
    for k, model in enumerate(models):
        save_checkpoint(tmp_path / f"{k}.npz", model)
    merge = methods.slerp(t=0.3)
    merge_checkpoints([tmp_path / "0.npz", tmp_path / "1.npz"], tmp_path / "out.npz", method=merge)
    np.testing.assert_array_equal(merge(models)["w"], load_checkpoint(tmp_path / "out.npz")["w"])


def test_leaves_too_small_for_the_density_are_not_reverted():
    base = {"scalar": jnp.zeros(()), "vector": jnp.zeros(4)}
    model = jax.tree.map(jnp.ones_like, base)
    got = methods.ties(density=0.01, scope="tensor")([model], base)
    assert float(got["scalar"]) == 1.0
    assert got["vector"].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_linear_ignores_the_values_of_the_base_and_takes_its_dtypes():
    models, base = problem()
    want = methods.linear()(models)
    chex.assert_trees_all_equal(methods.linear()(models, base), want)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), {"a": base["embed"]})
    assert methods.linear()([{"a": m["embed"]} for m in models], half)["a"].dtype == jnp.bfloat16


def test_soup_with_weights_that_bfloat16_cannot_hold():
    """0.3 is 0.30078125 in bfloat16: the soup of 1000 and 0 would be 300.78, not 300."""
    models = [{"a": jnp.full(3, v, jnp.bfloat16)} for v in (1000.0, 0.0)]
    assert methods.linear()(models, weights=[0.3, 0.7])["a"].tolist() == [300.0] * 3


def test_masked_transform_in_a_merge():
    """Trimming restricted to the kernels does not change biases."""
    models, base = problem()
    elect = transforms.elect()
    some = chain(masked(transforms.trim(0.5), "embed"), elect)
    got = Merge(some, weighted_mean)(models, base)
    plain = Merge(elect, weighted_mean)(models, base)
    chex.assert_trees_all_equal(got["block"], plain["block"])
    alone = methods.ties(density=0.5)(
        [{"embed": m["embed"]} for m in models], {"embed": base["embed"]}
    )
    assert_close(got["embed"], alone["embed"], 4, size=8)


# --- DARE's moments


def z_scores(samples, expected):
    """(mean - expected) / standard error over the leading axis."""
    error = samples.std(0, ddof=1) / np.sqrt(len(samples))
    return (samples.mean(0) - expected) / error


@pytest.mark.slow
def test_dare_is_unbiased_with_variance_p_over_one_minus_p():
    """Null: E = delta and Var = p/(1-p) delta^2 per entry. 4096 draws, 2 x 11 entries, |z| < 4."""
    density, draws = 0.3, 4096
    delta = {"a": jnp.linspace(0.5, 2.0, 10), "b": jnp.array(-1.0)}
    base = jax.tree.map(jnp.zeros_like, delta)
    once = jax.jit(lambda key: methods.dare_linear(density=density, key=key)([delta], base))
    samples = jax.vmap(once)(jax.random.split(KEY, draws))
    for path, d in flat(delta).items():
        x = np.asarray(samples[path], float)
        assert np.abs(z_scores(x, d)).max() < 4
        assert np.abs(z_scores((x - d) ** 2, (1 - density) / density * d**2)).max() < 4
    entries = np.concatenate([np.asarray(samples["a"]), np.asarray(samples["b"])[:, None]], 1) != 0
    pairs = np.corrcoef(entries.T)[np.triu_indices(11, 1)]
    assert np.abs(pairs).max() * np.sqrt(draws) < 4  # null: masks of two entries are independent


@pytest.mark.slow
def test_dare_raises_the_spread_of_models_by_its_identity():
    """E sum_i l_i |d_i - dbar|^2 = V + p/(1-p) sum_i l_i (1 - l_i) |d_i|^2; 4096 draws, |z| < 4."""
    rate, draws = 0.6, 4096
    lam = np.array([0.2, 0.3, 0.5])
    delta = np.random.default_rng(5).normal(size=(M, 40)) + 1.0
    vectors = TaskVectors({"a": jnp.asarray(delta, jnp.float32)}, {"a": jnp.ones((M, 1))})

    def spread(d):
        return (lam * ((d - (lam @ d)) ** 2).sum(-1)).sum()

    def once(key):
        kept = transforms.drop(rate, key)(vectors)
        return kept.delta["a"] * kept.weight["a"]

    samples = np.asarray(jax.vmap(once)(jax.random.split(KEY, draws)), float)
    V = np.array([spread(d) for d in samples])
    excess = rate / (1 - rate) * (lam * (1 - lam) * (delta**2).sum(-1)).sum()
    assert abs(z_scores(V, spread(delta) + excess)) < 4
    assert abs(z_scores(V, spread(delta))) > 50  # the identity is not vacuous at this size


@pytest.mark.slow
def test_masks_differ_between_models_and_leaves_and_follow_the_key():
    base = {"a": jnp.zeros(64), "b": jnp.zeros(64)}
    ones = jax.tree.map(jnp.ones_like, base)

    def cast(key, k):
        merge = methods.dare_linear(density=0.5, key=key)
        return merge([ones] * 3, base, weights=np.eye(3)[k])

    outs = [cast(KEY, k)[leaf] for k in range(3) for leaf in "ab"] + [
        cast(jax.random.key(8), 0)["a"]
    ]
    for i, x in enumerate(outs):  # equal by chance: 2^-64
        assert not any(bool((x == y).all()) for y in outs[:i])
    chex.assert_trees_all_equal(cast(KEY, 1), cast(KEY, 1))
    chex.assert_trees_all_equal(cast(jax.random.PRNGKey(7), 1), cast(KEY, 1))


# --- refusals


GOOD = {"w": jnp.ones(4), "n": {"step": jnp.arange(2)}}


# what is wrong -> what differs from GOOD in the last of two models, other arguments, error, message
BAD = {
    "shape": ({"w": jnp.ones(3)}, {}, ValueError, r"'w': expected shape \(4,\), got \(3,\)"),
    "extra leaf": ({"x": 1.0}, {}, ValueError, "model 1 .* unexpected 'x'"),
    "missing leaf": ({"w": None}, {}, ValueError, "model 1 .* missing 'w'"),
    "float": (
        {"n": {"step": jnp.ones(2)}},
        {},
        TypeError,
        "'n/step': expected dtype int(32|64), got f",
    ),
    "complex": ({"w": jnp.ones(4, jnp.complex64)}, {}, TypeError, "'w': .* got complex64"),
    "string": ({"w": "float32"}, {}, TypeError, "'w': expected an array, got str"),
    "nan": ({"w": jnp.full(4, jnp.nan)}, {}, ValueError, "model 1, leaf 'w': .*finite"),
    "infinity": (
        {"w": jnp.full(4, -jnp.inf)},
        {},
        ValueError,
        "model 1, leaf 'w': expected finite",
    ),
    "one weight": ({}, {"weights": [1.0]}, ValueError, r"weights: .*\(2,\), got shape \(1,\)"),
    "scalar weight": ({}, {"weights": 1.0}, ValueError, r"weights: .*\(2,\), got shape \(\)"),
    "nan weight": ({}, {"weights": [1.0, np.nan]}, ValueError, "weights: expected finite values"),
    "no number": ({}, {"weights": [1.0, None]}, ValueError, "weights: expected 2 numbers"),
    "no models": ({}, {"models": []}, ValueError, "models: expected at least 1, got 0"),
    "one tree": (
        {},
        {"models": GOOD},
        TypeError,
        "models: expected a sequence .* got dict",
    ),
    "unknown option": ({}, {"densty": 0.5}, TypeError, "has no hyperparameter 'densty'"),
}


@pytest.mark.parametrize("name", ["linear", *slow("ties")])
@pytest.mark.parametrize("case", BAD)
def test_refuses_by_name(name, case):
    change, arguments, error, message = BAD[case]
    arguments = {"models": [GOOD, GOOD | change], "base": GOOD, **arguments}
    models, base, weights = (arguments.pop(n, None) for n in ("models", "base", "weights"))
    with pytest.raises(error, match=message):
        methods.get(name)(**arguments)(models, base, weights=weights)


@pytest.mark.parametrize(
    ("method", "option", "message"),
    [
        ("ties", "weight", "ties: weight is an argument of the merge, .*weights=.*; scale is the"),
        ("ties", "lam", "no hyperparameter 'lam': scale is the factor .*weights are .*weights="),
        ("slerp", "lambda_", "'lambda_': the models' weights are given to the merge, slerp"),
        ("slerp", "base", r"slerp: base is an argument of the merge.*weights=\.\.\.\)$"),
        (
            "ties",
            "threshold",
            r"no hyperparameter 'threshold', a hyperparameter of consensus",
        ),
    ],
)
def test_a_hyperparameter_that_belongs_elsewhere_is_placed(method, option, message):
    with pytest.raises(TypeError, match=message):
        methods.get(method)(**{option: 0.3})


SCALED = [n for n in NAMES if "scale" in methods.options_of(n)]


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("scale", [np.nan, [1.0, 2.0], None])
def test_refuses_a_scale_that_is_not_a_finite_number(name, scale):
    with pytest.raises(ValueError, match="scale: expected a finite number"):
        make(name, scale=scale)([GOOD], GOOD)


def test_refuses_a_missing_or_broken_base():
    with pytest.raises(TypeError, match="base: expected the pytree"):
        methods.ties()([GOOD], None)
    with pytest.raises(ValueError, match="base, leaf 'w': expected finite"):
        methods.ties()([GOOD], GOOD | {"w": jnp.full(4, jnp.nan)})


@pytest.mark.parametrize("name", ["linear", "ties"])
@pytest.mark.parametrize("weights", [[1.0, -1.0], [0.0, 0.0], [0.6, 0.1, -0.7]])
def test_refuses_weights_that_cannot_be_normalized(name, weights):
    with pytest.raises(ValueError, match="sum to 0"):
        methods.get(name)()([GOOD] * len(weights), GOOD, weights=weights)


@pytest.mark.parametrize("name", ["ties", "dare_linear", "dare_ties"])
@pytest.mark.parametrize("density", [0.0, -0.1, 1.1, np.nan])
def test_refuses_a_density_outside_the_unit_interval(name, density):
    with pytest.raises(ValueError, match=r"density: expected .* in \(0, 1\]"):
        make(name, density=density)([GOOD], GOOD)


@pytest.mark.parametrize("option", ["scope", "elect_by", "tie"])
def test_refuses_unknown_choices(option):
    with pytest.raises(ValueError, match=f"ties: {option}: expected one of .*; got 'globl'"):
        methods.get("ties")(**{option: "globl"})


@pytest.mark.parametrize("key", [None, 0, jnp.zeros(2), jax.random.split(KEY, 2), "seed"])
def test_refuses_what_is_not_a_key(key):
    with pytest.raises(TypeError, match=r"dare_linear: key: expected (a|one) PRNG key"):
        methods.dare_linear(key=key)


def test_values_are_not_checked_while_traced():
    """Under jit a NaN is neither seen nor hidden, and integer leaves are the base's."""
    bad = {"w": jnp.full(4, jnp.nan), "n": {"step": jnp.ones(2, int)}}
    got = jax.jit(lambda m: methods.task_arithmetic()([m], GOOD))(bad)
    assert bool(np.isnan(got["w"]).all())
    chex.assert_trees_all_equal(got["n"], GOOD["n"])
    with pytest.raises(ValueError, match="missing 'n/step'"):
        jax.jit(lambda m: methods.task_arithmetic()([m], GOOD))({"w": GOOD["w"]})


def test_get_knows_every_method_and_suggests():
    assert methods.get("dare_ties") is methods.dare_ties
    with pytest.raises(ValueError, match="nearest: 'task_arithmetic'"):
        methods.get("task-arithmetics")
    with pytest.raises(ValueError, match=r"no merging method 'zzz' \(known: "):
        methods.get("zzz")


@pytest.mark.slow
def test_signed_weights_in_reductions():
    """By hand: three models, the third is masked; where weights cancel, up to rounding too, 0."""
    delta = {"a": jnp.array([[1.0, 1.0, 1.0], [-1.0, 3.0, 1.0], [9.0, 9.0, 1.0]])}
    weight = {"a": jnp.array([[1.0, 1.0, 0.6], [-0.5, -1.0, 0.1], [0.0, 0.0, -0.7]])}
    assert float(jnp.float32(0.6) + jnp.float32(0.1) - jnp.float32(0.7)) != 0
    vectors = TaskVectors(delta, weight)
    assert weighted_sum(vectors)["a"].tolist()[:2] == [1.5, -2.0]
    assert weighted_mean(vectors)["a"].tolist() == [3.0, 0.0, 0.0]
    mean = lambda w: weighted_mean(vectors._replace(weight=w))["a"].sum()  # noqa: E731
    gradient = jax.grad(mean)(weight)["a"]
    # (delta_k - 3) / (1 - .5) where there is an average, none where there is not
    assert gradient.T.tolist() == [[-4.0, -8.0, 12.0], [0.0] * 3, [0.0] * 3]


def test_a_bare_array_may_be_the_base_of_a_method_that_can_do_without():
    base, models = jnp.zeros(2), [jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0])]
    got = methods.nuslerp()(models, base)
    assert_close(got, jnp.full(2, 0.5**0.5), 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ties", "task_arithmetic", "della", "karcher", "sce", "tsv_m"])
def test_gradient_in_leaves_that_share_a_loop(name):
    """Along a random direction, in float64: truncation h^2 * 1e3, rounding 1e-16 * 1e3 / h."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        draw = lambda: {f"w{i}": rng.normal(size=(4, 3)) for i in range(3)}  # noqa: E731
        trees, ahead, probe = [draw() for _ in range(4)], [draw() for _ in range(4)], draw()
        merge = make(name)

        @jax.jit
        @jax.value_and_grad
        def loss(trees):
            merged = merge(trees[1:], trees[0])
            return sum(jnp.vdot(jnp.sin(merged[k]), probe[k]) for k in probe)

        moved = lambda h: jax.tree.map(lambda x, d: x + h * d, trees, ahead)  # noqa: E731
        h = 1e-5
        want = (loss(moved(h))[0] - loss(moved(-h))[0]) / (2 * h)
        inner = jax.tree.map(np.vdot, loss(trees)[1], ahead)
        assert abs(want) > 1e-2  # the comparison is not of zeros
        np.testing.assert_allclose(sum(jax.tree.leaves(inner)), want, rtol=1e-6, atol=1e-6)


def test_a_merge_is_shown_in_one_line():
    """The repr is the call that makes it, valid code if no option is an array."""
    ties = methods.ties(density=0.2, scope="tensor")
    assert repr(ties) == "ties(density=0.2, scope='tensor')"
    assert repr(eval(repr(ties), vars(methods))) == repr(ties)
    rescaled = methods.task_arithmetic(scale=np.full((), 0.5))
    assert repr(rescaled) == "task_arithmetic(scale=0.5)"
    fisher = methods.fisher(fishers=[{"w": jnp.ones((2, 3))}])
    assert repr(fisher) == "fisher(fishers=[{'w': float32[2,3]}])"
    mine = Merge(chain(transforms.trim(0.3), transforms.elect()), weighted_mean, scale=2.0)
    steps = "chain(trim(density=0.3), elect())"
    assert repr(mine) == f"Merge(transform={steps}, reduction=weighted_mean, scale=2.0)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), [("linear", {}), ("ties", {"density": 0.5, "scope": "tensor"})]
)
def test_weights_of_parts_are_those_of_each_part_alone(name, options):
    """Tensor scope: no leaf counts for another one."""
    rng = np.random.default_rng(0)
    base, *models = ({"a": {"v": x[0], "w": x[1]}, "b": x[2]} for x in rng.normal(size=(4, 3, 5)))
    merge = getattr(methods, name)(**options)
    weights = {"a": [1.0, 2.0, 0.5], "b": [3.0, 0.0, 1.0]}
    merged = merge(models, base, weights=weights)
    for part in ("a", "b"):
        alone = merge([{part: m[part]} for m in models], {part: base[part]}, weights=weights[part])
        chex.assert_trees_all_equal({part: merged[part]}, alone)
    stacked = jax.tree.map(lambda *x: np.stack(x, axis=1), *({"b": m["b"][None]} for m in models))
    along = merge(stacked, {"b": base["b"][None]}, weights=weights["b"], axis=1)
    chex.assert_trees_all_equal(along["b"][0], merged["b"])
