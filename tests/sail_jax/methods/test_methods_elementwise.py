"""Methods of single entries against independent NumPy references, and a table of methods x laws."""

import collections

import chex
import elementwise_reference
import jax
import jax.numpy as jnp
import merge_cases
import merge_reference
import numpy as np
import pytest
from cells import diagonal, of_law, slow, slow_unless, soak
from merge_cases import flat, tree

from sail_jax import methods
from sail_jax.merging.task_vectors import origin
from sail_jax.trees import leaf_paths

EPS = float(jnp.finfo(jnp.float32).eps)
REFERENCES = vars(merge_reference) | vars(elementwise_reference)
KEY = jax.random.key(11)
KEY_WORDS = np.asarray(jax.random.key_data(KEY))
WEIGHTS = [0.5, 1.0, 1.5]

# label -> method and options; between them every option takes every kind of value
SUBJECTS = {
    "breadcrumbs": ("breadcrumbs", {}),
    "breadcrumbs half": ("breadcrumbs", {"density": 0.5, "gamma": 0.2, "scale": 0.3}),
    "breadcrumbs tree": (
        "breadcrumbs",
        {"density": [0.3, 0.6, 0.9], "gamma": [0.1, 0.0, 0.3], "scope": "tree", "normalize": True},
    ),
    "breadcrumbs mergekit": ("breadcrumbs", {"density": 0.55, "gamma": 0.15, "compat": "mergekit"}),
    "breadcrumbs_ties": ("breadcrumbs_ties", {"density": 0.5, "gamma": 0.1}),
    "breadcrumbs_ties mergekit": (
        "breadcrumbs_ties",
        {"density": 0.6, "gamma": 0.1, "compat": "mergekit"},
    ),
    "della": ("della", {}),
    "della magnitude": ("della", {"density": 0.5, "epsilon": 0.2, "rank_by": "magnitude"}),
    "della mergekit": ("della", {"density": 0.6, "compat": "mergekit"}),
    "della_linear": ("della_linear", {"density": [0.4, 0.6, 0.9], "epsilon": [0.1, 0.2, 0.3]}),
    "della_linear mergekit": (
        "della_linear",
        {"density": 0.5, "rank_by": "magnitude", "normalize": True, "compat": "mergekit"},
    ),
    "sce": ("sce", {}),
    "sce select": ("sce", {"select_topk": 0.4}),
    "sce mergekit": ("sce", {"select_topk": 0.7, "compat": "mergekit"}),
    "ram": ("ram", {"epsilon": 0.5}),
    "ramplus_tl": ("ramplus_tl", {"epsilon": 1.0, "r": 0.4, "alpha": 0.9}),
    "magmax": ("magmax", {"scale": 0.5}),
    "pcb": ("pcb", {}),
    "pcb half": ("pcb", {"ratio": 0.5, "scale": 1.2}),
    "consensus": ("consensus", {}),
    "consensus ties": (
        "consensus",
        {"threshold": [0.2, 0.4, 0.6], "agree": 1, "multitask": "ties", "density": 0.5},
    ),
    "passthrough": ("passthrough", {"scale": 0.75}),
    "expo": ("expo", {"alpha": 0.4}),
    "nearswap": ("nearswap", {"t": 0.6}),
    "arcee_fusion": ("arcee_fusion", {}),
    "linear": ("linear", {}),
    "linear sum": ("linear", {"normalize": False}),
    "trajectory": ("trajectory", {"shape": "1-square"}),
    "task_arithmetic": ("task_arithmetic", {"scale": 0.4}),
    "ties": ("ties", {}),
    "ties tensor": (
        "ties",
        {"density": 0.5, "scope": "tensor", "elect_by": "weighted", "tie": "positive"},
    ),
    "ties sum": (
        "ties",
        {"density": 0.7, "elect_by": "count", "tie": "majority", "normalize": False, "scale": 0.3},
    ),
    "dare_linear": ("dare_linear", {"density": 0.3}),
    "dare_linear mean": ("dare_linear", {"normalize": True, "scale": 0.7}),
    "dare_ties": ("dare_ties", {"density": 0.6}),
    "dare_ties sum": (
        "dare_ties",
        {"elect_by": "weighted", "tie": "positive", "normalize": False, "scale": 1.5},
    ),
}
FIRST = [*SUBJECTS][[*SUBJECTS].index("linear") :]
SINGLE = ["passthrough", "expo", "nearswap", "arcee_fusion"]
SEVERAL = [label for label in SUBJECTS if label not in SINGLE]
RANDOM = [label for label in SUBJECTS if label.startswith("della")]
BASELESS = ["linear", "linear sum", "trajectory"]
AVERAGES = ("breadcrumbs_ties", "linear", "trajectory", "ties", "ties tensor", "dare_ties")
NORMALIZED = [
    label
    for label, (name, options) in SUBJECTS.items()
    if options.get("normalize", name == "della" or label in AVERAGES)
]
SCALED = [label for label in SEVERAL if "scale" in methods.options_of(SUBJECTS[label][0])]
# each method once, for laws of which a subject takes programs of its own, whatever its options
METHODS = (
    *("breadcrumbs tree", "della mergekit", "sce select", "ram", "ramplus_tl", "magmax", "pcb"),
    *("consensus ties", "passthrough", "expo", "nearswap"),
    *("linear sum", "task_arithmetic", "ties sum", "dare_ties"),
)
DEAR = ("breadcrumbs_ties", "della", "della_linear", "arcee_fusion")
# Variants with programs of their own. Their methods have a quick reference with other options.
OPTIONS = {
    "breadcrumbs tree", "consensus ties", "della magnitude", "della mergekit",
    "della_linear mergekit", "sce mergekit", "sce select", "ties sum",
}  # fmt: skip
each_subject = pytest.mark.parametrize(
    "label", [slow_unless(label not in OPTIONS, label) for label in SUBJECTS]
)


