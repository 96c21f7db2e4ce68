"""Structured pruning: scores against NumPy, what is kept, and what is lost by the forward pass."""

import json

import jax
import jax.numpy as jnp
import known_networks as models
import numpy as np
import pytest
from small_checkpoints import CONFIG, tensors

from sail_jax import change_basis, spec_of
from sail_jax.basis.spaces import spec
from sail_jax.checkpoint import load_checkpoint, save_checkpoint
from sail_jax.cli import main as cli
from sail_jax.growth import grow, magnitude, plan, unit_scores

X = jax.random.normal(jax.random.key(1), (5, 3))
MLP = {"model_type": "mlp", "inputs": 3, "widths": [4, 5]}


def draw(seed, **shapes):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=n).astype(np.float32) for name, n in shapes.items()}


def attend(p, x):
    """A stream under RMSNorm, heads in one fused leaf, and a gated unit that is fused as well."""

    def norm(y):
        return y * jax.lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-3)

    y = x @ p["in"]
    q, k, v = jnp.moveaxis((norm(y) @ p["qkv"]).reshape(len(x), -1, 3, 2), 2, 0)
    weights = jax.nn.softmax(jnp.einsum("ihd,jhd->hij", q, k), -1)
    y = y + jnp.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1) @ p["o"]
    gate, up = jnp.split(norm(y) @ p["gate_up"], 2, -1)
    y = y + (jax.nn.silu(gate) * up + p["bias"]) @ p["down"]
    return norm(y) @ p["out"]


def attention():
    p = draw(
        0, qkv=(6, 24), o=(8, 6), gate_up=(6, 14), bias=7, down=(7, 6), out=(6, 2), **{"in": (3, 6)}
    )
    names = {"in": "_ stream", "qkv": "stream* (head (qk + qk* + v))", "bias": "hidden"}
    return p, spec_of(attend, p, X, names=names).spec


def kept_units(maps):
    (m,) = maps.values()
    return np.asarray(m.index).tolist()


def share(leaf, axis):
    """Computes the fraction of each unit in the squared norm of a matrix."""
    squares = np.moveaxis(leaf.astype(np.float64), axis, 0).reshape(leaf.shape[axis], -1) ** 2
    return squares.sum(1) / squares.sum()


@pytest.mark.slow
def test_scores_and_units_against_numpy():
    p, s = attention()
    qkv, out = p["qkv"].reshape(6, 4, 3, 2), p["o"].reshape(4, 2, 6)
    gate, up = p["gate_up"][:, :7], p["gate_up"][:, 7:]
    head = sum(share(qkv[:, :, k], 1) for k in range(3)) + share(out, 0)
    hidden = share(gate, 1) + share(up, 1) + share(p["down"], 0)
    scores = unit_scores(p, s, ["head", "hidden"])
    np.testing.assert_allclose(scores["head"], head, rtol=1e-12)
    np.testing.assert_allclose(scores["hidden"], hidden, rtol=1e-12)
    new, growth = grow(p, {}, {"head": 2, "hidden": 3}, "magnitude", rules=s)
    kept, units = np.sort(np.argsort(-head)[:2]), np.sort(np.argsort(-hidden)[:3])
    np.testing.assert_array_equal(new["qkv"], qkv[:, kept].reshape(6, -1))
    np.testing.assert_array_equal(new["o"], out[kept].reshape(-1, 6))
    np.testing.assert_array_equal(new["gate_up"], np.hstack([gate[:, units], up[:, units]]))
    np.testing.assert_array_equal(new["bias"], p["bias"][units])
    lost = {row.space: row.lost for row in growth.report.spaces}
    removed = 1 - hidden[units].sum() / hidden.sum()
    assert lost["hidden"] == f"4 of 7 units are removed, {removed:.1%} of the score"
    mean_squares = np.array([0, 0, 3, 0, 0, 1, 0])
    assert kept_units(magnitude(p, s, {"hidden": 2}, scores={"hidden": mean_squares})) == [2, 5]
    assert attend(new, X).shape == (5, 2)


