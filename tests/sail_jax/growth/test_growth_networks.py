"""Growth of whole networks: methods x architectures, checked by running both networks.

Exact growth is judged by `certificate`, whose tolerance is what a perturbation of every parameter
by its rounding does to the output, ten times; what is not exact must be seen to change it.
"""

import json
from functools import cache

import jax
import jax.numpy as jnp
import known_networks as models
import numpy as np
import olmo2
import pytest
from cells import chosen, one_of_every, soak_unless

from experiments.models.gpt import GPT
from experiments.models.mlp import MLP
from experiments.models.resnet import ResNet
from experiments.models.vit import ViT
from sail_jax import architectures
from sail_jax.architectures import Rules, draft
from sail_jax.architectures.table import look, put
from sail_jax.basis.certificate import certificate
from sail_jax.growth import METHODS, grow, plan
from sail_jax.trees import leaf_paths

FLAX = {
    "flax mlp": {"model_type": "flax_mlp", "widths": [6, 5]},
    "flax resnet": {"model_type": "flax_resnet", "widths": [4, 6], "blocks": 2},
    "flax gpt": {"model_type": "flax_gpt"},
    "flax gpt, tied": {"model_type": "flax_gpt", "tied": True},
    "flax vit": {"model_type": "flax_vit"},
}
NAMES = models.NAMES
POST_NORM = ["bert", "roberta"]
LIMIT = 10 * float(jnp.finfo(jnp.float32).eps) ** 0.5
TWICE = {"width": 2, "depth": 2}
KEY = jax.random.key(0)


def config(name):
    return FLAX.get(name) or (models.GOLDEN | models.HEADS)[name]["config"]


def module(c):
    sizes = {k: c[k] for k in ("width", "layers", "heads", "head_dim", "hidden") if k in c}
    return {
        "flax_mlp": lambda: MLP(c["widths"], outputs=3),
        "flax_resnet": lambda: ResNet(c["widths"], c["blocks"], outputs=3, inner=c["inner"]),
        "flax_gpt": lambda: GPT(vocab=17, context=8, tied=c.get("tied", False), **sizes),
        "flax_vit": lambda: ViT(outputs=3, patch=4, **sizes),
    }[c["model_type"]]()


@cache
def forward(name, told):
    c = json.loads(told)
    if name in FLAX:
        return jax.jit(module(c).apply)
    return jax.jit(lambda params, inputs: architectures.of(c).outputs(params, c, inputs))  # pyright: ignore[reportOptionalCall]


def certify(name, params, new, growth):
    m = models.model(name)

    def f(pair, inputs):
        growth, params = pair
        if growth is None:
            return models.run(name, m.spec, params)
        return forward(name, json.dumps(growth.config))(params, inputs)

    old = jax.tree.map(lambda x: x, (None, params))
    return certificate(f, old, (growth, new), m.inputs)


def check_exact(name, to, method, **options):
    params = models.model(name).params
    new, growth = grow(params, config(name), to, method, key=KEY, **options)
    assert not growth.report.lost, str(growth.report)
    seen = certify(name, params, new, growth)
    assert seen.preserved, seen
    assert seen.relative <= LIMIT
    check_shapes(name, new, growth)
    return new, growth


def check_shapes(name, new, growth):
    """Compares the shapes of the plan with those of a network made from the new configuration."""
    arrays = dict(zip(leaf_paths(new), jax.tree.leaves(new), strict=True))
    assert {p: (x.shape, x.dtype) for p, x in arrays.items()} == {
        p: (x.shape, x.dtype) for p, x in growth.leaves.items()
    }
    if name in FLAX:
        inputs = models.model(name).inputs
        made = jax.eval_shape(module(growth.config).init, KEY, inputs)
        assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, new)
    else:
        rules = architectures.of(growth.config).rules(growth.config)
        assert rules.resized(growth.config, rules.spec(new)) == growth.config


@pytest.mark.slow
def test_fewer_layers_are_means_of_neighbours():
    """Eq. (9) of SAIL on a listed network, and what the axes show of it."""
    params, c = models.model("gpt2").params, config("gpt2")
    new, growth = grow(params, c, {"depth": 0.5}, depth_method="mean_depth")
    old = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
    path = "h.{}.mlp.c_fc.weight"
    (name,) = (p for p in new if p.endswith(path.format(0)))
    both = [np.asarray(old[name.replace(path.format(0), path.format(k))]) for k in (0, 1)]
    np.testing.assert_allclose(new[name], np.mean(both, axis=0), rtol=1e-6)
    assert growth.config["n_layer"] == c["n_layer"] // 2 == 1
    assert "2 layers become 1" in growth.report.lost
    with pytest.raises(ValueError, match="give depth_method='mean_depth'"):
        plan(params, c, {"depth": 0.5})
    blocks = models.model("flax resnet").params
    with pytest.raises(
        ValueError, match="'blocks' is 2 and would be 1, but its first layer differs"
    ):
        plan(blocks, config("flax resnet"), {"blocks": 1}, depth_method="mean_depth")
    chain = models.model("flax mlp").params
    with pytest.raises(ValueError, match="unequal layers cannot be mixed"):
        plan(chain, config("flax mlp"), {"depth": 0.5})


