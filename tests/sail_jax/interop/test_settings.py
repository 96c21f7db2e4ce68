"""Rules found by building networks of other sizes: a transformer whose table nobody has written."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sail_jax import growth, spec_of
from sail_jax.architectures.files import written
from sail_jax.basis.axes import parse_axes
from sail_jax.basis.spaces import Leaf, Space, Spec
from sail_jax.interop.settings import Network, probed, table_by_probing

CONFIG = {
    "num_layers": 3, "width": 8, "heads": 4, "kv_heads": 2, "inner": 12, "vocab_size": 11,
    "tie_word_embeddings": True, "kinds": ["full", "full", "full"], "pad_token_id": 1,
}  # fmt: skip
TOKENS = np.array([[1, 4, 7, 2, 9]])


def shapes(config):
    width, heads, kv = (config[k] for k in ("width", "heads", "kv_heads"))
    if width % heads or heads % kv:
        raise ValueError("heads must divide the width")
    head = width // heads
    out = {"embed": (config["vocab_size"], width), "norm": (width,)}
    for i in range(config["num_layers"]):
        out |= {
            f"blocks.{i}.norm": (width,),
            f"blocks.{i}.q": (width, width), f"blocks.{i}.k": (width, kv * head),
            f"blocks.{i}.v": (width, kv * head), f"blocks.{i}.o": (width, width),
            f"blocks.{i}.up": (width, config["inner"]),
            f"blocks.{i}.down": (config["inner"], width),
        }  # fmt: skip
    if not config["tie_word_embeddings"]:
        out["head"] = (config["vocab_size"], width)
    return out


def rms(x, gain):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain


def net(config):
    heads, kv = config["heads"], config["kv_heads"]

    def apply(p, tokens):
        x = p["embed"][tokens]
        b, t, _ = x.shape
        for i in range(config["num_layers"]):
            at = f"blocks.{i}."
            h = rms(x, p[at + "norm"])
            q = (h @ p[at + "q"]).reshape(b, t, kv, heads // kv, -1)
            k, v = ((h @ p[at + n]).reshape(b, t, kv, -1) for n in "kv")
            scores = jnp.einsum("btkgd,bskd->bkgts", q, k) / q.shape[-1] ** 0.5
            y = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores, -1), v)
            x = x + y.reshape(b, t, -1) @ p[at + "o"]
            x = x + jax.nn.gelu(x @ p[at + "up"]) @ p[at + "down"]
        return rms(x, p["norm"]) @ p["embed" if config["tie_word_embeddings"] else "head"].T

    return apply


def probe(config):
    like = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes(config).items()}
    return Network(spec_of(net(config), like, TOKENS).spec, shapes(config))


@pytest.mark.slow
def test_entries_and_layers_are_found():
    table = table_by_probing(CONFIG, probe)
    assert table.layers == {"num_layers": "blocks.{i}."}
    assert {*table.settings} == {
        ("width", "resid"),
        ("width", "head.{i} group.{i} qk.{i}"),
        ("width", "head.{i} group.{i} v.{i}"),
        ("inner", "hidden.{i}"),
        ("kv_heads", "head.{i}"),
        ("heads", "head.{i} group.{i}"),
        ("vocab_size", "vocab"),
    }
    assert table.sizes == {
        "head.{i}": "kv_heads",
        "group.{i}": "heads / kv_heads",
        "qk.{i}": "width / heads",
        "v.{i}": "width / heads",
    }
    assert table.axes["embed"] == "vocab* resid"
    assert table.tied["embed"] == "vocab* resid | vocab resid*"
    assert table.axes["head"] == "vocab resid*"
    assert table.axes["blocks.{i}.up"] == "resid* hidden.{i}"
    assert table.axes["blocks.{i}.o"] == "(head.{i}* group.{i}* v.{i}*) resid"
    assert table.optional == table.head == ("head",)


@pytest.mark.slow
def test_a_table_in_a_file_is_the_same():
    table = table_by_probing(CONFIG, probe)
    parts = json.loads(written(table))
    assert parts["axes"] == dict(table.axes)
    rules = table.rules(CONFIG)
    assert rules.sizes == {"head.{i}": 2, "group.{i}": 2, "qk.{i}": 2, "v.{i}": 2}


def test_sizes_in_proportion_to_entries_are_found():
    """A head has a rotary quarter; nothing but the entries shows how it is divided."""
    rules = {
        "qkv": "resid* (head (turn + rest + seven))",
        "up": "resid* hidden",
        "o": "five* resid",
    }

    def made(config):
        width, heads = config["width"], config["heads"]
        head = width // heads
        if width % heads or head % 4:
            raise ValueError("no such network")
        sizes = {"resid": width, "head": heads, "turn": head // 4, "rest": 3 * head // 4}
        sizes |= {"seven": 7, "hidden": 4 * width, "five": 5}
        spaces = tuple(Space(name, n, "") for name, n in sizes.items())
        found = Spec(tuple(Leaf(path, parse_axes(text)) for path, text in rules.items()), spaces)
        return Network(found, {leaf.path: found.shape(leaf.path) for leaf in found.leaves})

    table = probed({"width": 16, "heads": 2}, made, names=rules).table()
    assert table.rules({"width": 48, "heads": 3}).sizes == {
        "head": 3, "turn": 4, "rest": 12, "seven": 7, "hidden": 192,
    }  # fmt: skip
    with pytest.raises(ValueError, match="4 does not divide 10"):
        table.rules({"width": 10, "heads": 1})


def test_an_axis_without_a_space_is_resized_with_the_only_fixed_space_of_its_sizes():
    """Gains of a norm over a head, in which rotary positions fix the order of units."""
    rules = {"blocks.0.q": "resid* (head turn)", "blocks.0.norm": "_", "blocks.0.scale": "_"}

    def made(config):
        width, heads, size = (config[k] for k in ("width", "heads", "head_dim"))
        spaces = (Space("resid", width, ""), Space("head", heads, ""), Space("turn", size, "outer"))
        found = Spec(tuple(Leaf(path, parse_axes(text)) for path, text in rules.items()), spaces)
        shapes = {"blocks.0.q": (width, heads * size), "blocks.0.norm": (size,)}
        return Network(found, shapes | {"blocks.0.scale": (heads,)})

    table = probed({"width": 16, "heads": 2, "head_dim": 6}, made, names={}).table()
    name = next(name for name, word in table.spaces.items() if word == "outer")
    assert table.axes["blocks.0.norm"] == f"diag({name})"
    assert table.axes["blocks.0.scale"] == "_"
    # where only the width differs, an earlier table knows
    again = probed(
        {"width": 16, "heads": 2, "head_dim": 6}, made, only=["width"], names=table.axes
    ).table()
    assert again.axes == table.axes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "method"),
    [
        ({"width": 2}, "lemon"), ({"width": 2, "depth": 2}, "hypercloning"),
        ({"inner": 17}, "net2net"), ({"num_layers": 5}, "lemon"),
    ],
)  # fmt: skip
def test_what_was_found_grows_networks_that_compute_the_same(to, method):
    rng = np.random.default_rng(0)
    params = {
        k: jnp.asarray(rng.normal(size=s) * 0.3, jnp.float32) for k, s in shapes(CONFIG).items()
    }
    make = table_by_probing(CONFIG, probe).rules
    key = jax.random.key(0)
    new, grown = growth.grow(params, CONFIG, to, method, key=key, rules=make)
    assert {k: x.shape for k, x in new.items()} == shapes(grown.config)
    assert not grown.report.lost

    old, after = net(CONFIG)(params, TOKENS), net(grown.config)(new, TOKENS)
    np.testing.assert_allclose(after, old, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_layers_that_differ_are_refused():
    def other(config):
        found, sizes, _ = probe(config)
        if config["num_layers"] > 1:
            first = dict(sizes)
            found = spec_of(
                lambda p, x: net(config)(p, x) + p["blocks.1.up"].sum(),
                {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in first.items()},
                TOKENS,
            ).spec
        return Network(found, sizes)

    with pytest.raises(ValueError, match=r"the layers of 'blocks\.\{i\}"):
        table_by_probing(CONFIG, other)
