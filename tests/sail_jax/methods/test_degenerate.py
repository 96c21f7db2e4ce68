"""Every method on every degenerate input: a defined value, or an error with the method and
the tensor or argument."""

import zlib

import jax
import merge_cases
import ml_dtypes
import numpy as np
import pytest
from cells import diagonal, slow_unless
from flax import nnx

from sail_jax import merge_checkpoints, methods
from sail_jax.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from sail_jax.trees import leaf_paths

FEW = {"wudi": {"steps": 5}}
RNG = np.random.default_rng(0)
SHAPES = {"kernel": (6, 4), "gain": (), "column": (5, 1)}


def draw(scale=1.0, like=None):
    tree = {n: np.float32(scale * RNG.normal(size=s)) for n, s in SHAPES.items()}
    return tree if like is None else {n: like[n] + tree[n] for n in tree}


def cast(tree, dtype):
    return {n: np.asarray(x).astype(dtype) for n, x in tree.items()}


BASE = draw()
TUNED = [draw(0.1, BASE) for _ in range(3)]


def shifted(scale):
    return {n: x + np.float32(scale) for n, x in BASE.items()}


def kernel(tree):
    """Keeps only the matrix, in cases that require separate programs for each shape."""
    return {"kernel": tree["kernel"]}


def mirrored():
    ahead, behind = ({n: BASE[n] + s * TUNED[0][n] for n in BASE} for s in (1, -1))
    return [ahead, behind, ahead]


ZERO = {n: 0 * x for n, x in BASE.items()}

# label -> (models, base, weights); the case affects every leaf
CASES = {
    "no delta": ([BASE] * 3, BASE, None),
    "one tensor frozen in all": ([t | {"kernel": BASE["kernel"]} for t in TUNED], BASE, None),
    "one tensor frozen in one": ([TUNED[0] | {"kernel": BASE["kernel"]}, *TUNED[1:]], BASE, None),
    "identical models": ([TUNED[0]] * 3, BASE, None),
    "antipodal": (mirrored(), BASE, None),
    "opposite models": ([{n: s * x for n, x in TUNED[0].items()} for s in (1, -1, 1)], BASE, None),
    "zero models": ([ZERO] * 3, ZERO, None),
    "weights that sum to 0": (TUNED, BASE, [1.0, -2.0, 1.0]),
    "zero weights": (TUNED, BASE, [0.0, 0.0, 0.0]),
    "one zero weight": (TUNED, BASE, [0.0, 1.0, 1.0]),
    "one model": ([kernel(TUNED[0])], kernel(BASE), None),
    "tiny delta": ([draw(1e-5, BASE) for _ in range(3)], BASE, None),
    "very tiny delta": ([shifted(1e-30 * k) for k in range(3)], ZERO, None),
    "constant delta": ([shifted(0.1)] * 3, BASE, None),
    "huge float16": ([{"kernel": np.full((6, 4), 6e4, np.float16)}] * 3,
                     cast(kernel(ZERO), np.float16), None),
    "huge bfloat16": ([cast({"kernel": np.full((6, 4), 1e38)}, ml_dtypes.bfloat16)] * 3,
                      cast(kernel(ZERO), ml_dtypes.bfloat16), None),
    "huge float32": ([{n: x * np.float32(1e18) for n, x in t.items()} for t in TUNED],
                     {n: x * np.float32(1e18) for n, x in BASE.items()}, None),
    "squares past float32": (
        [{n: x * np.float32(1e30) for n, x in t.items()} for t in TUNED], ZERO, None
    ),
    "not a number": ([TUNED[0] | {"kernel": np.full((6, 4), np.nan, np.float32)}, *TUNED[1:]], BASE,
                     None),
    "infinite": ([TUNED[0] | {"column": np.full((5, 1), np.inf, np.float32)}, *TUNED[1:]], BASE,
                 None),
}  # fmt: skip


def make(name, **options):
    return merge_cases.make(name, **(FEW.get(name, {}) | options))


def outcome(name, models, base, weights, **options):
    merge = make(name, **options)
    models = merge_cases.as_many(merge, models)
    weights = None if weights is None else weights[: len(models)]
    extra = {"steps": np.arange(3), "flag": np.array([True, False])}
    given = [m | extra for m in models], base | extra
    return merge(*given, weights=weights)