@pytest.mark.slow
def test_masks_are_not_exact_where_a_norm_writes_into_the_stream():
    """Masked units are zero, so that the stream is mapped linearly: CLIP's first norm sees that."""
    growth = plan(models.model("clip").params, config("clip"), {"width": 2}, "msg", key=KEY)
    assert [s.space for s in growth.report.spaces if s.lost] == ["vision.resid"]


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of_every(2, NAMES))
def test_lemon_doubles_any_network(name):
    """Twice as wide and twice as deep; not deeper where norms follow the sums, and by
    identities where layers are a chain."""
    if name in POST_NORM:
        check_exact(name, {"width": 2}, "lemon")
        growth = plan(models.model(name).params, config(name), {"depth": 2}, "llama_pro")
        assert "norms follow the sums" in growth.report.spaces[-1].lost
        with pytest.raises(ValueError, match="lossless growth was asked for, but 'num_hidden_la"):
            plan(
                models.model(name).params,
                config(name),
                {"depth": 2},
                "llama_pro",
                require_lossless=True,
            )
        return
    options = {"depth_method": "identity"} if name == "flax mlp" else {}
    _, growth = check_exact(name, TWICE, "lemon", require_lossless=True, **options)
    tied = name in models.TIED
    assert any("was untied" in note for note in growth.notes) == tied
    assert not any(growth.config.get(k) for k in ("tie_word_embeddings", "tied"))


# The gather of GPT-2's second head is taken for a choice unit by unit: copies are refused there.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    one_of_every(
        2,
        [
            n
            for n in models.HEADS
            if n not in (*models.BASES, "GPT2DoubleHeadsModel", "GraniteMoeSharedForCausalLM")
        ],
    ),
)
def test_lemon_doubles_any_network_with_a_head(name):
    """All outputs that transformers gives the class are compared."""
    deep = not name.startswith(("Bert", "Roberta", "XLMRoberta"))
    check_exact(name, TWICE if deep else {"width": 2}, "lemon", require_lossless=True)


@pytest.mark.parametrize("name", chosen([*NAMES, *models.HEADS], *NAMES, "BertModel"))
def test_a_factor_of_width_leaves_inputs_and_outputs(name):
    m, c = models.model(name), config(name)
    if name.startswith("GraniteMoe"):  # the table does not let the stream of these mixtures grow
        with pytest.raises(ValueError, match="growth was asked for, but space 'qk"):
            plan(m.params, c, {"width": 2})
        return
    if name in models.BASES:
        with pytest.raises(ValueError, match="returns its stream"):
            plan(m.params, c, {"width": 2})
        return
    growth = plan(m.params, c, {"width": 2})
    grown = architectures.of(growth.config).rules(growth.config).spec(growth.leaves)
    kept = [s for s in m.spec.spaces if s.nonlinearity.split()[0] == "outer"]
    assert {s.name: s.size for s in kept} == {s.name: grown.space(s.name).size for s in kept}
    run = architectures.of(c).outputs
    if run is not None:
        shapes = jax.eval_shape(lambda params: run(params, c, m.inputs), m.params)
        wide = jax.eval_shape(lambda params: run(params, growth.config, m.inputs), growth.leaves)
        assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, wide)


@pytest.mark.parametrize(
    ("name", "to", "said"),
    [
        ("clip", {"projection_dim": 12}, {"shared": "projection_dim 6 to 12"}),
        ("CLIPVisionModelWithProjection", {"projection_dim": "2x"}, {"shared": "projection_dim 6"}),
        (
            "BertModel",
            {"hidden_size": 16, "num_attention_heads": 4},
            {"resid": "hidden_size 8 to 16", "pooled": "hidden_size 8 to 16"},
        ),
        ("ViTModel", {"pooler_output_size": 10}, {"pooled": "pooler_output_size 5 to 10"}),
    ],
)
def test_outputs_of_another_size(name, to, said):
    """This applies only if the target states it, and is then not exact, even if logits agree."""
    m, c = models.model(name), config(name)
    growth = plan(m.params, c, to)
    reasons = {row.space: row.lost for row in growth.report.spaces if row.lost}
    assert {*reasons} == {*said}
    assert all(f"outputs of another size: {said[k]}" in reason for k, reason in reasons.items())
    with pytest.raises(ValueError, match=r"asked for, but .*outputs of another size: "):
        plan(m.params, c, to, require_lossless=True)


@pytest.mark.slow
def test_cosines_agree_and_embeddings_do_not():
    """CLIP at another size of its embeddings is not preserved, although the logits stay."""
    m, c = models.model("clip"), config("clip")
    new, growth = grow(m.params, c, {"projection_dim": 12}, "lemon")
    run = architectures.forward.clip
    old, now = run(m.params, c, m.inputs), run(new, growth.config, m.inputs)
    logits = np.asarray(old["logits_per_image"])
    tolerance = LIMIT * np.abs(logits).max()
    np.testing.assert_allclose(now["logits_per_image"], logits, rtol=0, atol=tolerance)
    found = certificate(lambda p, _: run(p, c, m.inputs), m.params, new, None)
    assert (found.preserved, found.leaf, found.absolute) == (False, "image_embeds", np.inf)


