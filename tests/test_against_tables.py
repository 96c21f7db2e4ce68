"""How `.ci/against/tables.py` finds tables: entries that vary, and classes as one table.

One table has a body, a tied head, two heads of one name, or no head.
"""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sail_jax import spec_of
from sail_jax.architectures.files import Table
from sail_jax.basis.axes import parse_axes
from sail_jax.basis.spaces import Leaf, Space, Spec
from sail_jax.interop.settings import Network


def program(name):
    path = Path(__file__).parents[1] / ".ci" / "against" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


united = program("united").united
varied_table = program("variations").varied_table
TOKEN_IDS = np.array([[1, 4, 7, 2, 9]])

BODY = {"{m.,}embed": "vocab* resid", "{m.,}pooler": "pooled resid*"}
WORDS = {"resid": "layernorm", "pooled": "odd", "vocab": "outer"}
MAIN = Table(
    axes={"{m.,}embed": "vocab* resid", "lm_head": "vocab resid*"}, spaces=WORDS,
    tied={"{m.,}embed": "vocab* resid | vocab resid*"}, head=("lm_head",), optional=("lm_head",),
    settings=(("hidden_size", "resid"),),
)  # fmt: skip
POOLED = Table(axes=BODY | {"classifier": "_ pooled*"}, spaces=WORDS)
TOKENS = Table(axes={"{m.,}embed": "_ resid", "classifier": "_ resid*"}, spaces=WORDS)
BARE = Table(axes={"{m.,}embed": "_ _", "{m.,}pooler": "_ _"})


def test_one_table_for_all_classes():
    table = united(MAIN, {"APooled": POOLED, "ATokens": TOKENS}, [BARE])
    assert table.axes["{m.,}embed"] == "vocab* resid"
    assert table.axes["classifier"] == "_ pooled*"
    # One class uses the tensor of that name in another way; that its vocabulary has no name is no
    # other way.
    assert table.classes == {"ATokens": {"classifier": "_ resid*"}}
    assert {*table.optional} == {"lm_head", "{m.,}pooler", "classifier"}
    # Without a head the stream is handed out, unless something reads it, or what is pooled of it.
    assert table.ends == {"resid": ("lm_head", "classifier"), "pooled": ("classifier",)}
    assert table.implied


def test_a_class_without_a_head_hands_out_its_states():
    table = united(MAIN, {"APooled": POOLED}, [BARE])
    ends = {
        name: table.rules({"architectures": [name]}).ends
        for name in ("AModel", "AForCausalLM", "AForTokenClassification")
    }
    # The tied head of the second has no tensor that could show it.
    tied = table.rules({"architectures": ["AForCausalLM"], "tie_word_embeddings": True})
    assert tied.ends == {}
    assert dict(tied.axes)["{m.,}embed"] == "vocab* resid | vocab resid*"
    assert all(own["resid"] == ("lm_head", "classifier") for own in ends.values())


def test_what_another_head_restricts_is_of_its_class():
    summed = POOLED._replace(spaces=WORDS | {"resid": "layernorm softmax"})
    table = united(MAIN, {"ASummed": summed}, [BARE])
    assert table.spaces["resid"] == "layernorm"
    spaces = table.rules({"architectures": ["ASummed"]}).spaces
    assert spaces["resid"].split() == ["layernorm", "softmax"]


def test_sizes_are_those_of_the_main_class():
    """What another class seems to have as a number was not varied."""
    sizes = {"resid": "8", "pooled": "8"}
    table = united(MAIN, {"APooled": POOLED._replace(sizes=sizes)}, [BARE])
    assert table.sizes == {"pooled": "8"}
    main = MAIN._replace(sizes={"resid": "hidden_size"})
    table = united(main, {"APooled": POOLED._replace(sizes=sizes)}, [BARE])
    assert table.sizes == {"resid": "hidden_size", "pooled": "8"}