# Nearly all of the time goes into compiling, once for a method and for cases of other shapes. So
# methods of every kind meet all cases of one shape quickly, and the rest is slow. The other
# convention runs in the programs that the first cases compile.
ANEW = ("huge float16", "huge bfloat16", "one model")


CELLS = [
    slow_unless(
        name in merge_cases.KINDS and compat == "paper" and case not in ANEW, name, compat, case
    )
    for name in merge_cases.NAMES
    for compat in ("paper", "mergekit")
    for case in CASES
    if compat == "paper" or ("compat" in methods.options_of(name) and case not in ANEW)
]


@pytest.mark.parametrize(("name", "compat", "case"), CELLS)
def test_defined_or_refused(name, compat, case):
    models, base, weights = CASES[case]
    options = {"compat": compat} if compat == "mergekit" else {}
    try:
        got = outcome(name, models, base, weights, **options)
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


@pytest.mark.slow
@merge_cases.each_method(
    [n for n in merge_cases.NAMES if {"density", "compat"} <= methods.options_of(n).keys()],
    quick=("ties",),
    slow=merge_cases.NAMES,
)
@pytest.mark.parametrize("compat", ["mergekit", "paper"])
def test_density_one_keeps_everything(name, compat):
    got = outcome(name, TUNED, BASE, None, density=1.0, compat=compat)
    for leaf in BASE:
        assert np.isfinite(np.asarray(got[leaf])).all()
    alone = outcome(name, *CASES["one model"], density=1.0, compat=compat)["kernel"]
    # nothing is dropped and no signs conflict, so the result is the model itself
    np.testing.assert_allclose(alone, TUNED[0]["kernel"], rtol=0, atol=8 * 2.0**-23 * 4)


@pytest.mark.slow
def test_every_leaf_of_a_refusal_is_the_one_at_fault():
    for name in merge_cases.NAMES:
        bad = [TUNED[0] | {"column": np.full((5, 1), np.nan, np.float32)}, *TUNED[1:]]
        with pytest.raises(ValueError, match=f"{name}: .*leaf 'column'.*NaN"):
            outcome(name, bad, BASE, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", merge_cases.NAMES)
def test_jit_gives_numbers_too(name):
    """Under jit nothing can be refused: frozen and zero tensors still give finite values. Of
    matrices: leaves of other shapes go through the same steps as without jit."""
    merge = make(name)
    jitted = jax.jit(merge)
    for case in ("no delta", "zero models", "identical models"):
        models, base, _ = CASES[case]
        got = jitted(merge_cases.as_many(merge, [*map(kernel, models)]), kernel(base))
        assert all(bool(np.isfinite(x).all()) for x in got.values()), case


# Hyperparameters in the units of the models, which scale with them.
MEASURED = {"nearswap": "t", "ram": "epsilon", "ramplus_tl": "epsilon"}
# Not homogeneous, as their docstrings say: softmaxes of parameters, tanh of large deltas, and
# absolute thresholds of mergekit.
OTHERWISE = {("arcee_fusion", "paper")} | {
    (n, "mergekit") for n in ("sce", "karcher", "model_stock", "multislerp")
}
SCALES = (-100, -70, 70, 100)
NEAR = {"kernel": np.float32(BASE["kernel"] / 2)}  # some deltas are shared, and all are small
CLOSE = [
    {"kernel": NEAR["kernel"] + np.float32(2.0**-10) * (t["kernel"] + BASE["kernel"])}
    for t in TUNED
]
FITTED = {
    "fisher": {"fishers": [{"kernel": np.abs(t["kernel"])} for t in TUNED]},
    "regmean": {"grams": [{"kernel": t["kernel"] @ t["kernel"].T} for t in TUNED]},
    "wudi": {"solution": "exact"},
    "sce": {"select_topk": 0.5},
}


def times(tree, k):
    return {n: np.ldexp(x, k).astype(np.float32) for n, x in tree.items()}


def at_scale(name, k, **options):
    options = {**FITTED.get(name, {}), **options}
    if measured := MEASURED.get(name):
        options[measured] = 2.0 ** (k - 11)
    merge = make(name, **options)
    models = [times(t, k) for t in merge_cases.as_many(merge, CLOSE)]
    return merge, models, times(NEAR, k)


def assert_homogeneous(name, how):
    """Scaling by a power of two is exact, so the results scale exactly. Below 2^-90 it is
    computed in float64, and outcomes are off by what they are rounded to in float32: 8 ulp."""
    for compat in ("paper", "mergekit")[: 1 + ("compat" in methods.options_of(name))]:
        if (name, compat) in OTHERWISE:
            continue
        options = {"compat": compat} if compat == "mergekit" else {}
        outcomes = {}
        for k in (0, *SCALES):
            if not (name == "pcb" and k > 0):
                merge, models, base = at_scale(name, k, **options)
                outcomes[k] = np.asarray(how(merge)(models, base)["kernel"], float)
        want = outcomes.pop(0)
        assert np.abs(want - NEAR["kernel"]).max() > 2.0**-12
        for k, got in outcomes.items():
            ulp = 2.0**-23 * np.abs(want).max() if k == -100 else 0
            np.testing.assert_allclose(np.ldexp(got, -k), want, 0, 8 * ulp, err_msg=f"{k}")


# One method for each way to square or sum; the others are soak tests.
@pytest.mark.slow
@merge_cases.each_method(
    [*methods.METHODS], quick=("slerp",), slow=("nuslerp", "karcher", "opcm", "pcb")
)
def test_scale_changes_nothing_but_scale(name):
    assert_homogeneous(name, lambda merge: merge)


@merge_cases.each_method([*methods.METHODS], quick=(), slow=("model_stock",))
def test_scale_changes_nothing_but_scale_under_jit(name):
    assert_homogeneous(name, jax.jit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("slerp", {}),
        ("opcm", {}),
        pytest.param("della", {"compat": "mergekit"}, marks=pytest.mark.soak),
        pytest.param("sce", {}, marks=pytest.mark.soak),
    ],
)
def test_scale_changes_nothing_in_pieces(name, options, monkeypatch):
    """Sums over pieces of other sizes: one model's first rows are 0, another's are large."""
    merge_cases.in_small_pieces(monkeypatch)
    outcomes = []
    for k in (0, -70, 70):
        merge, models, base = at_scale(name, k, **options)
        models[0]["kernel"][:2] = base["kernel"][:2]
        models[1]["kernel"][:2] *= np.float32(2.0**20)
        base = None if merge.base == "unused" else base
        got, records = merge_cases.streamed(merge, models, base, measure=name == "opcm")
        outcomes.append([np.ldexp(got["kernel"].astype(float), -k)])
        for found in records.values():
            outcomes[-1] += [np.ldexp([*found.norms, found.update], -k), found.cosines]
    for got in outcomes[1:]:
        for part, want in zip(got, outcomes[0], strict=True):
            np.testing.assert_array_equal(part, want)