LOSSLESS = {
    "hypercloning": ({"width": 2}, {"snr_db": 20.0}),
    "fpi": ({"width": 2}, {}),
    "msg": (TWICE, {}),
    "lemon": ({"width": 1.5}, {}),
    "llama_pro": ({"depth": 2}, {}),
    "identity": ({"depth": 2}, {}),
}
# each method once, on the smallest network
FAST = {*(("flax mlp", method) for method in ("hypercloning", "fpi", "lemon"))}
FAST |= {("llama", method) for method in ("msg", "llama_pro", "identity")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        soak_unless((name, method) in FAST, name, method)
        for name in NAMES
        for method in LOSSLESS
        if name not in POST_NORM or LOSSLESS[method][0] == {"width": 2}
        if name != "flax mlp" or "depth" not in LOSSLESS[method][0]
        if (name, method) != ("clip", "msg")
    ],
)
def test_lossless_methods(name, method):
    to, options = LOSSLESS[method]
    if to == {"width": 1.5} and name in ("clip", "flax mlp"):  # 3 heads, 5 units
        to = {"width": 2}
    assert METHODS[method].lossless
    new, _ = check_exact(name, to, method, **options)
    if method == "hypercloning":
        plain, _ = grow(models.model(name).params, config(name), to, method)
        moved = jax.tree.map(lambda a, b: np.any(np.asarray(a) != np.asarray(b)), new, plain)
        assert any(jax.tree.leaves(moved))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [name for name in METHODS if name == "net2net" or not METHODS[name].lossless],
)
def test_other_methods_say_that_they_are_not_exact(method):
    params, c = models.model("llama").params, config("llama")
    to = {"width": 2} if METHODS[method].widens else {"depth": 2}
    new, growth = grow(params, c, to, method, key=KEY)
    assert growth.report.lost
    check_shapes("llama", new, growth)
    assert not certify("llama", params, new, growth).preserved
    with pytest.raises(ValueError, match="lossless growth was asked for, but"):
        plan(params, c, to, method, key=KEY, require_lossless=True)


@pytest.mark.parametrize(
    ("name", "method", "options", "text"),
    [
        soak_unless(False, "llama", "net2net", {"noise": 0.1}, "noise of 0.1"),
        soak_unless(False, "llama", "msg", {"mask": 0.5}, "a mask of 0.5"),
        soak_unless(False, "llama, tied, stretched", "lemon", {"untie": False}, "untie the leaf"),
    ],
)
def test_options_that_cost_exactness(name, method, options, text):
    params = models.model(name).params
    new, growth = grow(params, config(name), {"width": 2}, method, key=KEY, **options)
    assert any(text in row.lost for row in growth.report.spaces)
    assert not certify(name, params, new, growth).preserved


# Heads.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "to", "method"),
    [
        soak_unless(False, "gpt2", {"n_embd": 16}, "hypercloning"),
        ("llama", {"head_dim": 8}, "hypercloning"),
        soak_unless(False, "gpt2", {"n_embd": 12}, "lemon"),
        soak_unless(False, "llama, tied, stretched", {"head_dim": 6}, "lemon"),
        soak_unless(False, "t5", {"d_kv": "2x"}, "lemon"),
        soak_unless(False, "flax gpt", {"head_dim": 6}, "lemon"),
    ],
)
def test_larger_heads(name, to, method):
    """Logits are divided by the root of the size; rotary pairs keep their frequencies."""
    check_exact(name, to, method, require_lossless=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "to", "text"),
    [
        ("llama", {"head_dim": 6}, "have other rotary frequencies than 4"),
        ("qwen3", {"head_dim": 8}, "norm 'model.layers.0.self_attn.[kq]_norm.weight' averages"),
    ],
)
def test_heads_that_cannot_be_larger(name, to, text):
    m = models.model(name)
    new, growth = grow(m.params, config(name), to, "lemon", key=KEY)
    assert growth.report.lost
    assert not certify(name, m.params, new, growth).preserved
    with pytest.raises(ValueError, match=f"lossless growth was asked for, but 'qk.0': .*{text}"):
        plan(m.params, config(name), to, "lemon", require_lossless=True)


@pytest.mark.slow
def test_queries_that_share_keys():
    c = config("llama")
    shapes = models.model("llama").params
    both = plan(shapes, c, {"width": 2}).config
    assert (both["num_attention_heads"], both["num_key_value_heads"]) == (8, 4)
    assert both["head_dim"] == 4
    _, growth = check_exact("llama", {"num_attention_heads": 8}, "lemon")
    assert growth.config["num_key_value_heads"] == 2
    with pytest.raises(ValueError, match=r"'group.0' .* has 2 units and would have 1"):
        plan(shapes, c, {"num_key_value_heads": 4})


# What a plan is.


