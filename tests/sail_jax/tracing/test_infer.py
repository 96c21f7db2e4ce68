"""`spec_of` and `check_spec` on small networks with obvious spaces."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from sail_jax import (
    SpaceMap,
    certificate,
    change_basis,
    check_spec,
    exactness,
    growth,
    jax_internals,
    spec,
    spec_of,
)
from sail_jax.basis.families import Family
from sail_jax.tracing import interpreter, pieces
from sail_jax.tracing.roles import words_of


def drawn(seed=0, **shapes):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


X = jnp.asarray(np.random.default_rng(9).normal(size=(5, 3)), jnp.float32)


def mlp(p, x):
    return jax.nn.relu(x @ p["in"] + p["bias"]) @ p["out"]


MLP = {"in": (3, 8), "bias": (8,), "out": (8, 2)}


def test_why_an_axis_is_in_no_space():
    found = spec_of(mlp, drawn(**MLP, spare=(4,)), X)
    assert found.rules == {"bias": "in", "in": "_ in", "out": "in* _", "spare": "_"}
    read = "the order of the network's input: dot_general"
    assert re.fullmatch(rf"{read} \(test_infer.py:\d+\)", found.why["in", 0])
    assert found.why["out", 1] == "the network's output"
    assert found.unused == ("spare",)
    assert found.unknown == ()
    assert set(found.why) == {("in", 0), ("out", 1)}


def test_a_source_is_a_file_of_the_user():
    for module in (jax, linen, contextlib, jax_internals, pieces):
        assert interpreter._file(module.__file__) == ""
    assert interpreter._file(__file__) == "test_infer.py"


def test_shapes_are_enough_and_what_is_printed_can_be_edited():
    params = drawn(**MLP)
    like = jax.eval_shape(lambda: params)
    found = spec_of(mlp, like, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert found == spec_of(mlp, params, X)
    assert "in: '_ in'" in str(found)
    again = spec(params, found.rules, spaces={"in": found.spec.space("in").nonlinearity})
    assert again == found.spec


def test_names_of_spaces_can_be_given():
    named = spec_of(mlp, drawn(**MLP), X, names={"bias": "hidden"})
    assert named.rules["out"] == "hidden* _"
    with pytest.raises(ValueError, match=r"names\['bais'\]: no such leaf.*'bias'"):
        spec_of(mlp, drawn(**MLP), X, names={"bais": "hidden"})
    with pytest.raises(ValueError, match=r"names\['out'\]: expected 2 axes, got 'hidden'"):
        spec_of(mlp, drawn(**MLP), X, names={"out": "hidden"})
    with pytest.raises(ValueError, match="the space 'b' is already called 'a'"):
        spec_of(mlp, drawn(**MLP), X, names={"bias": "a", "out": "b _"})

    def two(p, x):
        return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]

    params = drawn(a=(3, 4), b=(4, 4), c=(4, 2))
    with pytest.raises(ValueError, match="two spaces the name 'h'"):
        spec_of(two, params, X, names={"a": "_ h", "c": "h _"})


@pytest.mark.slow
def test_a_leaf_that_is_used_in_two_senses_is_tied():
    """Doubled units of a tied stream were once reported as exact."""

    def net(p, tokens):
        h = p["embed"][tokens]
        return jnp.tanh(h @ p["w"]) @ p["u"] @ p["embed"].T

    params = drawn(embed=(7, 4), w=(4, 6), u=(6, 4))
    tokens = jnp.array([[0, 3, 5]])
    found = spec_of(net, params, tokens).spec
    assert found.axes("embed")[1][0].tied
    maps = {found.axes("embed")[1][0].space: growth.widen(4, 8)}
    assert "tied leaf 'embed'" in exactness(found, maps).lost
    assert not check_spec(found, net, params, tokens[:, :2]).failed


def test_a_weight_norm_keeps_its_reader():
    """The norm forgets a sign that the reader still has."""

    def net(p, x):
        w = p["gain"] * p["v"] / jnp.linalg.norm(p["v"], axis=0)
        return jnp.tanh(x @ w) @ p["out"]

    params = drawn(v=(3, 8), gain=(8,), out=(8, 2))
    found = spec_of(net, params, X)
    (normed,), (reads,) = found.spec.axes("v")[1], found.spec.axes("out")[0]
    assert (reads.space, reads.role) == (normed.space, "read")
    assert not check_spec(found.spec, net, params, X).failed


def test_a_constant_is_never_judged_by_its_entries():
    """Cosines of one position are all one: for two they are not, and the order of units matters."""
    tables = {n: np.cos(np.arange(n)[:, None] * np.array([1.0, 0.1, 0.01, 0.001])) for n in (1, 2)}

    def net(p, x):
        return jnp.tanh(x @ p["in"] * tables[x.shape[0]].astype(np.float32)) @ p["out"]

    params = drawn(**{"in": (3, 4), "out": (4, 2)})
    assert (tables[1] == 1).all()
    assert spec_of(net, params, X[:1]).spec.spaces == ()
    assert spec_of(net, params, X[:1]).spec == spec_of(net, params, X[:2]).spec


def test_a_reason_has_the_innermost_line_of_the_users_source():
    def look_up(table, numbers):
        return jnp.take(table, numbers, axis=0)

    def net(p, numbers):
        return jnp.tanh(look_up(p["table"], numbers)) @ p["out"]

    params, numbers = drawn(table=(5, 4), out=(4, 2)), jnp.array([3, 1])
    line = f"(test_infer.py:{look_up.__code__.co_firstlineno + 1})"
    # The second time, JAX has kept what it traced of `take`, without its lines.
    for _ in range(2):
        assert spec_of(net, params, numbers).why["table", 0].endswith(line)


@pytest.mark.slow
def test_experts_that_are_looked_up_may_be_reordered():
    """No parameter reads the experts' space: the router numbers them, and stacks are looked up."""

    def net(p, x):
        weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
        hidden = jax.nn.gelu(jnp.einsum("ni,nkih->nkh", x, p["up"][chosen]))
        return jnp.einsum("nk,nkh,nkho->no", weights, hidden, p["down"][chosen])

    params = drawn(router=(3, 4), up=(4, 3, 6), down=(4, 6, 2))
    found = spec_of(net, params, X)
    assert found.rules == {"down": "router up* _", "router": "_ router", "up": "router _ up"}
    assert found.spec.space("router").nonlinearity == "softmax"
    checked = check_spec(found.spec, net, params, X[:3])
    assert ("router", "permutation") in [trial[:2] for trial in checked.trials]
    assert not checked.failed