EMPTY = {
    "no leaves": {},
    "integers only": {"steps": np.arange(3, dtype=np.int32)},
    "no entries": {"w": np.zeros((0, 3), np.float32)},
}


@pytest.mark.parametrize(("case", "name"), diagonal(EMPTY, merge_cases.NAMES))
def test_nothing_to_merge_is_nothing_merged(case, name, tmp_path):
    """This holds in memory, under jit and on disk; but a file without tensors is an error."""
    tree, merge = EMPTY[case], make(name)
    models = merge_cases.as_many(merge, [tree] * 3)
    files = [tmp_path / f"{k}.safetensors" for k in range(len(models) + 1)]
    for file in files:
        save_checkpoint(file, tree)
    merges = [merge(models, tree), jax.jit(merge)(models, tree)]
    out = tmp_path / "out.safetensors"
    if tree:
        merge_checkpoints(files[1:], out, base=files[0], method=merge)
        merges.append(load_checkpoint(out))
    else:
        with pytest.raises(CheckpointError, match="is a checkpoint without tensors"):
            merge_checkpoints(files[1:], out, base=files[0], method=merge)
    for got in merges:
        assert {n: (x.dtype, np.asarray(x).tolist()) for n, x in got.items()} == {
            n: (x.dtype, x.tolist()) for n, x in tree.items()
        }


def test_a_merge_of_nothing_at_all():
    assert methods.linear()([{}, {}]) == {}
    with pytest.raises(ValueError, match="linear: models: expected at least 1, got 0"):
        methods.linear()([])
    with pytest.raises(TypeError, match=r"linear\(\.\.\.\)\(models, base\)"):
        methods.linear([{}, {}])  # type: ignore - the mistake of who knew the earlier call