def law(i, among=SUBJECTS):
    """Parametrises the i-th of seven laws over subjects."""
    return pytest.mark.parametrize("label", of_law(i, 7, SUBJECTS, among))


def law_of_methods(i, among=SUBJECTS):
    """Parametrises the i-th of six laws over subjects that require separate programs."""
    dear = [label for label in DEAR if label in among]
    return pytest.mark.parametrize("label", [*of_law(i, 6, METHODS, among), *soak(*dear)])


def models_for(label):
    return 1 if label in SINGLE else len(WEIGHTS)


def problem(label, dtype=jnp.float32, full=False):
    return merge_cases.problem(models_for(label), dtype, full)


def make(label, **overrides):
    name, options = SUBJECTS[label]
    key = {"key": KEY} if "key" in methods.options_of(name) else {}
    return methods.get(name)(**{**key, **options, **overrides})


def refuses_negative(label):
    """Checks whether the merge is made with `positive_weights`."""
    return make(label).positive_weights


def call(label, models, base, weights=None, **overrides):
    return make(label, **overrides)(models, base, weights=weights)


def weights_for(label):
    return None if label in SINGLE else WEIGHTS


def referred(label, models, base, weights=None, **overrides):
    """What the reference gives, by path."""
    name, options = SUBJECTS[label]
    args = [flat(m) for m in models], flat(base), weights, KEY_WORDS
    return REFERENCES[name](*args, **{**options, **overrides})


def assert_agrees(label, models, base, weights, size, **overrides):
    """Twenty float32 operations on values below `size` (ten of the methods that came first), then
    one rounding to the leaf's dtype."""
    ulps = 5 if label in FIRST else 10
    want = referred(label, models, base, weights, **overrides)
    got = call(label, models, base, weights=weights, **overrides)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, base)
    for path, leaf in flat(got).items():
        error = np.abs(leaf.astype(float) - want[path])
        rounding = float(jnp.finfo(leaf.dtype).eps) * np.abs(want[path])
        assert np.all(error <= rounding + ulps * EPS * size), path


# --- by hand


@pytest.mark.slow
def test_quartiles_of_six_entries_by_hand():
    """0, [1, 2, 3], 6, 7 in order: the threshold is 2 + 1.5 (3 - 1) = 5."""
    base, model = {"a": jnp.zeros(6)}, {"a": jnp.array([6.0, 0, 1, 7, 2, 3]) / 64}
    assert (methods.arcee_fusion()([model], base)["a"] * 64).tolist() == [6, 0, 0, 7, 0, 0]


@pytest.mark.slow
def test_half_of_seven_scores_are_four_by_hand():
    """The smallest of four competing scores has the balance 0, so three entries change."""
    base, model = {"a": jnp.zeros(7)}, {"a": jnp.array([3.0, -7, 1, 5, 2, -6, 4]) / 8}
    merged = methods.pcb(ratio=0.5)([model], base)["a"]
    assert (merged != 0).tolist() == [False, True, False, True, False, True, False]


# --- the reference


@pytest.mark.parametrize("full", [False, *slow(True)])
@each_subject
def test_agrees_with_the_reference(label, full):
    """Values below 40: a delta of 6, over p 0.3, times 2."""
    models, base = problem(label, full=full)
    assert_agrees(label, models, base, weights_for(label), 40)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@law_of_methods(0)
def test_agrees_with_the_reference_in_half_precision(label, dtype):
    models, base = matrices(problem(label, dtype))
    assert_agrees(label, models, base, weights_for(label), 40)


@law(0, [n for n in SEVERAL if n not in ("sce mergekit", "trajectory")])
def test_agrees_with_the_reference_with_signed_weights(label):
    """Values below 400: averages over models divide by sums as small as 0.1. (Not mergekit's SCE,
    which takes no weights and would divide by 1e-6.)"""
    models, base = problem(label)
    weights = [0.6, -0.5, 0.7]
    if refuses_negative(label):
        with pytest.raises(ValueError, match="values >= 0"):
            call(label, models, base, weights=weights)
    else:
        assert_agrees(label, models, base, weights, 400)