def test_messages_along_edges_leave_units_free():
    """A scatter may have an index for every entry, as `scatter_add` of torch has."""
    start, end = jnp.array([1, 0, 2, 2]), jnp.array([0, 2, 2, 1])

    def net(p, x):
        h = jax.nn.relu(x @ p["in"]).reshape(-1, 2, 4)
        h = (h / (1 + h.sum(2, keepdims=True))).reshape(-1, 8)
        sums = jnp.zeros_like(h).at[end[:, None], jnp.arange(h.shape[1])].add(h[start])
        return sums.reshape(-1, 2, 4).max(2) @ p["out"]

    params = drawn(**{"in": (3, 8), "out": (2, 2)})
    found = spec_of(net, params, X[:3])
    assert found.rules == {"in": "_ (in in:2)", "out": "in* _"}
    assert not check_spec(found.spec, net, params, X).failed


def test_what_no_rule_is_for_is_left_alone_and_named():
    def double(h):
        shape = jax.ShapeDtypeStruct(h.shape, h.dtype)
        return jax.pure_callback(lambda a: np.cumsum(np.asarray(a), -1), shape, h)

    def net(p, x):
        return jnp.tanh(double(jnp.tanh(x @ p["in"])) @ p["mid"]) @ p["out"]

    params = drawn(**{"in": (3, 6), "mid": (6, 5), "out": (5, 2)})
    found = spec_of(net, params, X)
    assert found.unknown == ("pure_callback",)
    assert found.rules == {"in": "_ _", "mid": "_ mid", "out": "mid* _"}
    assert "pure_callback" in found.why["in", 1]
    assert "no rule for this primitive" in found.why["in", 1]
    assert not check_spec(found.spec, net, params, X).failed


def test_what_is_only_summed_is_a_set_and_what_is_no_number_is_in_no_space():
    """No leaf reads these units, and their order does not matter."""

    def net(p, x):
        return (x @ p["w"]).sum(-1) + p["table"][p["index"]].mean(1).sum()

    params = drawn(w=(3, 8), table=(4, 2)) | {"index": jnp.array([1, 2])}
    found = spec_of(net, params, X)
    assert [space[1:] for space in found.spec.spaces] == [(2, "softmax"), (8, "softmax")]
    assert found.spec.axes("index") == ((),)
    trials = check_spec(found.spec, net, params, X).trials
    assert [trial.change for trial in trials] == ["permutation"] * 3
    assert all(trial.measured.preserved for trial in trials)