@pytest.mark.slow
def test_a_leaf_needs_what_it_says():
    m, c = models.model("llama"), config("llama")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), m.params)
    growth = plan(shapes, c, TWICE, "aki", key=KEY)
    whole, _ = grow(m.params, c, TWICE, "aki", key=KEY)
    for path in growth.leaves:
        arrays = {name: m.params[name] for name in growth.needs(path)}
        np.testing.assert_array_equal(growth.leaf(path, arrays), whole[path])
    path = "model.layers.2.mlp.up_proj.weight"
    assert growth.needs(path) == tuple(f"model.layers.{k}.mlp.up_proj.weight" for k in (0, 1))
    with pytest.raises(ValueError, match=r"is computed from 'model.layers.0.*, which is missing"):
        growth.leaf(path, {})
    with pytest.raises(ValueError, match=r"no leaf 'model\.layers\.9"):
        growth.needs("model.layers.9.mlp.up_proj.weight")


@pytest.mark.parametrize(
    "method", [soak_unless(False, name) for name in ("lemon", "sail_svd", "aki")]
)
def test_jitted_or_not(method):
    m, c = models.model("gpt2"), config("gpt2")
    growth = plan(m.params, c, {"width": 1.5}, method, key=KEY)
    for path in ("transformer.h.1.attn.c_attn.weight", "transformer.h.1.ln_1.weight"):
        jitted = jax.jit(lambda arrays, path=path: growth.leaf(path, arrays))(m.params)
        with jax.disable_jit():
            eager = growth.leaf(path, m.params)
        # one matrix product over at most 32 terms, compiled in another order
        np.testing.assert_allclose(jitted, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_dtypes_stay():
    m = models.model("gpt2")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), m.params)
    new, growth = grow(half, config("gpt2"), {"width": 1.5, "depth": 2}, depth_method="mix")
    assert {x.dtype for x in new.values()} == {jnp.dtype(jnp.bfloat16)}
    check_shapes("gpt2", new, growth)


def test_epsilon_follows_the_variance():
    growth = plan(models.model("vit").params, config("vit"), {"width": 1.5})
    # 8 copies and 4 averages in 12 units: the variance is two thirds
    np.testing.assert_allclose(growth.config["layer_norm_eps"], 1e-12 * 2 / 3)
    assert any("layer_norm_eps times 0.666667" in note for note in growth.notes)
    assert plan(models.model("vit").params, config("vit"), {"width": 2}).notes == ()


@pytest.mark.slow
def test_targets():
    m, c = models.model("gpt2"), config("gpt2")
    whole = c | {"n_embd": 16, "n_head": 4, "n_layer": 3}
    growth = plan(m.params, c, whole)
    assert {k: growth.config[k] for k in ("n_embd", "n_head", "n_layer", "n_inner")} == {
        "n_embd": 16,
        "n_head": 4,
        "n_layer": 3,
        "n_inner": 64,
    }
    part = plan(m.params, c, {"n_embd": "2x", "n_head": "2x", "n_layer": 3, "n_inner": 64})
    assert part.config == growth.config
    assert part.leaves == growth.leaves
    clip = plan(
        models.model("clip").params, config("clip"), {"text_config": {"intermediate_size": 24}}
    )
    assert clip.config["text_config"]["intermediate_size"] == 24
    assert clip.config["vision_config"] == config("clip")["vision_config"]


# An architecture that no table knows, its layers stacked.

STACKED = Rules(
    (
        ("embed", "vocab* resid"),
        ("layers/scale", "layer diag(resid)"),
        ("layers/in", "layer resid* hidden"),
        ("layers/bias", "layer hidden"),
        ("layers/out", "layer hidden* resid"),
        ("scale", "diag(resid)"),
        ("head", "resid* logits"),
    ),
    {
        "vocab": "outer",
        "logits": "outer",
        "resid": "rmsnorm",
        "hidden": "elementwise",
        "layer": "stack",
    },
)