@pytest.mark.slow
def test_as_many_models_as_in_memory_are_merged_on_disk(tmp_path):
    """One is sufficient for a spherical mean; ExPO rejects two with an error."""
    for k in range(3):
        save_checkpoint(tmp_path / f"{k}.safetensors", TUNED[k])
    files = [tmp_path / f"{k}.safetensors" for k in range(3)]
    for compat in ("paper", "mergekit"):
        merge = make("multislerp", compat=compat)
        merge_checkpoints(files[:1], tmp_path / compat, method=merge)
        recipe = {"base": files[2], "method": "multislerp", "compat": compat}
        merge_checkpoints(files[:1], tmp_path / f"{compat} of deltas", **recipe)
        for n, x in merge(TUNED[:1]).items():
            np.testing.assert_array_equal(load_checkpoint(tmp_path / compat)[n], x)
            np.testing.assert_allclose(x, TUNED[0][n], rtol=4 * 2.0**-23)
    for how in ("expo", methods.expo()):
        with pytest.raises(ValueError, match=r"expo merges 1 model\(s\).*got 2"):
            merge_checkpoints(files[:2], tmp_path / "no", base=files[2], method=how)
    with pytest.raises(ValueError, match="expo: models: expected 1, got 2"):
        methods.expo()(TUNED[:2], BASE)


@pytest.mark.slow
def test_leaves_that_are_no_numbers_are_carried_where_they_agree():
    """A PRNG key in the state of a Flax module with dropout; a function in a module of arrays."""

    def state(seed, dropout):
        net = nnx.Sequential(
            nnx.Linear(3, 2, rngs=nnx.Rngs(seed)), nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=dropout))
        )
        return net, nnx.state(net)

    net, one = state(0, dropout=7)
    _, other = state(1, dropout=7)
    nnx.update(net, methods.linear()([one, other]))
    first = jax.tree.leaves(nnx.state(net, nnx.Param))
    params = (nnx.state(state(seed, 7)[0], nnx.Param) for seed in range(2))
    for got, a, b in zip(first, *map(jax.tree.leaves, params), strict=True):
        np.testing.assert_allclose(got, (a + b) / 2, rtol=0, atol=4 * 2.0**-23)
    key = "layers/1/rngs/key/value"
    # Random streams that differ are taken from the last model, as they are not weights.
    last = state(1, dropout=8)[1]
    nnx.update(net, methods.linear()([one, last]))
    keys = [
        dict(zip(leaf_paths(x), jax.tree.leaves(x), strict=True))[key]
        for x in (nnx.state(net), last)
    ]
    np.testing.assert_array_equal(*map(jax.random.key_data, keys))
    module = {"w": np.ones(2, np.float32), "act": jax.nn.relu, "name": "mlp"}
    got = methods.linear()([module, module | {"w": 3 * module["w"]}])
    assert got["act"] is jax.nn.relu
    assert got["name"] == "mlp"
    assert got["w"].tolist() == [2, 2]
    with pytest.raises(ValueError, match=r"leaf 'act': .*eqx\.filter\(module, eqx\.is_inexact"):
        methods.linear()([module, module | {"act": jax.nn.gelu}])


@pytest.mark.slow
def test_masks_of_leaves_differ_though_a_short_hash_of_their_paths_would_not():
    """crc32 of "plumless" is that of "buckeroo". Null: independent masks of 4,096 fair coins agree
    in half of the entries, sd 32; equal ones in all of them (z = 64)."""
    assert zlib.crc32(b"plumless") == zlib.crc32(b"buckeroo")
    x = {name: np.ones(4096, np.float32) for name in ("plumless", "buckeroo")}
    base = {name: np.zeros(4096, np.float32) for name in x}
    got = methods.dare_linear(density=0.5, key=merge_cases.KEY)([x], base)
    agree = np.sum((got["plumless"] != 0) == (got["buckeroo"] != 0))
    assert abs(agree - 2048) < 4 * 32


@pytest.mark.slow
@merge_cases.each_method(quick=("karcher",), slow=("slerp", "multislerp", "opcm", "ties"))
def test_64_bits_change_no_bytes(name):
    """Enabling 64 bits for other programs does not change merges of float32."""
    merge, models, base = at_scale(name, 0)
    want = merge(models, base)["kernel"]
    with jax.enable_x64(True):
        got = merge(models, base)["kernel"]
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)