@law(1, [n for n in SEVERAL if not n.startswith("dare")])
def test_agrees_with_the_reference_at_massive_ties(label):
    """Deltas of eight distinct magnitudes, many zero: position decides almost everywhere. (The
    quotients of DARE are rounded, so their sums are not exactly 0.)"""
    random = np.random.default_rng(3)
    base = jax.tree.map(jnp.zeros_like, tree(0)) | {"steps": jnp.arange(3)}
    models = [
        jax.tree.map(lambda x: jnp.asarray(random.integers(-4, 4, x.shape) / 8, x.dtype), base)
        | {"steps": base["steps"]}
        for _ in WEIGHTS
    ]
    assert_agrees(label, models, base, [0.5, 0.5, 0.5], 40)


@pytest.mark.slow
def test_subjects_differ():
    """The comparisons have teeth: every two subjects of a kind differ by far more than a bound."""
    for labels, least in ((SEVERAL, 0.01), (SINGLE, 0.01), (FIRST, 0.05)):
        outs = [flat(call(n, *problem(n), weights=weights_for(n)))["embed"] for n in labels]
        for i, a in enumerate(outs):
            assert all(np.abs(a - b).max() > least for b in outs[:i]), labels[i]


# --- laws


COPIES = {
    **{n: {"density": 1.0, "scale": 1.0} for n in SEVERAL if n.startswith(("bread", "della"))},
    "sce": {},
    "ram": {"epsilon": 0.0},
    "ramplus_tl": {"epsilon": 0.0},
    "magmax": {"weights": [1.0] * 3, "scale": 1.0},
    "consensus": {},
    "consensus ties": {"density": 1.0},
    "passthrough": {"scale": 1.0, "weights": None},
    "expo": {"alpha": 0.0, "weights": None},
    "nearswap": {"t": 10.0, "weights": None},
    **{n: {} for n in BASELESS},
    "task_arithmetic": {"scale": 1.0},
    **{n: {"density": 1.0, "scale": 1.0} for n in FIRST if n.startswith(("ties", "dare"))},
}


@law(2, COPIES)
def test_merging_copies_returns_the_copy(label):
    """theta = base + (theta - base): 4 ulp of values below 4."""
    models, base = problem(label)
    got = call(
        label,
        models[:1] * models_for(label),
        base,
        **{"weights": [0.25, 0.5, 0.25], **COPIES[label]},
    )
    chex.assert_trees_all_close(got, models[0], rtol=0, atol=16 * EPS)


@law(3, [n for n in SEVERAL if n not in (*RANDOM, "trajectory")])
def test_order_of_models_does_not_matter(label):
    """Of DARE at density 1: its masks belong to places in the list."""
    models, base = problem(label)
    every = {"density": 1.0} if label.startswith("dare") else {}
    order = [2, 0, 1]
    options = {
        k: [v[i] for i in order] for k, v in SUBJECTS[label][1].items() if isinstance(v, list)
    }
    shuffled = [models[k] for k in order]
    options |= every
    got = call(label, shuffled, base, weights=[WEIGHTS[k] for k in order], **options)
    want = call(label, models, base, weights=WEIGHTS, **every)
    # 8 ulp of values below 8 or 10
    atol = 8 * EPS * (8 if label in FIRST else 10)
    chex.assert_trees_all_close(got, want, rtol=0, atol=atol)


@law(6, SCALED)
def test_scale_zero_is_the_base(label):
    models, base = problem(label)
    chex.assert_trees_all_equal(call(label, models, base, scale=0.0), base)


@law(4, [n for n in SCALED if not n.startswith("pcb")])
def test_scale_equivariance(label):
    """Doubled deltas from base 0 double the outcome, and -delta gives -outcome, bit for bit."""
    models, base = problem(label)
    base = origin(base)
    options = {"tie": "none"} if "_ties" in label or label.startswith("della ") else {}
    options = options if SUBJECTS[label][0] != "della_linear" else {}
    got = flat(call(label, models, base, **options))
    for factor in (2.0, -1.0):
        scaled = [
            jax.tree.map(lambda x: x * factor, m) | {"steps": m["steps"]}  # noqa: B023
            for m in models
        ]
        want = jax.tree.map(lambda x: x * factor, got)  # noqa: B023
        chex.assert_trees_all_equal(flat(call(label, scaled, base, **options)), want)


@law_of_methods(1)
def test_jit_equals_eager_and_a_second_call_compiles_nothing(label, caplog):
    """Masks agree; fused multiply-adds move sums by 8 ulp of values below 20 or 40."""
    models, base = matrices(problem(label))
    single = label in SINGLE
    one, other = (None if single else jnp.array(w) for w in (WEIGHTS, [3.0, 2.0, 1.0]))
    jitted = jax.jit(lambda ms, b, w: call(label, ms, b, weights=w))
    assert merge_cases.compilations(caplog, lambda: jitted(models, base, one))  # the log shows them
    assert not merge_cases.compilations(caplog, lambda: jitted(models, base, other))
    want = call(label, models, base, weights=one)
    atol = 8 * EPS * (20 if label in FIRST else 40)
    chex.assert_trees_all_close(jitted(models, base, one), want, rtol=0, atol=atol)
    assert not merge_cases.compilations(caplog, lambda: call(label, models, base, weights=other))