def stacked(params, tokens):
    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale

    def block(x, layer):
        y = jax.nn.gelu(norm(x, layer["scale"]) @ layer["in"] + layer["bias"])
        return x + y @ layer["out"], None

    x, _ = jax.lax.scan(block, params["embed"][tokens], params["layers"])
    return norm(x, params["scale"]) @ params["head"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "depth_method"),
    [
        soak_unless(False, {"width": 2, "depth": 2}, "llama_pro"),
        soak_unless(False, {"width": 2, "depth": 2}, "identity"),
        ({"resid": 7, "hidden": "2x", "layer": 5}, "pairs"),
        ({"resid": 7, "hidden": "2x", "layer": 5}, "stack"),
    ],
)
def test_stacked_layers_of_an_unknown_architecture(to, depth_method):
    shapes = {"scale": (3, 4), "in": (3, 4, 6), "bias": (3, 6), "out": (3, 6, 4)}
    shapes = {"embed": (5, 4), "layers": shapes, "scale": (4,), "head": (4, 5)}
    params = jax.tree.map(
        lambda shape: np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    tokens = np.arange(5)
    new, growth = grow(params, {}, to, "lemon", key=KEY, rules=STACKED, depth_method=depth_method)
    assert new["layers"]["in"].shape == ((6, 8, 12) if "depth" in to else (5, 7, 12))
    seen = certificate(jax.jit(stacked), params, new, tokens)
    assert seen.preserved == (not growth.report.lost) == (depth_method != "stack"), seen


# A spec without any information that growth could use.

OLMO2 = Rules(
    (
        ("model.embed_tokens.weight", "vocab* resid"),
        ("model.layers.{i}.self_attn.q_proj.weight", "(head.{i} group.{i} qk.{i}) resid*"),
        ("model.layers.{i}.self_attn.k_proj.weight", "(head.{i} qk.{i}*) resid*"),
        ("model.layers.{i}.self_attn.v_proj.weight", "(head.{i} v.{i}) resid*"),
        ("model.layers.{i}.self_attn.o_proj.weight", "resid (head.{i} group.{i} v.{i})*"),
        ("model.layers.{i}.self_attn.{q,k}_norm.weight", "_"),
        ("model.layers.{i}.mlp.{gate,up}_proj.weight", "hidden.{i} resid*"),
        ("model.layers.{i}.mlp.down_proj.weight", "resid hidden.{i}*"),
        ("model.layers.{i}.post_{attention,feedforward}_layernorm.weight", "diag(resid)"),
        ("model.norm.weight", "diag(resid)"),
        ("lm_head.weight", "vocab resid*"),
    ),
    {
        **dict.fromkeys(("vocab", "head.{i}", "group.{i}", "qk.{i}", "v.{i}"), "outer"),
        "resid": "rmsnorm",
        "hidden.{i}": "elementwise",
    },
    {"head.{i}": 2, "group.{i}": 2, "qk.{i}": 4, "v.{i}": 4},
    layers={"num_hidden_layers": "model.layers.{i}."},
)
OLMO2_OUTER = OLMO2._replace(spaces=OLMO2.spaces | {"resid": "outer"})


def unpaired(new):
    """The leaves of the new layers 1 and 3 that are no copies of what stood before them."""
    names = [name.removeprefix("model.layers.0.") for name in new if "layers.0." in name]
    at = lambda k, name: np.asarray(new[f"model.layers.{k}.{name}"])  # noqa: E731
    return {name for name in names if not np.array_equal(at(1, name), at(0, name))} | {
        name for name in names if not np.array_equal(at(3, name), at(2, name))
    }


@pytest.mark.parametrize("depth_method", [name for name in METHODS if METHODS[name].layers])
def test_depth_leaves_outer_spaces_alone(depth_method):
    """No method of depth maps a space within a layer that the spec calls outer."""
    growth = plan(olmo2.tensors(), olmo2.CONFIG, {"depth": 2}, depth_method, key=KEY, rules=OLMO2)
    outer = {s.name for s in growth.spec.spaces if s.nonlinearity == "outer"}
    assert {"head.1", "group.1", "qk.1", "v.1"} <= outer
    assert not outer & set(growth.maps)


@pytest.mark.slow
def test_fresh_layers_copy_what_is_in_no_space():
    """Gains of zero would leave queries and keys at zero for good: each is the other's gradient."""
    new, growth = grow(
        olmo2.tensors(), olmo2.CONFIG, {"depth": 2}, "identity", key=KEY, rules=OLMO2
    )
    for name in ("q_norm", "k_norm"):
        top = f"model.layers.3.self_attn.{name}.weight"
        np.testing.assert_array_equal(new[top], new[top.replace("3", "1")])
    assert not np.any(new["model.layers.3.self_attn.o_proj.weight"])
    change = olmo2.logits(new, growth.config) - olmo2.logits(olmo2.tensors(), olmo2.CONFIG)
    assert not np.any(change)


@pytest.mark.slow
@pytest.mark.parametrize("rules", [OLMO2, OLMO2_OUTER])
def test_what_reads_outer_spaces_is_zero_in_new_layers(rules):
    params = olmo2.tensors()
    new, growth = grow(params, olmo2.CONFIG, {"depth": 2}, "pairs", rules=rules)
    stated = rules.spaces["resid"] == "rmsnorm"
    paired = {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    zero = {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
    assert unpaired(new) == (zero | paired if stated else zero)
    assert not np.any(new["model.layers.1.self_attn.o_proj.weight"])
    assert bool(np.any(new["model.layers.1.mlp.down_proj.weight"])) == stated
    (note,) = growth.notes
    assert "self_attn.o_proj.weight' and 1 more are zero" in note or "and 3 more are zero" in note
    change = olmo2.logits(new, growth.config) - olmo2.logits(params, olmo2.CONFIG)
    # In float64 pairs cancel to rounding, which the norm after them multiplies by up to
    # eps^-1/2 = 10^3. A norm of zeros is zero.
    assert np.abs(change).max() <= (10 * np.finfo(float).eps ** 0.5 if stated else 0)


def test_layers_whose_heads_are_not_known_do_nothing_when_they_are_new():
    """Without the number of heads the output projection reads units of no space."""
    params = {
        n: x
        for n, x in olmo2.tensors().items()
        if not n.endswith(("q_norm.weight", "k_norm.weight"))
    }
    rules = draft(params).rules
    rules = rules._replace(spaces={**rules.spaces, "resid": "rmsnorm"})  # as a user would state
    assert dict(rules.axes)["model.layers.{i}.self_attn.o_proj.weight"] == "resid _"
    new = grow(params, {"num_layers": 2}, {"num_layers": 3}, "pairs", rules=rules)[0]
    assert not np.any(new["model.layers.2.self_attn.o_proj.weight"])
    assert np.any(new["model.layers.2.self_attn.v_proj.weight"])


@pytest.mark.parametrize("name", ["v", "group"])
def test_outer_units_within_a_head_are_not_taken_for_rotary_pairs(name):
    """Only queries and keys are rotated; growth has no rule for others."""
    settings = (("head_dim", f"{name}.{{i}}"),)
    c = olmo2.CONFIG | {"head_dim": OLMO2.sizes[f"{name}.{{i}}"]}
    rules = OLMO2._replace(settings=settings)
    growth = plan(olmo2.tensors(), c, {"head_dim": "2x"}, rules=rules)
    assert all("units that it distinguishes" in row.lost for row in growth.report.spaces)
    assert [row.space for row in growth.report.spaces] == [f"{name}.0", f"{name}.1"]


@pytest.mark.parametrize(("word", "lost"), [("relu", ""), ("odd", "(odd)"), ("", "(not stated)")])
def test_identity_layers_of_a_chain_need_a_nonlinearity_that_may_be_repeated(word, lost):
    """max(0, max(0, x)) is max(0, x), but tanh(tanh(x)) is not tanh(x)."""
    c = {"model_type": "mlp", "inputs": 3, "widths": [4]}
    net = {"layers.0.kernel": jnp.ones((3, 4)), "layers.0.bias": jnp.ones(4)}
    net |= {"out.kernel": jnp.ones((4, 2)), "out.bias": jnp.ones(2)}

    def rules(config):
        known = architectures.of(c).rules(config)
        hidden = {k: word if v == "relu" else v for k, v in known.spaces.items()}
        return known._replace(spaces={k: v for k, v in hidden.items() if v})

    growth = plan(net, c, {"depth": 2}, "identity", key=KEY, rules=rules)
    assert lost in growth.report.lost
    assert bool(growth.report.lost) == bool(lost)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["BertModel", "BertForMaskedLM"])
def test_norms_after_the_sums_are_seen_without_a_head_too(kind):
    """The stream of a BERT without a head is its output, and "outer" in the spec (MiniLM)."""
    c = config("bert") | {"architectures": [kind]}
    params = models.model("bert").params
    if kind == "BertModel":
        params = {name: x for name, x in params.items() if not name.startswith("cls.")}
    growth = plan(params, c, {"depth": 2}, "pairs")
    assert "norms follow the sums" in growth.report.lost


# Bad input.


@pytest.mark.parametrize(
    ("name", "to", "method", "options", "text"),
    [
        ("llama", {"hidden_size": 4}, "lemon", {}, r"'resid' .* has 8 units and would have 4"),
        ("llama", {"num_hidden_layers": 1}, "lemon", {}, r"'num_hidden_layers' is 2 and would"),
        ("llama", {"hiden_size": 16}, "lemon", {}, r"no entry 'hiden_size'.*nearest: 'hidden_size"),
        ("llama", {"width": 2}, "lemn", {}, r"no growth method 'lemn' \(nearest: 'lemon'"),
        ("llama", {"depth": 2}, "lemon", {"depth_method": "fpi"}, "'fpi' does not deepen"),
        ("llama", {"depth": 2}, "dus", {"depth_method": "stack"}, "two depth methods"),
        ("llama", {"width": 2}, "lemon", {"nois": 1}, "no option 'nois'"),
        (
            "llama",
            {"width": 2},
            "stack",
            {},
            "'stack' only deepens, but 'head.0' goes",
        ),
        ("llama", {"width": 1.5}, "hypercloning", {}, "integer factors, but space 'head.0'"),
        ("llama", {"depth": 1.5}, "g_stack", {}, "3 layers are not a multiple of 2"),
        (
            "llama",
            {"depth": 3},
            "dus",
            {},
            "an even number from 2 to 4, not to 6",
        ),
        ("llama", {"depth": 2}, "mix", {"logits": [[1.0]]}, r"logits must have shape \(4, 2\)"),
        ("llama", {"width": 2}, "msg", {"key": None}, "draws numbers: give key"),
        ("llama", {"width": 2}, "net2net", {"key": None, "noise": 0.1}, "draws numbers: give key"),
        ("llama", {}, "lemon", {}, "to is empty"),
        (
            "llama",
            {"width": 0},
            "lemon",
            {},
            "the factor of num_key_value_heads must be a positive number, got 0",
        ),
        ("llama", {"hidden_size": "ax"}, "lemon", {}, "hidden_size must be a number or a factor"),
        ("llama", {"hidden_size": 9.5}, "lemon", {}, r"a whole number below 16777216, got 9.5"),
        ("llama", {"hidden_size": 10**9}, "lemon", {}, r"whole number below 16777216, got 10{9}"),
        ("llama", {"hidden_size": None}, "lemon", {}, "'hidden_size' without a value"),
        ("llama", {"width": 2}, "lemon", {"key": 3}, "key: expected one PRNG key"),
        ("llama", {"rms_norm_eps": 1e-3}, "lemon", {}, "growth keeps 'rms_norm_eps': it is 1e-06"),
        ("llama", {"tie_word_embeddings": True}, "lemon", {}, "network's tables are not tied"),
        ("llama", {"vocab_size": 20}, "lemon", {}, "'vocab' is the network's input or output"),
        ("llama", {"model_type": "gpt2"}, "lemon", {}, "it is 'llama', to is 'gpt2'"),
        ("llama", config("llama") | {"num_hidden_layers": [1, 2]}, "lemon", {}, "is 2, not a list"),
        ("gpt2", {"n_head": 3}, "lemon", {}, "'n_head' must divide 'n_embd': 3 does not divide 8"),
        ("gpt2", {"width": 1.25}, "lemon", {}, "1.25 times n_head = 2 is 2.5, not a whole number"),
        ("gpt2", {"n_embd": 16, "n_head": 4, "n_inner": 16}, "lemon", {}, r"'hidden.0' .* would"),
        ("bert", {"width": 1.5}, "lemon", {"require_lossless": True}, "'resid': its nonlinearity"),
        ("flax mlp", {"depth": 2}, "stack", {}, "layers of 'widths' are unequal"),
        ("flax mlp", {"width": 2}, "aki", {}, r"'params/hidden_0/bias', .*_1/bias' is"),
        ("flax gpt", {"width": 64}, "lemon", {}, "width=64 alone or with depth is a factor"),
    ],
)
def test_bad_input(name, to, method, options, text):
    with pytest.raises((ValueError, TypeError), match=text):
        plan(models.model(name).params, config(name), to, method, **({"key": KEY} | options))


def _stated(name):
    """Entries of a configuration that tensors settle, each of them whole numbers."""
    c, m = config(name), models.model(name)
    settled = {key for key, _ in m.rules.settings if look(c, key) is not None}
    cleared = c
    for key in settled:
        cleared = put(cleared, key, None)
    found = m.rules.resized(cleared, m.spec)
    keys = [key for key in sorted(settled) if look(found, key) is not None]
    return [key for key in [*keys, *m.rules.layers] if isinstance(look(c, key), int)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [soak_unless(name in ("gpt2", "clip", "flax mlp"), name) for name in NAMES]
)
def test_configurations_that_tensors_contradict(name):
    params, c = models.model(name).params, config(name)
    plan(params, c, TWICE, key=KEY)
    for key in _stated(name):
        last = key.rpartition(".")[2]
        # how many heads there are is not seen in shapes: another divisor is believed
        larger = [look(c, key) + 1] * ("heads" not in key)
        for wrong in (*larger, 0, -1, "x", 1.5, True, [], {}):
            with pytest.raises((ValueError, TypeError), match=f"{last}|divide|units|matches no"):
                plan(params, put(c, key, wrong), TWICE, key=KEY)


def test_entries_of_layers_follow_the_layers_of_a_deeper_network():
    params, c = models.model("llama").params, config("llama")
    n = c["num_hidden_layers"]
    lists = {"no_rope_layers": [0] * (n - 1) + [1], "mlp_only_layers": [n - 1]}
    made = plan(params, c | lists, {"depth": 2}, "stack", key=KEY).config
    assert made["no_rope_layers"] == 2 * lists["no_rope_layers"]
    assert made["mlp_only_layers"] == [n - 1, 2 * n - 1]
    with pytest.raises(ValueError, match=r"cannot state .*: 'first_k_dense_replace' 1"):
        plan(params, c | {"first_k_dense_replace": 1}, {"depth": 2}, "stack")


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("llama", {"hidden_act": "gelu"}, "growth keeps 'hidden_act': it is 'silu', to states"),
        ("llama", {"rope_scaling": {"factor": 2.0}}, "'rope_scaling.factor': it is None"),
        ("llama", {"max_position_embeddings": 64}, "growth keeps 'max_position_embeddings'"),
        ("llama", {"architectures": ["LlamaModel"]}, "growth keeps 'architectures'"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "growth keeps the kinds of layers"),
        ("clip", {"vision_config.hidden_act": "relu"}, "growth keeps 'vision_config.hidden_act'"),
        ("clip", {"text_config.layer_norm_eps": 0.1}, "growth keeps 'text_config.layer_norm_eps'"),
        ("bert", {"max_position_embeddings": 99}, "'position' is the network's input"),
        ("bert", {"hidden_dropout_prob": 0.5, "initializer_range": 1.0}, None),
        ("llama", {"eos_token_id": 3, "use_cache": False, "dtype": "bfloat16"}, None),
        ("qwen3", {"layer_types": None}, None),
        ("flax mlp", {"widths": [12, 10]}, None),
        ("flax resnet", {"widths": [8, 6]}, None),
    ],
)
def test_whole_targets_of_another_function(name, changes, text):
    params, c = models.model(name).params, config(name)
    to = c
    for key, value in changes.items():
        to = put(to, key, value)
    if text is None:
        made = plan(params, c, to, key=KEY).config
        assert made.get("layer_types") == c.get("layer_types")
        return
    with pytest.raises(ValueError, match=text):
        plan(params, c, to, key=KEY)