@pytest.mark.parametrize(
    ("act", "word"),
    [
        (jax.nn.relu, "relu"), (jax.nn.leaky_relu, "relu"), (jnp.abs, "relu"),
        (jnp.tanh, "odd"), (jnp.sin, "odd"), (jax.nn.gelu, "elementwise"),
        (lambda h: h, "linear"), (lambda h: h**2, "elementwise"),
        (lambda h: 3 * jnp.tanh(h / 3), "odd"), (lambda h: h * jax.nn.sigmoid(h), "elementwise"),
        (lambda h: h * (h > 0), "relu"), (lambda h: jnp.where(h > 0, h, 0.1 * h), "relu"),
        (lambda h: h + 1, "elementwise"), (lambda h: jax.nn.softmax(h, -1), "softmax"),
        (lambda h: h / jnp.sqrt((h * h).mean(-1, keepdims=True) + 1e-6), "rmsnorm"),
        (lambda h: h / jnp.linalg.norm(h, axis=-1, keepdims=True), "dot rmsnorm"),
        (lambda h: h - h.mean(-1, keepdims=True), "layernorm"),
        (lambda h: (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-6),
         "layernorm"),
        (lambda h: h - h.max(-1, keepdims=True), "elementwise"),
    ],
)  # fmt: skip
def test_nonlinearities_are_known_by_what_they_commute_with(act, word):
    def net(p, x):
        return act(x @ p["in"]) @ p["out"]

    params = drawn(**{"in": (3, 6), "out": (6, 2)})
    found = spec_of(net, params, X).spec
    assert sorted(found.space("in").nonlinearity.split()) == sorted(word.split())
    checked = check_spec(found, net, params, X[:4], resized=lambda _: net)
    assert not checked.failed, checked
    assert not checked.skipped


def test_a_scale_of_half_precision_leaves_scales_free():
    """Numbers of bfloat16 are no numbers of NumPy; and what is no number is not taken for one."""

    def net(p, x):
        return jax.nn.relu(x @ p["in"] * 2) @ p["out"]

    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), drawn(**{"in": (3, 6), "out": (6, 2)}))
    assert spec_of(net, half, X.astype(jnp.bfloat16)).spec.space("in").nonlinearity == "relu"
    for number, word in ((6.0, "layernorm"), (5.0, "softmax"), (np.nan, "softmax")):

        def mean(p, x, number=number):
            h = x @ p["in"]
            return (h - h.sum(-1, keepdims=True) / number) @ p["out"]

        found = spec_of(mean, drawn(**{"in": (3, 6), "out": (6, 2)}), X)
        assert found.spec.space("in").nonlinearity == word


@pytest.mark.slow
def test_what_is_averaged_is_copied_evenly():
    """Units that are normalised in groups and then scaled all have the same number of copies."""

    def net(p, x, size=2):
        h = (x @ p["in"]).reshape(-1, 4, size)
        h = h - h.mean(-1, keepdims=True)
        h = h / jnp.sqrt((h * h).mean(-1, keepdims=True) + 1e-6)
        return jax.nn.relu(h.reshape(-1, 4 * size) * p["gain"] + p["bias"]) @ p["out"]

    params = drawn(**{"in": (3, 8), "gain": (8,), "bias": (8,), "out": (8, 2)})
    found = spec_of(net, params, X).spec
    (name,) = [space.name for space in found.spaces if space.size == 2]
    # Three copies of one unit and one of the other, as many after scaling: isometric, not even.
    write = np.array([[1, 0], [1, 0], [1, 0], [0, 3**0.5]]) * (2 / 3) ** 0.5
    read = np.linalg.pinv(write)
    family = Family.ISOMETRIC | Family.POSITIVE_MONOMIAL
    uneven = SpaceMap(jnp.asarray(write), jnp.asarray(read), family)
    grown = change_basis(params, found, {name: uneven})
    assert np.abs(net(grown, X, 4) - net(params, X)).max() > 0.1
    assert exactness(found, {name: uneven}).lost
    even = growth.widen(2, 4)
    assert not exactness(found, {name: even}).lost
    grown = change_basis(params, found, {name: even})
    np.testing.assert_allclose(net(grown, X, 4), net(params, X), rtol=1e-5, atol=1e-5)