@law_of_methods(2)
def test_structure_and_dtypes_of_a_mixed_tree_are_the_bases(label):
    models, base = problem(label)
    base, *models = (
        t | {"embed": t["embed"].astype(jnp.bfloat16), "none": None} for t in (base, *models)
    )
    models[-1]["block"] = jax.tree.map(lambda x: x.astype(jnp.float16), models[-1]["block"])
    got = call(label, models, base)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, base)
    chex.assert_trees_all_equal(got["steps"], base["steps"])


@law_of_methods(3)
def test_pieces_equal_the_whole(label, monkeypatch):
    """Leaves cut into runs or rows, padded and visited as files are, give what they give whole, up
    to the order of sums (a few ulp of values below 40)."""
    assert_pieces_equal_the_whole(label, monkeypatch, *matrices(problem(label)))


@pytest.mark.slow
@pytest.mark.parametrize("label", ["breadcrumbs tree", "della mergekit", "sce select", "pcb"])
def test_pieces_of_leaves_of_any_shape_equal_the_whole(label, monkeypatch):
    assert_pieces_equal_the_whole(label, monkeypatch, *problem(label, full=True))


def assert_pieces_equal_the_whole(label, monkeypatch, models, base):
    merge, weights = make(label), weights_for(label)
    whole = flat(merge(models, base, weights=weights))
    merge_cases.in_small_pieces(monkeypatch)
    got, _ = merge_cases.streamed(merge, [flat(m) for m in models], flat(base), weights)
    for path, want in whole.items():
        np.testing.assert_allclose(got[path], want.reshape(-1), rtol=0, atol=320 * EPS)


SMOOTH = ["della mergekit", "sce select", "magmax", "nearswap"]
SMOOTH_TOO = [
    *("breadcrumbs half", "della_linear", "della magnitude"),
    *("ramplus_tl", "consensus", "expo", "arcee_fusion"),
]


