"""Every method on every input at which such methods break: a defined value, or a refusal that says
which method and which tensor or argument."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sail_jax import methods

KEY = jax.random.key(0)
KNOBS = {
    "slerp": {"t": 0.3},
    "nearswap": {"t": 0.5},
    "wudi": {"steps": 5},
}
RNG = np.random.default_rng(0)
SHAPES = {"kernel": (6, 4), "bias": (4,), "gain": (), "column": (5, 1), "one": (1,)}


def draw(scale=1.0, like=None):
    tree = {n: np.float32(scale * RNG.normal(size=s)) for n, s in SHAPES.items()}
    return tree if like is None else {n: like[n] + tree[n] for n in tree}


def cast(tree, dtype):
    return {n: np.asarray(x).astype(dtype) for n, x in tree.items()}


BASE = draw()
TUNED = [draw(0.1, BASE) for _ in range(3)]


def shifted(scale):
    return {n: x + np.float32(scale) for n, x in BASE.items()}


def mirrored():
    ahead, behind = ({n: BASE[n] + s * TUNED[0][n] for n in BASE} for s in (1, -1))
    return [ahead, behind, ahead]


# label -> (models, base, weights); every leaf is hit at once
CASES = {
    "no delta": ([BASE] * 3, BASE, None),
    "one tensor frozen in all": ([t | {"kernel": BASE["kernel"]} for t in TUNED], BASE, None),
    "one tensor frozen in one": ([TUNED[0] | {"kernel": BASE["kernel"]}, *TUNED[1:]], BASE, None),
    "identical models": ([TUNED[0]] * 3, BASE, None),
    "antipodal": (mirrored(), BASE, None),
    "opposite models": ([{n: s * x for n, x in TUNED[0].items()} for s in (1, -1, 1)], BASE, None),
    "zero models": ([{n: 0 * x for n, x in BASE.items()}] * 3, {n: 0 * x for n, x in BASE.items()},
                    None),
    "weights that sum to 0": (TUNED, BASE, [1.0, -2.0, 1.0]),
    "zero weights": (TUNED, BASE, [0.0, 0.0, 0.0]),
    "one zero weight": (TUNED, BASE, [0.0, 1.0, 1.0]),
    "one model": (TUNED[:1], BASE, None),
    "tiny delta": ([draw(1e-5, BASE) for _ in range(3)], BASE, None),
    "very tiny delta": ([shifted(1e-30 * k) for k in range(3)], {n: 0 * x for n, x in BASE.items()},
                        None),
    "constant delta": ([shifted(0.1)] * 3, BASE, None),
    "huge float16": ([cast({n: 0 * x + 6e4 for n, x in BASE.items()}, np.float16)] * 3,
                     cast({n: 0 * x for n, x in BASE.items()}, np.float16), None),
    "huge bfloat16": ([cast({n: 0 * x + 1e38 for n, x in BASE.items()}, ml_dtypes.bfloat16)] * 3,
                      cast({n: 0 * x for n, x in BASE.items()}, ml_dtypes.bfloat16), None),
    "huge float32": ([{n: x * np.float32(1e18) for n, x in t.items()} for t in TUNED],
                     {n: x * np.float32(1e18) for n, x in BASE.items()}, None),
    "not a number": ([TUNED[0] | {"kernel": np.full((6, 4), np.nan, np.float32)}, *TUNED[1:]], BASE,
                     None),
    "infinite": ([TUNED[0] | {"bias": np.full(4, np.inf, np.float32)}, *TUNED[1:]], BASE, None),
}  # fmt: skip


def fitted(name, models):
    """As many of the models as the method takes."""
    least, most = methods.expression(name, key=KEY, **KNOBS.get(name, {})).models
    return models[: max(least, min(len(models), most or len(models)))]


def outcome(name, models, base, weights, **knobs):
    models = fitted(name, models)
    weights = None if weights is None else weights[: len(models)]
    extra = {"steps": np.arange(3), "flag": np.array([True, False])}
    given = [m | extra for m in models], base | extra
    return methods.get(name)(*given, weights=weights, key=KEY, **(KNOBS.get(name, {}) | knobs))


@pytest.mark.parametrize("compat", ["paper", "mergekit"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", methods.METHODS)
def test_defined_or_refused(name, case, compat):
    models, base, weights = CASES[case]
    if compat == "mergekit" and "compat" not in methods.knobs(name):
        pytest.skip("one convention")
    knobs = {"compat": compat} if compat == "mergekit" else {}
    try:
        got = outcome(name, models, base, weights, **knobs)
    except ValueError as error:
        message = str(error)
        assert message.startswith(f"{name}: "), message
        assert any(word in message for word in ("leaf '", "weights: ", "models: ")), message
        return
    assert case not in ("not a number", "infinite")
    for leaf, x in base.items():
        assert got[leaf].shape == x.shape
        assert got[leaf].dtype == x.dtype
        assert np.isfinite(np.asarray(got[leaf], np.float64)).all(), leaf
    np.testing.assert_array_equal(got["steps"], np.arange(3))
    np.testing.assert_array_equal(got["flag"], [True, False])


@pytest.mark.parametrize("name", methods.METHODS)
def test_models_equal_to_the_base_change_nothing(name):
    """Up to 8 ulp of values below 4 in methods that divide by lengths; `scale`s are those of 1."""
    if name == "passthrough":
        pytest.skip("has no base")
    got = outcome(name, [BASE] * 3, BASE, None)
    for leaf, x in BASE.items():
        np.testing.assert_allclose(got[leaf], x, rtol=0, atol=8 * 2.0**-23 * 4)


@pytest.mark.parametrize(
    "name", [n for n in methods.METHODS if {"density", "compat"} <= methods.knobs(n).keys()]
)
@pytest.mark.parametrize("compat", ["paper", "mergekit"])
def test_density_one_keeps_everything(name, compat):
    got = outcome(name, TUNED, BASE, None, density=1.0, compat=compat)
    for leaf in BASE:
        assert np.isfinite(np.asarray(got[leaf])).all()
    alone = outcome(name, TUNED[:1], BASE, None, density=1.0, compat=compat)
    for leaf in BASE:  # nothing dropped, nobody to disagree: the model itself
        np.testing.assert_allclose(alone[leaf], TUNED[0][leaf], rtol=0, atol=8 * 2.0**-23 * 4)


def test_every_leaf_of_a_refusal_is_the_one_at_fault():
    for name in methods.METHODS:
        bad = [TUNED[0] | {"column": np.full((5, 1), np.nan, np.float32)}, *TUNED[1:]]
        with pytest.raises(ValueError, match=f"{name}: .*leaf 'column'.*NaN"):
            outcome(name, bad, BASE, None)


def test_jit_gives_numbers_too():
    """Under jit nothing can be refused: frozen and zero tensors still give finite values."""
    for name in methods.METHODS:
        for case in ("no delta", "zero models", "identical models"):
            models, base, _ = CASES[case]
            knobs = KNOBS.get(name, {})
            f = jax.jit(lambda ms, b: methods.get(name)(ms, b, key=KEY, **knobs))  # noqa: B023
            got = f(fitted(name, models), base)
            assert all(bool(jnp.isfinite(x).all()) for x in got.values()), (name, case)