def test_heads_decide_what_a_network_hands_out():
    """A base model and one with a head differ in their tensors, whatever the config says."""
    for name, head in (("bert", "cls."), ("vit", "classifier.")):
        c = {k: v for k, v in config(name).items() if k != "architectures"}
        params = models.model(name).params
        bare = {k: v for k, v in params.items() if not k.startswith(head)}
        plan(params, c, {"width": 2})
        with pytest.raises(ValueError, match="base model returns its stream 'resid'"):
            plan(bare, c, {"width": 2})


def test_token_classification_reads_the_stream():
    c = config("bert") | {"architectures": ["BertForTokenClassification"]}
    kept = {k: v for k, v in models.model("bert").params.items() if not k.startswith("cls.")}
    head = {"classifier.weight": np.ones((3, 8)), "classifier.bias": np.zeros(3)}
    growth = plan(kept | head, c, {"width": 2})
    assert growth.leaves["classifier.weight"].shape == (3, 16)
    assert growth.spec.axes("classifier.weight")[1][0].space == "resid"


def test_narrow_floats_are_refused():
    params = jax.tree.map(lambda x: x.astype("float8_e4m3fn"), models.model("llama").params)
    with pytest.raises(ValueError, match=r"'lm_head.weight' is float8_e4m3fn, which has no arith"):
        plan(params, config("llama"), TWICE)