def test_a_pruned_network_computes_what_one_with_zeros_does():
    p, s = attention()
    new, _ = grow(p, {}, {"stream": 4, "head": 2, "hidden": 3}, "magnitude", rules=s)
    maps = magnitude(p, s, {"stream": 4, "head": 2, "hidden": 3})
    zeroed = dict(p)
    stream, head, hidden = (np.asarray(maps[n].index) for n in ("stream", "head", "hidden"))
    off = np.setdiff1d(np.arange(6), stream)
    zeroed["in"], zeroed["o"], zeroed["down"] = (p[n].copy() for n in ("in", "o", "down"))
    for name in ("in", "o", "down"):
        zeroed[name][:, off] = 0
    zeroed["o"].reshape(4, 2, 6)[np.setdiff1d(np.arange(4), head)] = 0
    zeroed["down"][np.setdiff1d(np.arange(7), hidden)] = 0
    np.testing.assert_allclose(attend(new, X), attend(zeroed, X), rtol=1e-4, atol=1e-5)
    # Zero units are removed first, without loss.
    small, growth = grow(
        zeroed, {}, {"stream": 4, "head": 2, "hidden": 3}, "magnitude", rules=s,
        require_lossless=True,
    )  # fmt: skip
    assert not growth.report.lost
    np.testing.assert_allclose(attend(small, X), attend(zeroed, X), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hypercloning", "net2net"])
def test_copies_are_removed_without_a_loss(method):
    p, s = attention()
    sizes = {"stream": 12, "head": 8, "hidden": 14}
    if method == "net2net":
        # Random copies: of a stream under a norm only equal numbers are exact.
        sizes = {"head": 7, "hidden": 17}
    large, grown = grow(p, {}, sizes, method, key=jax.random.key(3), rules=s)
    old = {name: s.space(name).size for name in sizes}
    # Copies are found wherever they are.
    shuffle = np.random.default_rng(0).permutation(sizes["hidden"])
    halves = np.split(large["gate_up"], 2, 1)
    large["gate_up"] = np.hstack([np.asarray(h)[:, shuffle] for h in halves])
    large["bias"], large["down"] = large["bias"][shuffle], large["down"][shuffle]
    back, growth = grow(
        large, {}, old, "magnitude", rules=grown.spec.resized(grown.maps), require_lossless=True
    )
    assert not growth.report.lost
    order = np.argsort(np.asarray(back["bias"]))
    for name, x in p.items():
        got, want = np.asarray(back[name]), x
        if name in ("bias", "down"):
            got, want = got[order], x[np.argsort(p["bias"])]
        if name == "gate_up":
            got, want = (np.sort(np.split(h, 2, 1), axis=-1) for h in (got, want))
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(attend(back, X), attend(p, X), rtol=1e-4, atol=1e-5)


def test_fewer_copies_are_read_as_all_were():
    """Three of five copies of two units are kept, which preserves the function."""
    net = {"in": np.ones((3, 5)), "out": np.arange(1.0, 6).reshape(5, 1)}
    net["in"][:, 1::2] = 2
    s = spec(net, {"in": "x* h", "out": "h* y"}, spaces={"h": "relu", "{x,y}": "outer"})
    scores = [3 / 15 + 81 / 117, 12 / 15 + 36 / 117, 0, 0, 0]
    np.testing.assert_allclose(unit_scores(net, s, ["h"])["h"], scores, rtol=1e-12)
    small = change_basis(net, s, magnitude(net, s, {"h": 3}))
    assert small["in"][0].tolist() == [1, 2, 1]
    assert small["out"].ravel().tolist() == [1 + 5, 2 + 4, 3]
    # Experts of a softmax that are equal still share what the softmax gives out.
    s = spec(net, {"in": "x* h", "out": "h* y"}, spaces={"h": "softmax", "{x,y}": "outer"})
    assert kept_units(magnitude(net, s, {"h": 3})) == [1, 3, 4]


@pytest.mark.slow
def test_queries_and_keys_keep_their_products():
    """Logits are divided by the root of the number of keys, so what stays is scaled."""
    p = draw(0, q=(3, 4), k=(3, 4), v=(3, 2))
    p["q"][:, 1] = p["k"][:, 2] = 0

    def attention(p, x):
        logits = (x @ p["q"]) @ (x @ p["k"]).T / p["q"].shape[1] ** 0.5
        return jax.nn.softmax(logits) @ x @ p["v"]

    s = spec_of(attention, p, X, names={"q": "_ qk"}).spec
    new, growth = grow(p, {}, {"qk": 2}, "magnitude", rules=s, require_lossless=True)
    assert not growth.report.lost
    products = p["q"] @ p["k"].T / 2**0.5
    np.testing.assert_allclose(new["q"] @ new["k"].T, products, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(attention(new, X), attention(p, X), rtol=1e-4, atol=1e-5)


def test_experts():
    p = draw(0, router=(3, 4), up=(4, 3, 6), down=(4, 6, 2))
    p["up"][2] *= 0.1
    p["down"][2] *= 0.1

    def experts(p, x):
        weights = jax.nn.softmax(x @ p["router"])
        hidden = jax.nn.relu(jnp.einsum("ni,kih->nkh", x, p["up"]))
        return jnp.einsum("nk,nkh,kho->no", weights, hidden, p["down"])

    s = spec_of(experts, p, X, names={"up": "expert _ hidden"}).spec
    new, _ = grow(p, {}, {"expert": 3}, "magnitude", rules=s)
    np.testing.assert_array_equal(new["router"], p["router"][:, [0, 1, 3]])
    np.testing.assert_array_equal(new["down"], p["down"][[0, 1, 3]])


def test_a_tied_table_stays_tied():
    p = draw(0, table=(9, 6), up=(6, 8), down=(8, 6))

    def tied(p, tokens):
        y = p["table"][tokens]
        return (y + jax.nn.relu(y @ p["up"]) @ p["down"]) @ p["table"].T

    tokens = jnp.arange(9)
    s = spec_of(tied, p, tokens, names={"up": "stream* hidden"}).spec
    score = share(p["table"], 1) + share(p["up"], 0) + share(p["down"], 1)
    keep = np.sort(np.argsort(-score)[:4])
    new, growth = grow(p, {}, {"stream": 4}, "magnitude", rules=s)
    np.testing.assert_array_equal(new["table"], p["table"][:, keep])
    assert new.keys() == p.keys()
    assert "2 of 6 units are removed" in growth.report.lost


@pytest.mark.parametrize(
    ("to", "options", "text"),
    [
        ({"widths.0": 6}, {}, "'magnitude' removes units, but space 'hidden.0' .* has 4 .* 6"),
        ({"widths.0": 0}, {}, "'hidden.0' .* expected to keep at least 1, not 0"),
        ({"hiden.0": 2}, {}, r"and it is not a space \(nearest: 'hidden.0'"),
        ({"hidden.0": 2.5}, {}, "the size of 'hidden.0' must be a whole number"),
        ({"widths": [4]}, {}, "'magnitude' removes units of layers, but 'widths' is 2 .* 1"),
        ({"width": 0.3}, {}, "not a whole number"),
        ({"inputs": 2}, {}, "growth keeps 'inputs'"),
        ({"hidden.0": 2}, {"scores": {"hidden.0": [1.0]}}, "must be 4 finite numbers"),
        ({"hidden.0": 2}, {"depth_method": "stack"}, "cannot take depth_method"),
        ({"hidden.0": 2}, {"require_lossless": True}, "2 of 4 units are removed"),
    ],
)
def test_bad_input(to, options, text):
    p = draw(0, **{"layers.0.kernel": (3, 4), "layers.0.bias": 4, "layers.1.kernel": (4, 5)})
    p |= draw(1, **{"layers.1.bias": 5, "out.kernel": (5, 2), "out.bias": 2})
    with pytest.raises(ValueError, match=text):
        grow(p, MLP, to, "magnitude", **options)


def test_what_needs_values_and_what_takes_scores():
    p = draw(0, **{"layers.0.kernel": (3, 4), "layers.0.bias": 4, "out.kernel": (4, 2)})
    p |= draw(1, **{"out.bias": 2})
    c = MLP | {"widths": [4]}
    with pytest.raises(ValueError, match="decide which units stay, got ShapeDtypeStruct"):
        plan(jax.eval_shape(lambda: p), c, {"width": 0.5}, "magnitude")
    with pytest.raises(ValueError, match="scores are for methods that prune, which 'lemon'"):
        plan(p, c, {"width": 2}, "lemon", scores={})
    with pytest.raises(ValueError, match=r"has 4 units .* to shrink it, give method magnitude"):
        plan(p, c, {"width": 0.5}, "lemon")
    p["out.kernel"][0, 0] = np.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        grow(p, c, {"width": 0.5}, "magnitude")
    golden = models.GOLDEN["llama"]
    m = models.model("llama").params
    with pytest.raises(ValueError, match=r"distinguishes .* state fewer heads"):
        plan(m, golden["config"] | {"head_dim": 4}, {"head_dim": 2}, "magnitude")


@pytest.mark.soak
def test_the_command_prunes_a_checkpoint(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    save_checkpoint(tmp_path / "a", tensors(0), extras={"config.json": config})
    command = ["grow", tmp_path / "a", tmp_path / "b", "--width", "0.5x", "--method", "magnitude"]
    assert cli.main([*map(str, command), "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "units are removed" in shown
    assert "the function is not preserved. Both networks were run" in shown
    want, growth = grow(tensors(0), CONFIG, {"width": 0.5}, "magnitude")
    got = load_checkpoint(tmp_path / "b")
    for name, x in want.items():
        np.testing.assert_array_equal(got[name], x)
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == growth.config
    assert growth.config["hidden_size"] == CONFIG["hidden_size"] // 2
    assert "A network pruned from a larger one" in (tmp_path / "b" / "README.md").read_text()


@pytest.mark.slow
def test_whole_heads_of_llama_with_their_queries():
    """Back from HyperCloning by the configuration, and to one head of keys by reshapes."""
    c, p = models.GOLDEN["llama"]["config"], models.model("llama").params
    large, grown = grow(p, c, {"width": 2}, "hypercloning")
    sizes = {k: c[k] for k in c if grown.config.get(k) != c[k]}
    back, growth = grow(large, grown.config, sizes, "magnitude", require_lossless=True)
    assert growth.config == c
    for name, x in p.items():
        np.testing.assert_array_equal(back[name], x)
    small, growth = grow(p, c, {"num_attention_heads": 2, "num_key_value_heads": 1}, "magnitude")
    assert growth.config["num_attention_heads"] == 2
    layer = "model.layers.0.self_attn."
    q, k, v = (np.asarray(p[f"{layer}{n}_proj.weight"], np.float64) for n in "qkv")
    o = np.asarray(p[f"{layer}o_proj.weight"], np.float64)
    scores = [share(w.reshape(2, -1, w.shape[1]), 0) for w in (q, k, v)]
    kept = int(np.argmax(sum(scores) + share(o.reshape(len(o), 2, -1), 1)))
    np.testing.assert_array_equal(
        small[f"{layer}q_proj.weight"], q.reshape(2, -1, q.shape[1])[kept].astype(np.float32)
    )