def test_words_lie_within_their_family():
    from functools import reduce
    from operator import or_

    from sail_jax.basis.families import NONLINEARITIES

    for bits in range(32):
        family = Family(bits)
        words = [NONLINEARITIES[w] for w in words_of(family).split()]
        assert family in reduce(or_, words)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.gate = nnx.Linear(8, 12, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(8, 12, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(12, 8, rngs=rngs)

    def __call__(self, x):
        y = self.norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.block = Block(rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.block(self.first(x)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "to"),
    [
        *((m, {"hidden": "2x"}) for m in ("lemon", "net2net", "hypercloning", "fpi", "pad")),
        *((m, {"stream": 16, "hidden": 15}) for m in ("lemon", "net2net", "interpolate")),
        *((m, {"stream": 13}) for m in ("lemon", "fpi", "pad")),
    ],
)
def test_grown_without_a_table_it_is_exact_where_its_report_finds_nothing(method, to):
    """Every nonlinearity of this network is stated, so that what is not lost is kept."""
    graph, params = nnx.split(Net(nnx.Rngs(0)))
    params = jax.tree.map(lambda p: p + 0.3 * jax.random.normal(jax.random.key(5), p.shape), params)

    def net(params, x):
        return nnx.merge(graph, params)(x)

    names = {"first/bias/value": "stream", "block/up/kernel/value": "stream* hidden"}
    found = spec_of(net, params, X, names=names).spec
    assert {s.name: s.nonlinearity for s in found.spaces} == {
        "stream": "rmsnorm",
        "hidden": "gated",
    }
    key = jax.random.key(0)
    large, grown = growth.grow(params, {}, to, method, key=key, rules=found)
    assert type(large) is type(params)
    sizes = {name: grown.spec.resized(grown.maps).space(name).size for name in to}
    assert sizes == {name: 24 if size == "2x" else size for name, size in to.items()}
    assert certificate(net, params, large, X).preserved == (not grown.report.lost)


@pytest.mark.slow
def test_both_libraries_of_flax():
    graph, state = nnx.split(Net(nnx.Rngs(0)))
    found = spec_of(lambda state, x: nnx.merge(graph, state)(x), state, X)
    sizes = {space.size: space.nonlinearity for space in found.spec.spaces}
    assert sizes == {8: "rmsnorm", 12: "gated"}
    assert not check_spec(found.spec, lambda s, x: nnx.merge(graph, s)(x), state, X[:2]).failed

    module = linen.Sequential([linen.Dense(6), linen.relu, linen.Dense(2)])
    variables = module.init(jax.random.key(0), X)
    found = spec_of(module.apply, variables, X)
    assert [space.nonlinearity for space in found.spec.spaces] == ["relu"]


def test_a_network_may_contain_a_key():
    key = jax.random.key(0)

    def net(p, x):
        return jax.nn.relu(x @ p["in"]) @ p["out"] + jax.random.normal(key, (2,))

    params = {"in": jnp.zeros((3, 8)), "out": jnp.zeros((8, 2))}
    assert spec_of(net, params, X).rules == {"in": "_ in", "out": "in* _"}

    def deep(p, x):
        return net(p, x) + 0 * sum(p["b"])

    layers = spec_of(deep, params | {"b": [jnp.zeros(())]}, X, layers="b/*").spec.layers
    assert layers[0].start == "b/{i}"


@pytest.mark.slow
def test_a_module_in_training_mode_is_noticed_and_kept():
    """Running statistics are written and not read, and dropout has its own numbers per unit."""

    class Trained(nnx.Module):
        def __init__(self, rngs):
            self.enter, self.norm = nnx.Linear(3, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
            self.drop, self.leave = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

        def __call__(self, x):
            return self.leave(self.drop(nnx.relu(self.norm(self.enter(x)))))

    def inferred(model):
        graph, params = nnx.split(model)
        return params, lambda params, x: nnx.merge(graph, params)(x)

    params, net = inferred(Trained(nnx.Rngs(0)))
    statistics, numbers = spec_of(net, params, X).notes
    assert statistics.startswith("no output depends on 'norm/mean/value' and 1 more, so growth")
    assert numbers.startswith("random numbers (random_bits")
    certificate(net, params, params, X)
    assert not params["norm"]["mean"].get_value().any()
    nothing = check_spec(spec_of(net, params, X).spec, net, params, X)
    assert str(nothing).startswith("nothing was checked")

    model = Trained(nnx.Rngs(0))
    model.eval()
    params, net = inferred(model)
    found = spec_of(net, params, X)
    assert not found.notes
    assert [space.size for space in found.spec.spaces] == [8]


@pytest.mark.slow
def test_a_wrong_spec_is_found_and_the_axis_named():
    """One of two axes is omitted: the other one is reported as the cause."""
    params = drawn(**MLP)
    rules = {"in": "x* h", "bias": "_", "out": "h* y"}
    wrong = spec(params, rules, spaces={"h": "relu", "{x,y}": "outer"})
    failed = check_spec(wrong, mlp, params, X).failed
    assert {trial.change for trial in failed} >= {"permutation", "scales"}

    def stream(p, x):
        h = x @ p["in"]
        return (h + jnp.tanh(h @ p["up"]) @ p["down"]) @ p["out"]

    params = drawn(**{"in": (3, 5), "up": (5, 6), "down": (6, 5), "out": (5, 2)})
    rules = {"in": "x* h", "up": "h* u", "down": "u* h", "out": "h* y"}
    right = spec(params, rules, spaces={"h": "linear", "u": "odd", "{x,y}": "outer"})
    assert not check_spec(right, stream, params, X).failed
    wrong = spec(params, rules, spaces={"h": "linear", "u": "linear", "{x,y}": "outer"})
    (worst, *_) = check_spec(wrong, stream, params, X).failed
    assert worst.space == "u"
    assert "WRONG" in str(check_spec(wrong, stream, params, X))


@pytest.mark.slow
def test_a_spec_moves_parameters():
    params = drawn(**MLP)
    found = spec_of(mlp, params, X).spec
    grown = change_basis(params, found, {"in": growth.widen(8, 13)}, require_exact=True)
    np.testing.assert_allclose(mlp(grown, X), mlp(params, X), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_is_stored_of_parameters_has_their_spaces():
    """Experts that are stored one by one keep their order, and each has units of its own.

    What is fused may be stored apart.
    """

    def net(p, x):
        weight = jax.nn.softmax(x @ p["router"], -1)
        gate, up = jnp.split(jnp.einsum("bd,edh->beh", x, p["w"]), 2, axis=-1)
        y = jnp.einsum("beh,eho->beo", jax.nn.silu(gate) * up, p["u"])
        return (y * weight[..., None]).sum(1)

    def stored(p):
        parts = {"gate": p["router"].T}
        for e in range(2):
            gate, up = jnp.split(p["w"][e], 2, axis=-1)
            parts |= {f"{e}.gate": gate.T, f"{e}.up": up.T, f"{e}.down": p["u"][e].T}
        return parts

    def loaded(parts, x):
        both = [jnp.concatenate([parts[f"{e}.{n}"].T for n in ("gate", "up")], -1) for e in (0, 1)]
        u = jnp.stack([parts[f"{e}.down"].T for e in (0, 1)])
        return net({"router": parts["gate"].T, "w": jnp.stack(both), "u": u}, x)

    params = drawn(router=(3, 2), w=(2, 3, 10), u=(2, 5, 3))
    found = spec_of(net, params, X, stored=stored)
    assert found.rules == {
        "gate": "_ _",
        **{f"{e}.gate": f"diag({e}.up) _" for e in (0, 1)},
        **{f"{e}.up": f"{e}.up _" for e in (0, 1)},
        **{f"{e}.down": f"_ {e}.up*" for e in (0, 1)},
    }
    parts = stored(params)
    assert list(found.rules) == sorted(parts)
    np.testing.assert_allclose(loaded(parts, X), net(params, X), rtol=1e-5)
    checked = check_spec(found.spec, loaded, parts, X[:2])
    assert len(checked.trials) == 7
    assert not checked.failed


def _centred(h):
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)


def _uncentred(h):
    return h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        ((_centred, _centred), "layernorm"),
        ((_centred, _uncentred), "layernorm rmsnorm"),
        ((_uncentred, _centred), "layernorm rmsnorm"),
        ((_uncentred, _uncentred), "rmsnorm"),
    ],
)
def test_norms_of_both_kinds_on_one_stream_are_both_named(norms, words):
    """Copies and averages keep LayerNorm alone, so growth reports what RMSNorm loses."""

    def net(p, x):
        h = x @ p["in"]
        for norm, up, down in zip(norms, p["up"], p["down"], strict=True):
            h = h + jax.nn.relu(norm(h) @ up) @ down
        return h @ p["out"]

    params = drawn(up=(2, 4, 3), down=(2, 3, 4), out=(4, 2), **{"in": (3, 4)})
    params |= {name: list(params[name]) for name in ("up", "down")}
    spec = spec_of(net, params, X).spec
    assert spec.space("in").nonlinearity == words
    large, grown = growth.grow(params, {}, {"in": 6}, "lemon", rules=spec)
    kept = certificate(net, params, large, X).preserved
    assert kept == (not grown.report.lost) == ("rmsnorm" not in words or words == "rmsnorm")