def test_bad_checkpoints():
    params, c = models.model("llama").params, config("llama")
    lost = {k: v for k, v in params.items() if k != "model.layers.1.mlp.down_proj.weight"}
    with pytest.raises(ValueError, match=r"but 'model.layers.1.mlp.down_proj.weight' is missing"):
        plan(lost, c, TWICE)
    lost = {k: v for k, v in params.items() if k != "model.layers.1.input_layernorm.weight"}
    with pytest.raises(ValueError, match=r"but 'model.layers.1.input_layernorm.weight' is missing"):
        plan(lost, c, {"depth": 2}, "mix")
    with pytest.raises(TypeError, match="factors of width and depth, got int"):
        plan(params, c, 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="rules must be Rules or make them, got int"):
        plan(params, c, TWICE, rules=3)
    base = {k.removeprefix("transformer."): v for k, v in models.model("gpt2").params.items()}
    with pytest.raises(ValueError, match="base model returns its stream 'resid'"):
        plan(base, config("gpt2") | {"architectures": ["GPT2Model"]}, {"width": 2})


def test_layers_are_those_that_are_there():
    """A number in a name is not a count of layers, regardless of its size."""
    m, c = models.model("gpt2"), config("gpt2")
    shapes = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in m.params.items()}
    last = [path for path in shapes if ".h.1." in path]
    far = {path.replace(".h.1.", ".h.99999999."): shapes[path] for path in last}
    with pytest.raises(ValueError, match=r"h\.99999999\..*but no layer 2"):
        plan(shapes | far, c, {"width": 2}, key=KEY)
    gap = {path: x for path, x in shapes.items() if path not in last} | far
    with pytest.raises(ValueError, match="but no layer 1"):
        plan(gap, c, {"width": 2}, key=KEY)
    for number in ("9" * 5000, "\u00b2"):  # no numbers of layers: Python refuses to read them
        odd = {path.replace(".h.1.", f".h.{number}."): x for path, x in shapes.items()}
        with pytest.raises(ValueError, match="states 'n_layer': 2, but the tensors 1"):
            plan(odd, c, {"width": 2}, key=KEY)


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("gpt2", {"depth": 100_000}),
        ("gpt2", {"n_layer": 100_000}),
        ("flax mlp", {"depth": 100_000}),
        ("flax mlp", {"widths": 100_000}),
        ("flax mlp", {"widths": [5] * 100_000}),
    ],
)
def test_depth_has_a_limit(name, to):
    with pytest.raises(ValueError, match="at most 1024 layers"):
        plan(models.model(name).params, config(name), to, key=KEY)