def test_a_size_that_only_an_optional_tensor_shows_is_stated():
    rules = {"q": "resid* (head unit)", "o": "(head* unit*) resid", "scale": "head"}

    def made(config):
        axes = rules if config["scaled"] else {k: rules[k] for k in ("q", "o")}
        sizes = {"resid": config["width"], "head": config["heads"], "unit": 3}
        spaces = tuple(Space(name, n, "linear") for name, n in sizes.items())
        found = Spec(tuple(Leaf(path, parse_axes(text)) for path, text in axes.items()), spaces)
        return Network(found, {leaf.path: found.shape(leaf.path) for leaf in found.leaves})

    config = {"width": 5, "heads": 2, "scaled": False}
    table = varied_table(config, made, vary=True, names=rules)
    assert table.optional == ("scale",)
    assert table.sizes == {"head": "heads", "unit": "3"}


def varied(config):
    """A network with a bias or none, a fused matrix or two, and one of several activations."""
    width, inner = config["width"], config["inner"]
    shapes = {"embed": (config["vocab_size"], width), "down": (inner, width)}
    if config["fused"]:
        shapes["up"] = (width, inner)
    else:
        shapes |= {"up": (width, 2 * inner)}
    if config["biased"]:
        shapes["bias"] = (inner,)
    shapes["out"] = (config["vocab_size"], width)
    act = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "tanh": jnp.tanh}[config["hidden_act"]]

    def apply(p, tokens):
        x = p["embed"][tokens] * config["width"] ** 0.5
        h = x @ p["up"]
        if not config["fused"]:
            h, gate = jnp.split(h, 2, -1)
            h = h * jax.nn.sigmoid(gate)
        h = act(h + p["bias"] if config["biased"] else h)
        return (x + h @ p["down"]) @ p["out"].T

    like = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    found = spec_of(apply, like, TOKEN_IDS)
    return Network(found.spec, shapes, found.multiples)


def test_entries_that_state_no_size_are_varied():
    config = {
        "width": 6, "inner": 10, "vocab_size": 11, "fused": True, "biased": False,
        "hidden_act": "relu",
    }  # fmt: skip
    table = varied_table(config, varied, vary=True)
    assert table.optional == ("bias",)  # a network with it has the axes of one without
    assert table.axes["bias"] == table.axes["up"].split()[1]
    assert table.holds == {"fused": (True,)}  # the other matrix has two parts
    hidden = table.axes["bias"]
    assert table.spaces[hidden] == "elementwise"
    assert table.words == {"hidden_act": {"relu": {hidden: "relu"}}}
    assert table.rules(config).spaces[hidden] == "relu"
    assert table.rules(config | {"hidden_act": "an activation that is new"}).spaces[hidden] == (
        "elementwise"
    )
    with pytest.raises(ValueError, match=r"'fused' is False, .* holds for True"):
        table.rules(config | {"fused": False})
    (scaled,) = table.scales.items()
    assert scaled == ("embed", (table.axes["embed"].split()[1], 0.5))


@pytest.mark.parametrize("tied", [False, True])
def test_entries_that_a_configuration_may_leave_out_have_defaults(tied):
    """A class without `inner` has four times the width, and ties its head or not by default."""
    rules = {
        "m.embed": "vocab* resid",
        "m.up": "resid* (part unit)",
        "m.down": "(part* unit*) resid",
    }

    def made(config):
        head = {} if config["tie_word_embeddings"] else {"head": "vocab resid*"}
        embed = "vocab* resid | vocab resid*" if config["tie_word_embeddings"] else "vocab* resid"
        axes = rules | {"m.embed": embed} | head
        sizes = {"resid": config["width"], "part": 2, "vocab": config["vocab_size"]}
        sizes["unit"] = config["inner"] // 2
        spaces = tuple(Space(name, n, "linear") for name, n in sizes.items())
        found = Spec(tuple(Leaf(path, parse_axes(text)) for path, text in axes.items()), spaces)
        return Network(found, {leaf.path: found.shape(leaf.path) for leaf in found.leaves})

    def resolve(config):
        return {
            "inner": 4 * config.get("width", 3),
            "tie_word_embeddings": tied,
            "width": 3,
        } | config

    config = {"width": 3, "inner": 12, "vocab_size": 5, "tie_word_embeddings": True}
    table = varied_table(config, made, prefixes=("m.",), resolve=resolve)
    assert {*table.axes} == {"{m.,}embed", "{m.,}up", "{m.,}down", "head"}
    assert table.ties is tied
    assert [*table.tied] == ["{m.,}embed"]
    assert [*table.sizes.values()] == ["2", "inner / 2 | 4 * width / 2"]