@pytest.mark.slow
@pytest.mark.parametrize("label", [*SMOOTH, *soak(*SMOOTH_TOO)])
def test_gradient_in_the_models(label):
    """Along a random direction, against central differences in float64: masks are constant in a
    neighbourhood; truncation h^2, rounding 1e-16 * 1e3 / h."""
    with jax.enable_x64(True):
        models, base = matrices(problem(label, jnp.float64))
        probe, *ways = matrices([tree(20 + k, jnp.float64) for k in range(1 + len(models))])
        weights = weights_for(label)

        def loss(h):
            moved = [
                jax.tree.map(lambda x, v: x + h * v, m, way)
                for m, way in zip(models, ways, strict=True)
            ]
            merged = flat_floats(call(label, moved, base, weights=weights))
            pairs = zip(merged, flat_floats(probe), strict=True)
            return sum(jnp.vdot(jnp.sin(x), p) for x, p in pairs)

        h, both = 1e-6, jax.jit(jax.value_and_grad(loss))
        want = (both(h)[0] - both(-h)[0]) / (2 * h)
        got = both(0.0)[1]
        assert abs(want) > 1e-3  # the comparison is not of zeros
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "label",
    [
        *("pcb", "linear sum", "ties sum"),
        "sce",
        "task_arithmetic",
        "ties tensor",
        "dare_ties",
        "dare_linear mean",
        *soak("breadcrumbs_ties", "consensus ties"),
    ],
)
def test_gradient_in_the_weights_and_the_scale(label):
    with jax.enable_x64(True):
        models, base = matrices(problem(label, jnp.float64))
        probe = matrices(tree(20, jnp.float64))

        def loss(x):
            scale = {"scale": x[3]} if label in SCALED else {}
            merged = flat_floats(call(label, models, base, weights=x[:3], **scale))
            pairs = zip(merged, flat_floats(probe), strict=True)
            return sum(jnp.vdot(jnp.sin(x), p) for x, p in pairs)

        x, h, both = np.array([*WEIGHTS, 0.8]), 1e-6, jax.jit(jax.value_and_grad(loss))
        want = [(both(x + step)[0] - both(x - step)[0]) / (2 * h) for step in h * np.eye(4)]
        assert np.abs(want).max() > 1e-3
        np.testing.assert_allclose(both(x)[1], want, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_gradient_of_pcb_holds_four_numbers_of_each_model():
    """Both quantiles and both limits of the scores, and who lies between them. Differences of the
    formula in float64, with these held: truncation h^2, rounding 1e-16 * 10 / h."""
    rng = np.random.default_rng(0)
    x, probe, ratio, h = rng.normal(size=(3, 40)), rng.normal(size=40), 0.3, 1e-6

    def scores(x, least, most):
        size = np.abs(x)
        within = (size - least) / (most - least)
        return size, np.exp(3 * (within**2 - 1)) * np.tanh(x * x.sum(0))

    least, most = (f(np.abs(x), axis=1, keepdims=True) for f in (np.min, np.max))
    start = scores(x, least, most)[1]
    ascending = np.sort(start, axis=1)
    low, high = ascending[:, [int(40 * (1 - ratio))]], ascending[:, [-1]]

    def formula(x):
        size, score = scores(x, least, most)
        balance = np.where(start > low, (score - low) / (high - low), 0)
        mass = balance.sum(0)
        total = (balance * np.sign(x) * size).sum(0)
        return np.where(mass > 0, total / np.where(mass > 0, mass, 1), 0) @ probe

    with jax.enable_x64(True):
        merge, base = methods.pcb(ratio=ratio), {"a": jnp.zeros(40)}

        @jax.value_and_grad
        def loss(x):
            return merge([{"a": one} for one in x], base)["a"] @ probe

        value, got = loss(jnp.asarray(x))
    np.testing.assert_allclose(value, formula(x), rtol=1e-12)
    steps = h * np.eye(x.size).reshape(-1, *x.shape)
    want = [(formula(x + step) - formula(x - step)) / (2 * h) for step in steps]
    np.testing.assert_allclose(np.asarray(got).reshape(-1), want, rtol=1e-6, atol=1e-8)


def matrices(trees):
    """Keeps one leaf of each tree."""
    is_tree = lambda x: isinstance(x, dict)  # noqa: E731
    return jax.tree.map(lambda t: {"embed": t["embed"]}, trees, is_leaf=is_tree)


def flat_floats(merged):
    return [x for x in jax.tree.leaves(merged) if jnp.issubdtype(x.dtype, jnp.floating)]


def assert_close(got, want, ulps):
    """Within so many ulps of values below 20."""
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    chex.assert_trees_all_close(got, want, rtol=0, atol=ulps * EPS * 20)


@pytest.mark.parametrize("label", [n for n in NORMALIZED if n in FIRST])
def test_normalized_weights_have_no_scale(label):
    models, base = problem(label)
    got = call(label, models, base, weights=WEIGHTS)
    chex.assert_trees_all_equal(call(label, models, base, weights=[2 * w for w in WEIGHTS]), got)
    assert_close(call(label, models, base, weights=[3 * w for w in WEIGHTS]), got, 8)


@jax.tree_util.register_pytree_with_keys_class
class Pairs:
    """A container that flattens in the order its pairs were given."""

    def __init__(self, *pairs):
        self.pairs = pairs

    def tree_flatten_with_keys(self):
        names = [n for n, _ in self.pairs]
        return [(jax.tree_util.DictKey(n), v) for n, v in self.pairs], tuple(names)

    @classmethod
    def tree_unflatten(cls, names, values):
        return cls(*zip(names, values, strict=True))


@pytest.mark.parametrize("label", FIRST)
def test_order_of_leaves_does_not_matter(label):
    models, base = problem(label)
    want = flat(call(label, models, base))
    backwards = lambda t: collections.OrderedDict(reversed(t.items()))  # noqa: E731
    shuffled = lambda t: Pairs(*((n, t[n]) for n in ("steps", "block", "embed")))  # noqa: E731
    for renest in (backwards, shuffled):
        got = call(label, [renest(m) for m in models], renest(base))
        assert leaf_paths(got) != leaf_paths(base)
        chex.assert_trees_all_equal(flat(got), want)
    mixed = call(label, [backwards(models[0]), shuffled(models[1]), models[2]], base)
    chex.assert_trees_all_equal_structs(mixed, base)
    chex.assert_trees_all_equal(flat(mixed), want)


@pytest.mark.slow
@law_of_methods(1, FIRST)
def test_vmap_over_weights_and_scale_equals_a_loop(label):
    models, base = problem(label)
    several = {"weights": jnp.array([WEIGHTS, [1.0, 1.0, 1.0], [0.1, 0.0, 2.0]])}
    if label in SCALED:
        several["scale"] = jnp.array([1.0, 0.0, 0.5])
    got = jax.jit(jax.vmap(lambda several: call(label, models, base, **several)))(several)
    for i in range(3):
        one, options = jax.tree.map(lambda x: x[i], (got, several))  # noqa: B023
        assert_close(one, call(label, models, base, **options), 8)


@pytest.mark.slow
def test_vmap_over_keys_equals_a_loop():
    models, base = problem("dare_ties")
    keys = jax.random.split(KEY, 3)
    got = jax.jit(jax.vmap(lambda key: call("dare_ties", models, base, key=key)))(keys)
    for i in range(3):
        one = jax.tree.map(lambda x: x[i], got)  # noqa: B023
        assert_close(one, call("dare_ties", models, base, key=keys[i]), 4)


@pytest.mark.slow
def test_density_of_dare_may_be_traced():
    models, base = problem("dare_linear")
    got = jax.jit(lambda density: call("dare_linear", models, base, density=density))(0.3)
    assert_close(got, call("dare_linear", models, base, density=0.3), 4)


# --- degenerate inputs


@pytest.mark.parametrize("label", FIRST)
def test_trees_of_single_numbers(label):
    """numel = 1 everywhere, bare leaves included: no crash, and what the formula says."""
    models, base = [np.float32(x) for x in (1, 3, 2)], np.float32(0)
    got = call(label, models, base)
    assert got.shape == ()
    assert bool(np.isfinite(got))
    if label == "ties tensor":  # each tensor keeps at least one entry
        assert float(got) == 2.0


def leaf(*values):
    """A vector of 8 entries that repeats `values`."""
    return {"w": jnp.resize(jnp.asarray(values, jnp.float32), 8)}


NO_CHANGE = [n for n in SUBJECTS if n not in ("passthrough", *BASELESS)]


@law(5, NO_CHANGE)
def test_models_equal_to_the_base_give_the_base(label):
    base = tree(0, full=True)
    chex.assert_trees_all_equal(call(label, [base] * models_for(label), base), base)


@law_of_methods(5, SEVERAL)
def test_one_model_among_the_degenerate(label):
    models, base = matrices(problem(label))
    got = call(label, models[:1], base, **first_of(label))
    chex.assert_tree_all_finite(got)
    want = referred(label, models[:1], base, **first_of(label))
    for path, value in flat(got).items():
        assert np.all(np.abs(value - want[path]) <= 400 * EPS), path


def first_of(label):
    return {k: v[0] for k, v in SUBJECTS[label][1].items() if isinstance(v, list)}


CASES = {
    "frozen tensor": [leaf(1.0, 2.0), leaf(1.0, 2.0), leaf(1.0, 2.0)],
    "identical": [leaf(1.5, -2.0)] * 3,
    "antipodal": [leaf(2.0, 1.0), leaf(0.0, 3.0), leaf(1.0, 2.0)],
    "tiny": [leaf(1.00001, 2.0), leaf(1.0, 2.00002), leaf(0.99999, 1.99999)],
}


@pytest.mark.parametrize(("case", "label"), diagonal(CASES, SEVERAL))
def test_degenerate_deltas_have_the_references_value(case, label):
    assert_agrees(label, CASES[case], leaf(1.0, 2.0), [0.5, 0.5, 0.5], 10)


@law_of_methods(4, [n for n in SUBJECTS if "scale" not in SUBJECTS[n][1]])
@pytest.mark.parametrize(
    ("dtype", "huge"), [(jnp.bfloat16, 1e38), slow_unless(False, jnp.float16, 6e4)]
)
def test_huge_values_do_not_overflow_on_the_way(label, dtype, huge):
    """Sums of squares, magnitudes or exponentials would overflow; the outcome itself does not."""
    random = np.random.default_rng(5)
    leaves = [random.uniform(0.1, 0.2, (6, 8)) * huge for _ in range(models_for(label))]
    models = [{"w": jnp.asarray(x, dtype)} for x in leaves]
    weights = None if label in SINGLE else [1 / 3] * 3
    got = call(label, models, {"w": jnp.zeros((6, 8), dtype)}, weights=weights)
    chex.assert_tree_all_finite(got)


@pytest.mark.parametrize("label", SEVERAL)
def test_weights_that_sum_to_zero(label):
    """An error if they are normalised first, and a finite value otherwise."""
    models, base = problem(label)
    if label in NORMALIZED or refuses_negative(label):
        with pytest.raises(ValueError, match=r"sum to 0|values >= 0"):
            call(label, models, base, weights=[1.0, 1.0, -2.0])
    else:
        chex.assert_tree_all_finite(call(label, models, base, weights=[1.0, 1.0, -2.0]))


@pytest.mark.parametrize("label", SINGLE)
def test_refuses_several_models(label):
    models, base = problem(label)
    with pytest.raises(ValueError, match="models: expected 1, got 2"):
        call(label, models * 2, base)


BAD_OPTIONS = {
    "breadcrumbs": {"density": 0.0, "gamma": 1.0, "scope": "layer"},
    "della": {"density": 1.2, "epsilon": -0.1, "rank_by": "size", "compat": "peer"},
    "sce": {"select_topk": 0.0, "tie": "both", "compat": "peer"},
    "ram": {"epsilon": -1.0},
    "ramplus_tl": {"r": np.nan, "alpha": -0.1, "epsilon": [1.0]},
    "magmax": {"scale": np.inf},
    "pcb": {"ratio": 0.0},
    "consensus": {"threshold": -0.1, "agree": 1.5, "multitask": "mean", "density": 0.0},
    "passthrough": {"scale": "x"},
    "expo": {"alpha": np.nan},
    "nearswap": {"t": -1.0},
}


@pytest.mark.parametrize(("label", "option"), [(n, k) for n, ks in BAD_OPTIONS.items() for k in ks])
def test_refuses_bad_options_by_name(label, option):
    models, base = problem(label)
    ties = {"multitask": "ties"} if (label, option) == ("consensus", "density") else {}
    with pytest.raises(ValueError, match=f"{option}: expected"):
        call(label, models, base, **{option: BAD_OPTIONS[label][option], **ties})


# --- what others get wrong


def test_sce_of_a_tensor_equal_in_all_models_keeps_its_shape():
    """mergekit writes [1, ...] there for select_topk < 1."""
    base = {"w": jnp.ones((2, 3))}
    for models in ([base] * 3, [{"w": jnp.full((2, 3), 2.0)}] * 3):
        for compat in ("paper", "mergekit"):
            got = methods.sce(select_topk=0.5, compat=compat)(models, base)
            chex.assert_trees_all_equal(got, base)


@pytest.mark.slow
def test_sce_weighs_deltas_of_usual_size():
    """Deltas of 2e-4 and 6e-4: weights 1 : 9. mergekit loses them below 1e-6, and `compat` too."""
    random = np.random.default_rng(0)
    start = {"w": jnp.zeros(400)}
    small = jnp.asarray(np.abs(random.normal(size=400)) * 2e-4, jnp.float32)
    models = [{"w": small}, {"w": 3 * small}]
    paper = methods.sce()(models, start)["w"] / small
    np.testing.assert_allclose(paper, 0.1 + 0.9 * 3, rtol=1e-5)
    peer = methods.sce(compat="mergekit")(models, start)["w"] / small
    np.testing.assert_allclose(peer, 0.5 + 0.5 * 3, rtol=1e-5)


@pytest.mark.slow
def test_sce_selects_the_floor_of_the_fraction_of_what_varies():
    """70 % of 10 varying entries are 7, whatever the binary value of 0.7."""
    delta = jnp.concatenate([jnp.arange(1.0, 11.0), jnp.full(90, 5.0)])
    models = [{"w": delta}, {"w": delta * jnp.where(jnp.arange(100) < 10, 2.0, 1.0)}]
    got = methods.sce(select_topk=0.7)(models, {"w": jnp.zeros(100)})["w"]
    assert np.flatnonzero(got).tolist() == [3, 4, 5, 6, 7, 8, 9]


@pytest.mark.slow
def test_arcee_fusion_keeps_the_dtype_and_is_exact_above_a_million_entries():
    """mergekit writes float32, and samples a million entries for its quartiles."""
    random = np.random.default_rng(1)
    base = {"w": jnp.asarray(random.normal(size=(1024, 1030)), jnp.bfloat16)}
    noise = random.normal(size=(1024, 1030)) * 0.1
    model = {"w": (base["w"].astype(jnp.float32) + noise).astype(jnp.bfloat16)}
    got = methods.arcee_fusion()([model], base)["w"]
    assert got.dtype == jnp.bfloat16
    want = elementwise_reference.arcee_fusion([flat(model)], flat(base), None, None)["w"]
    # importances in float32 have 1e-5 of error: so many may fall on the other side of the threshold
    assert (np.asarray(got, float) != want).mean() < 1e-4
    assert 0.01 < (np.asarray(got, float) != np.asarray(base["w"], float)).mean() < 0.2


def test_magmax_takes_the_later_of_equal_magnitudes():
    base, one, two = leaf(0.0), leaf(1.0, -1.0), leaf(-1.0, 1.0)
    chex.assert_trees_all_equal(methods.magmax()([one, two], base), two)
    chex.assert_trees_all_equal(methods.magmax()([two, one], base), one)


def test_nearswap_at_equal_entries_and_at_t_zero():
    base, model = leaf(1.0, 2.0, 3.0, 4.0), leaf(1.0, 2.5, -3.0, 4.0)
    chex.assert_trees_all_equal(methods.nearswap(t=1.0)([model], base), leaf(1.0, 2.5, 2.0, 4.0))
    chex.assert_trees_all_equal(methods.nearswap(t=0.0)([model], base), base)


@pytest.mark.soak
def test_pcb_of_many_models_does_not_overflow():
    """exp(M s^2) exceeds float32 at M = 89."""
    models = [leaf(*np.random.default_rng(k).normal(size=8)) for k in range(90)]
    chex.assert_tree_all_finite(methods.pcb()(models, leaf(0.0)))


# --- one vector, several masks


@pytest.mark.slow
def test_emr_agrees_with_the_reference():
    models, base = problem("magmax", full=True)
    merged = methods.emr(models, base)
    for k, want in enumerate(elementwise_reference.emr([flat(m) for m in models], flat(base))):
        got = merged.model(base, k)
        chex.assert_trees_all_equal_shapes_and_dtypes(got, base)
        for path, value in flat(got).items():
            assert np.all(np.abs(value - want[path]) <= 200 * EPS), path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sum", "ties"])
def test_tall_masks_agree_with_the_reference(kind):
    models, base = problem("magmax", full=True)
    flats, thresholds = [flat(m) for m in models], [0.2, 0.4, 0.6]
    merged = methods.tall_masks(models, base, thresholds, multitask=kind, weights=WEIGHTS)
    vectors = merge_reference.deltas(flats, flat(base))
    shared = elementwise_reference.multitask(vectors, WEIGHTS, kind, 0.2)
    masks = elementwise_reference.task_masks(vectors, shared, thresholds)
    for k, mask in enumerate(masks):
        got = flat(merged.model(base, k))
        want = merge_reference.moved(
            flat(base), {p: np.where(mask[p], shared[p], 0) for p in mask}, 1.0
        )
        for path, value in got.items():
            assert np.all(np.abs(value - want[path]) <= 200 * EPS), path


@pytest.mark.slow
@pytest.mark.parametrize("build", [methods.emr, methods.tall_masks])
def test_localized_models_of_degenerate_inputs(build):
    """A single model is returned unchanged, models equal to the base give the base
    (fusion_bench: NaN), and jit agrees."""
    models, base = problem("magmax", full=True)
    alone = build(models[:1], base).model(base, 0)
    chex.assert_trees_all_close(alone, models[0], rtol=0, atol=16 * EPS)
    frozen = build([base] * 3, base)
    chex.assert_tree_all_finite(frozen.scales)
    for k in range(3):
        chex.assert_trees_all_equal(frozen.model(base, k), base)
    jitted = jax.jit(lambda ms, b: build(ms, b).model(b, 2))(models, base)
    chex.assert_trees_all_close(jitted, build(models, base).model(base, 2), rtol=0, atol=32 * EPS)
    with pytest.raises(IndexError, match="task: expected one of 3, got 3"):
        build(models, base).model(base, 3)


@pytest.mark.parametrize("build", [methods.emr, methods.tall_masks])
def test_a_leaf_without_entries_has_a_mask_for_each_model(build):
    models = [{"w": jnp.full(2, 1.0 + k), "empty": jnp.zeros((0, 3))} for k in range(2)]
    base = jax.tree.map(jnp.zeros_like, models[0])
    merged = build(models, base)
    assert merged.masks["empty"].shape == (2, 0, 3)
    assert merged.model(base, 1)["empty"].shape == (0, 3)


def test_emr_scales_survive_huge_and_tiny_deltas():
    models, base = [leaf(1e30, -2e30), leaf(3e30, 1e30)], leaf(0.0)
    small = [jax.tree.map(lambda x: x * 1e-25 * 1e-25, m) for m in models]
    big, little = methods.emr(models, base), methods.emr(small, base)
    np.testing.assert_allclose(big.scales, [0.6, 4 / 3], rtol=4 * EPS)
    np.testing.assert_allclose(little.scales, [0.6, 4 / 3], rtol=4 * EPS)


def test_tall_masks_do_not_depend_on_the_base():
    """Masks apply to differences; fusion_bench passes the base's values instead of 0."""
    random = np.random.default_rng(2)
    deltas = [np.round(random.normal(size=4000) * 256) / 256 for _ in range(4)]
    far = np.round(random.normal(size=4000) * 256) / 4

    def kept(start):
        models = [{"w": jnp.asarray(start + d, jnp.float32)} for d in deltas]
        base = {"w": jnp.asarray(start, jnp.float32)}
        return methods.tall_masks(models, base, 0.6).masks["w"]

    near, other = kept(np.zeros(4000)), kept(far)  # all exact in float32
    chex.assert_trees_all_equal(near, other)
    assert 0.3 < float(near.mean()) < 0.8


@pytest.mark.slow
def test_best_thresholds_are_those_of_the_score():
    models, base = problem("magmax")

    def closeness(k, model):
        return -sum(
            float(jnp.abs(a - b).sum())
            for a, b in zip(flat_floats(model), flat_floats(models[k]), strict=True)
        )

    candidates = (0.2, 0.4, 0.6)
    got = methods.best_thresholds(closeness, models, base, candidates)
    for k in range(3):
        scores = [
            closeness(k, methods.tall_masks(models, base, c).model(base, k)) for c in candidates
        ]
        assert got[k] == candidates[int(np.argmax(scores))]
    with pytest.raises(ValueError, match="candidates: expected at least one"):
        methods.best_thresholds(closeness, models, base, ())


@pytest.mark.slow
def test_consensus_without_agreement_is_task_arithmetic():
    models, base = problem("consensus")
    plain = methods.task_arithmetic()(models, base, weights=WEIGHTS)
    same = methods.consensus(agree=0)(models, base, weights=WEIGHTS)
    chex.assert_trees_all_close(same, plain, rtol=0, atol=16 * EPS)
    chex.assert_trees_all_equal(methods.consensus(agree=4)(models, base), base)