ODD = (
    2**31,
    10**400,
    -1,
    0,
    1.3,
    float("nan"),
    float("inf"),
    "",
    "x",
    "nanx",
    "1e999x",
    True,
    [],
    {},
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "flax mlp"])
def test_odd_targets_are_refused_in_a_sentence(name):
    """Only a ValueError or a TypeError is raised, with a message that contains the entry."""
    m, c = models.model(name), config(name)
    entry = "n_embd" if name == "gpt2" else "widths"
    layers = "n_layer" if name == "gpt2" else "widths"
    for value in ODD:
        for key in ("width", "depth", entry):
            names = layers if key == "depth" else f"{entry}|n_inner|'qk.0'"
            with pytest.raises(ValueError, match=names) as refused:
                plan(m.params, c, {key: value}, key=KEY)
            assert len(str(refused.value)) < 200
    for to in (5, None, [1], b"x", {5: 5}):
        with pytest.raises(TypeError, match=r"to must be|of to are named"):
            plan(m.params, c, to, key=KEY)


@pytest.mark.parametrize(
    "value", ["9" * 400, [1e-5], {}, True, -1e-5, float("nan"), 10**400], ids=range(7)
)
def test_an_epsilon_is_a_number(value):
    m, c = models.model("gpt2"), config("gpt2")
    with pytest.raises(ValueError, match="'layer_norm_epsilon' must be a finite number") as refused:
        plan(m.params, c | {"layer_norm_epsilon": value}, {"width": 1.5}, key=KEY)
    assert len(str(refused.value)) < 200
