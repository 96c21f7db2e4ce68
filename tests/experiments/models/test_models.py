"""Networks of the papers: sizes of presets, laws of each family, checkpoints of Hugging Face.

Logits are compared with other implementations in float32: some ten layers on either side, each a
few roundings of the largest value, so within 64 of them.
"""

import json
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import chosen, soak, soak_unless
from known_networks import EPS, GOLDEN, TOKENS, weights

from experiments.models.attention import attend
from experiments.models.gpt import GPT
from experiments.models.llama import Llama, rotary
from experiments.models.presets import MODULES, PRESETS, build, config, describe
from experiments.models.pretrained import convert, load_pretrained, module_of
from experiments.models.resnet import ResNet
from experiments.models.sit import SiT, sine_positions
from sail_jax import architectures, growth
from sail_jax.basis.certificate import certificate, exactness
from sail_jax.basis.change_basis import change_basis
from sail_jax.checkpoint import save_checkpoint
from sail_jax.growth import grow
from sail_jax.probe import networks
from sail_jax.trees import leaf_paths

KEY = jax.random.key(0)
WORDS = TOKENS.astype(np.int32)


def same(a, b):
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(a, b, 0, 64 * EPS * np.abs(b).max())


@cache
def jitted(module):
    return jax.jit(module.apply)


def run(module: Any):
    return jitted(module)


# Presets.

INPUTS = {
    "flax_resnet": jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32),
    "flax_gpt": jax.ShapeDtypeStruct((1, 4), jnp.int32),
    "flax_llama": jax.ShapeDtypeStruct((1, 4), jnp.int32),
}


def shapes(c):
    inputs = INPUTS.get(c["model_type"])
    if c["model_type"] == "flax_sit":
        side = (1, c["side"], c["side"], c["channels"])
        inputs = tuple(
            jax.ShapeDtypeStruct(s, d)
            for s, d in ((side, jnp.float32), ((1,), jnp.float32), ((1,), jnp.int32))
        )
    return jax.eval_shape(build(c).init, KEY, *(inputs if isinstance(inputs, tuple) else (inputs,)))


@cache
def preset_shapes(name):
    return shapes(config(name))


def size(tree):
    return sum(x.size for x in jax.tree.leaves(tree))


def of_llama(c):
    w, n = c["width"], c["layers"]
    block = 4 * w * w + 3 * w * c["hidden"] + 2 * w
    return c["vocab"] * w + n * block + w


PUBLISHED = {
    # table 3 of overtrained, by hand: embeddings, 3 (4 w^2 + 3 w h + 2 w), w
    "olmo-15m": 50304 * 192 + 3 * (4 * 192**2 + 3 * 192 * 768 + 2 * 192) + 192,
    "olmo-30m": of_llama(PRESETS["olmo-30m"]),
    "olmo-90m": of_llama(PRESETS["olmo-90m"]),
    # GPT-2 small as released
    "gpt2-small": 124_439_808,
    # by hand; Ma et al. 2024 say 130M
    "sit-b/2": 12 * (18 * 768**2 + 15 * 768)
    + (16 * 768 + 768 + 256 * 768)
    + (256 * 768 + 768 + 768**2 + 768 + 1001 * 768)
    + (2 * 768**2 + 2 * 768 + 768 * 16 + 16),
    # He et al. 2016 as torchvision has them, for 1000 classes
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    # for 10 classes, with a stem of 3 x 3 in place of 7 x 7
    "resnet18-modified": 11_689_512 - 990 * 513 - 40 * 3 * 64,
    "resnet34-modified": 21_797_672 - 990 * 513 - 40 * 3 * 64,
    # nanoGPT's formula: 12 w^2 + 13 w per block with biases
    "nanogpt-6x384": (50257 + 256) * 384 + 6 * (12 * 384**2 + 13 * 384) + 2 * 384,
}


@pytest.mark.parametrize("name", chosen(PUBLISHED, "olmo-15m"))
def test_presets_have_the_published_number_of_parameters(name):
    assert size(preset_shapes(name)["params"]) == PUBLISHED[name]


def test_the_paper_of_overtraining_has_these_shapes():
    table = [
        tuple(config(n)[k] for k in ("layers", "heads", "width", "hidden", "vocab", "context"))
        for n in ("olmo-15m", "olmo-30m", "olmo-90m")
    ]
    assert table == [
        (3, 3, 192, 768, 50304, 1024),
        (6, 6, 384, 1536, 50304, 1024),
        (9, 9, 576, 2304, 50304, 1024),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_tables(name):
    """Every parameter is in the table, whose sizes are those of the configuration."""
    c = config(name)
    assert build(describe(build(c))) == build(c)
    params = preset_shapes(name)
    rules = architectures.of(c).rules(c)
    spec = rules.spec(params)
    assert len(spec.leaves) == len(leaf_paths(params))
    known = {k: v for k, v in rules.resized(c, spec).items() if k in c}
    assert known == c


def test_bad_names_and_fields():
    with pytest.raises(ValueError, match="no preset 'gpt2-smal'"):
        config("gpt2-smal")
    with pytest.raises(ValueError, match=r"'model_type' must be one of flax_gpt.*got 'gpt2'"):
        build({"model_type": "gpt2"})
    with pytest.raises(ValueError, match="flax_gpt has no field 'widht'"):
        build(config("gpt-tiny") | {"widht": 3})
    assert set(INPUTS) <= set(MODULES)


# Decoders.

SIZES = ("width", "head_dim", "hidden")
SMALL: dict[str, Any] = {
    "vocab": 17,
    "context": 8,
    "width": 8,
    "layers": 2,
    "head_dim": 4,
    "hidden": 12,
}
DECODERS = {
    "gpt": GPT(**SMALL, heads=2),
    "gpt, tied": GPT(**SMALL, heads=2, tied=True),
    "llama": Llama(**SMALL, heads=4, kv_heads=2),
    "llama, tied": Llama(**SMALL, heads=4, kv_heads=2, tied=True),
    "olmo": Llama(**SMALL, heads=2, norm="layernorm"),
}
SLOW = ("gpt, tied", "llama, tied")  # what they add is a read-out, which the checkpoints test too


decoders = pytest.mark.parametrize("name", [soak_unless(n not in SLOW, n) for n in DECODERS])


@cache
def variables(name):
    return drawn(DECODERS[name], WORDS)


def drawn(module, *inputs):
    """Variables without initial zeros and ones, which would hide mistakes."""
    like = jax.eval_shape(module.init, KEY, *inputs)
    random = np.random.default_rng(0)

    def draw(path, x):
        noise = random.standard_normal(x.shape) * (0.3 if x.ndim > 1 else 0.2)
        positive = path[-1].key in ("scale", "var")
        return np.asarray(np.abs(1 + noise) if positive else noise, x.dtype)

    return jax.tree.map_with_path(draw, like)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt", "olmo", *soak(*SLOW)])
def test_no_token_sees_what_follows(name):
    apply = run(DECODERS[name])
    told = apply(variables(name), WORDS)
    changed = apply(variables(name), np.c_[TOKENS[:, :5], (TOKENS[:, 5:] + 1) % 17])
    np.testing.assert_array_equal(told[:, :5], changed[:, :5])
    assert (np.abs(told[:, 5:] - changed[:, 5:]).max(-1) > 1e-3).all()
    moved = apply(variables(name), np.c_[(TOKENS[:, :1] + 1) % 17, TOKENS[:, 1:]])
    told, changed, moved = map(np.asarray, (told, changed, moved))
    assert (np.abs(told - moved).max(-1) > 1e-4).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_sequences_may_be_short_but_not_long(name):
    module = DECODERS[name]
    f = run(module)
    same(np.asarray(f(variables(name), WORDS))[:, :3], f(variables(name), WORDS[:, :3]))
    with pytest.raises(ValueError, match="a sequence of 9, but the network has positions for 8"):
        module.apply(variables(name), jnp.zeros((1, 9), int))


@pytest.mark.slow
@decoders
def test_features_of_every_block_are_shown(name):
    network = networks.flax_network(DECODERS[name].apply)
    found = jax.jit(lambda v: networks.features(network, v, WORDS))(variables(name))
    assert {"block_0", "block_1", "token_embed", "output"} <= set(found)
    assert found["block_0"].shape == (2, 8, 8)
    if name in ("llama", "olmo"):
        assert found["block_1/hidden"].shape == (2, 8, 12)
    # no layers of dropout, so that layers have the same names in training and evaluation
    assert not any("Dropout" in layer for layer in found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GPT, Llama])
def test_dropout_is_of_training_alone(kind):
    made = kind(**SMALL | {"layers": 1, "heads": 2, "dropout": 0.5})
    v = drawn(made, WORDS)
    train = jax.jit(lambda v, key: made.apply(v, WORDS, True, rngs={"dropout": key}))
    one, again, other = (train(v, jax.random.key(k)) for k in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert np.abs(np.asarray(one) - np.asarray(other)).max() > 1e-3
    # evaluation requires no key, and equals a module without dropout
    plain = made.clone(dropout=0.0)
    forms = [jax.make_jaxpr(m.apply)(v, WORDS) for m in (made, plain)]
    assert str(forms[0]) == str(forms[1])


def test_attention_with_and_without_forming_the_probabilities():
    random = np.random.default_rng(0)
    q, k, v = (np.float32(random.normal(size=(2, 5, n, 4))) for n in (4, 2, 2))
    for causal in (False, True):
        fused, formed = (
            jax.jit(partial(attend, causal=causal, **more))(q, k, v)
            for more in ({}, {"drop": lambda x: x})
        )
        same(fused, formed)


def test_rotary_logits_depend_on_the_distance_alone():
    q, k = np.float32(np.random.default_rng(1).normal(size=(2, 1, 1, 1, 6)))
    turned = jax.jit(lambda x, start: rotary(x, 100.0, start))

    def logit(i, j):
        return float(np.sum(np.asarray(turned(q, i)) * np.asarray(turned(k, j))))

    # angles below 20, so that rounding turns a unit by at most 20 eps, in six terms
    limit = 200 * EPS * np.linalg.norm(q) * np.linalg.norm(k)
    for i, j in ((0, 0), (3, 1), (2, 7)):
        assert abs(logit(i, j) - logit(i + 9, j + 9)) < limit
    assert abs(logit(3, 1) - logit(1, 3)) > 1e-2
    np.testing.assert_allclose(np.linalg.norm(turned(q, 5)), np.linalg.norm(q), rtol=1e-6)
    with pytest.raises(ValueError, match="head_dim must be even for rotary positions, got 3"):
        rotary(jnp.ones((2, 1, 3)))


@pytest.mark.slow
def test_shared_keys_are_keys_repeated():
    shared, v = DECODERS["llama"], variables("llama")
    each = shared.clone(kv_heads=4)

    def repeated(path, x):
        if path[-2].key not in ("k", "v"):
            return x
        return np.repeat(x.reshape(8, 2, 4), 2, axis=1).reshape(8, 16)

    same(run(each)(jax.tree.map_with_path(repeated, v), WORDS), run(shared)(v, WORDS))
    with pytest.raises(ValueError, match="kv_heads: 3 do not divide 4 heads"):
        shared.clone(kv_heads=3).init(KEY, WORDS)
    with pytest.raises(ValueError, match="norm must be 'rmsnorm' or 'layernorm', got 'batch'"):
        shared.clone(norm="batch").init(KEY, WORDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama, tied", "olmo", "sit", "resnet"])
def test_half_precision_is_kept_throughout(name):
    """Parameters and images in bfloat16: no submodule converts to float32."""
    module, inputs = {"sit": (SIT, LATENTS), "resnet": (RESNET, (IMAGES,))}.get(name) or (
        DECODERS[name],
        (WORDS,),
    )

    def half(x):
        return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x

    v = jax.eval_shape(lambda: jax.tree.map(half, module.init(KEY, *inputs)))
    x = half(inputs[0]), *inputs[1:]
    network = networks.flax_network(lambda v, x, **more: module.apply(v, *x, **more))
    found = jax.eval_shape(lambda v: networks.features(network, v, x), v)
    assert {f.dtype for f in found.values()} == {jnp.dtype(jnp.bfloat16)}


# Tables.


def certify(c, params, new_c, new, inputs):
    made = {"old": build(c), "new": build(new_c)}

    def f(named, x):
        ((name, p),) = named.items()
        return run(made[name])(p, *x)

    return certificate(f, {"old": params}, {"new": new}, inputs)


tables = pytest.mark.parametrize(
    "name", [soak_unless(n == "llama", n) for n in DECODERS if n[:3] != "gpt"]
)


@pytest.mark.slow
@tables
def test_inner_spaces_can_be_permuted_and_ends_cannot(name):
    c, params = describe(DECODERS[name]), variables(name)
    spec = architectures.of(c).rules(c).spec(params)
    apply = run(DECODERS[name])
    for space in spec.spaces:
        if space.size == 1:
            continue
        maps = {space.name: growth.permute(np.roll(np.arange(space.size), 1))}
        inner = space.nonlinearity != "outer"
        assert (not exactness(spec, maps).lost) == inner, space
        new = jax.jit(change_basis, static_argnums=1)(params, spec, maps)
        seen = certificate(apply, params, new, WORDS)
        assert seen.preserved == inner, (space, seen)


@pytest.mark.slow
@tables
def test_twice_the_network_is_the_same_function(name):
    c, params = describe(DECODERS[name]), variables(name)
    new, plan = grow(params, c, {"width": 2, "depth": 2}, "lemon", key=KEY, require_lossless=True)
    assert not plan.report.lost
    assert (plan.config["heads"], plan.config["layers"], plan.config["width"]) == (
        *(2 * c["heads"], 4, 16),
    )
    assert not plan.config.get("tied")
    assert certify(c, params, plan.config, new, (WORDS,)).preserved


@pytest.mark.slow
def test_larger_heads_keep_their_rotary_frequencies():
    c, params = describe(DECODERS["llama"]), variables("llama")
    new, plan = grow(params, c, {"head_dim": 8}, "lemon", require_lossless=True)
    assert certify(c, params, plan.config, new, (WORDS,)).preserved
    new, plan = grow(params, c, {"head_dim": 6}, "lemon")
    assert plan.report.lost
    assert not certify(c, params, plan.config, new, (WORDS,)).preserved


# Images.

IMAGES = np.float32(np.random.default_rng(1).standard_normal((2, 16, 16, 3)))
RESNET = ResNet((4, 6), (1, 2), 3, stem="standard")
SIT = SiT(side=4, channels=3, classes=5, patch=2, **{k: SMALL[k] for k in SIZES}, layers=1, heads=2)
LATENTS = (IMAGES[:, :4, :4], np.float32([0.2, 0.7]), np.int32([1, 5]))


@pytest.mark.slow
def test_stems_divide_the_image():
    network = networks.flax_network(RESNET.apply)
    v = drawn(RESNET, IMAGES)
    found = jax.eval_shape(lambda v: networks.features(network, v, IMAGES), v)
    assert found["stem"].shape == (2, 8, 8, 4)
    assert found["stage0_block0"].shape == (2, 4, 4, 4)
    assert found["stage1_block1"].shape == (2, 2, 2, 6)
    small = networks.flax_network(RESNET.clone(stem="small").apply)
    like = jax.eval_shape(RESNET.clone(stem="small").init, KEY, IMAGES)
    found = jax.eval_shape(lambda v: networks.features(small, v, IMAGES), like)
    assert found["stage0_block0"].shape == (2, 16, 16, 4)
    with pytest.raises(ValueError, match="stem must be 'small' or 'standard', got 'none'"):
        jax.eval_shape(RESNET.clone(stem="none").init, KEY, IMAGES)
    with pytest.raises(ValueError, match=r"2 widths of stages, but blocks \(1,\)"):
        jax.eval_shape(RESNET.clone(blocks=(1,)).init, KEY, IMAGES)
    with pytest.raises(ValueError, match="'blocks' must list 2 stages, got"):
        architectures.flax_resnet({"widths": [4, 6], "blocks": [1]})


@pytest.mark.slow
def test_running_statistics_are_updated_in_training():
    v = drawn(RESNET, IMAGES)
    train = jax.jit(lambda v: RESNET.apply(v, IMAGES, True, mutable=["batch_stats"]))
    out, state = train(v)
    assert out.shape == (2, 3)
    old, new = (leaf_values(x["batch_stats"]) for x in (v, state))
    assert all(np.abs(a - b).max() > 1e-6 for a, b in zip(old, new, strict=True))
    # a tenth of the way from the old mean to that of the batch
    stem = jax.lax.conv_general_dilated(
        *(IMAGES, v["params"]["stem"]["kernel"], (2, 2), ((3, 3), (3, 3))),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ).mean((0, 1, 2))
    want = 0.9 * v["batch_stats"]["stem_bn"]["mean"] + 0.1 * stem
    np.testing.assert_allclose(state["batch_stats"]["stem_bn"]["mean"], want, 1e-5, 1e-6)


def leaf_values(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


@pytest.mark.slow
@pytest.mark.parametrize("to", [soak_unless(False, {"widths": [8, 12]}), {"blocks": [2, 3]}])
def test_stages_grow_one_by_one(to):
    c, params = describe(RESNET), drawn(RESNET, IMAGES)
    new, plan = grow(params, c, to, "lemon", require_lossless=True)
    assert not plan.report.lost
    key = next(iter(to))
    assert plan.config[key] == to[key]
    assert certify(c, params, plan.config, new, (IMAGES,)).preserved


@pytest.mark.slow
def test_a_new_diffusion_transformer_is_zero_and_its_blocks_the_identity():
    v = jax.jit(SIT.init)(KEY, *LATENTS)
    apply = jax.jit(lambda v: SIT.apply(v, *LATENTS, capture_intermediates=True, mutable=True))
    out, state = apply(v)
    np.testing.assert_array_equal(out, jnp.zeros((2, 4, 4, 3)))
    found = {n: state["intermediates"][n]["__call__"][0] for n in ("patch_embed", "block_0")}
    patches = np.asarray(found["patch_embed"]).reshape(2, 4, 8)
    np.testing.assert_array_equal(found["block_0"], patches + v["params"]["position_embed"])


@pytest.mark.slow
def test_velocities_stand_where_their_patches_do():
    v = drawn(SIT, *LATENTS)
    f = run(SIT)
    out = f(v, *LATENTS)
    assert out.shape == LATENTS[0].shape
    head = jax.tree.map(np.zeros_like, v["params"]["head"])
    head["bias"] = np.arange(12, dtype=np.float32)
    told = f({"params": v["params"] | {"head": head}}, *LATENTS)
    patch = np.arange(12.0).reshape(2, 2, 3)
    np.testing.assert_array_equal(told, np.broadcast_to(np.tile(patch, (2, 2, 1)), told.shape))
    x, t, labels = LATENTS
    for other in ((x, t + 0.1, labels), (x, t, labels - 1), (x[:, ::-1], t, labels)):
        assert (np.abs(np.asarray(f(v, *other)) - np.asarray(out)).max((1, 2, 3)) > 1e-4).all()
    with pytest.raises(ValueError, match=r"\[batch, 4, 4, 3\].* got shape \[2, 16, 16, 3\]"):
        SIT.apply(v, IMAGES, t, labels)


def test_sine_positions_tell_patches_apart():
    x = sine_positions(4, 8)
    assert x.shape == (16, 8)
    near = np.linalg.norm(x[5] - x[[4, 6, 1, 9]], axis=1)  # its neighbours in row and column
    np.testing.assert_allclose(near, near[0], rtol=1e-6)
    assert np.linalg.norm(x[5] - x[10]) > near[0]
    with pytest.raises(ValueError, match="width must be a multiple of 4 for sine positions, got 6"):
        sine_positions(4, 6)


@pytest.mark.slow
def test_positions_of_patches_are_not_trained():
    v = drawn(SIT, *LATENTS)

    def energy(v) -> Any:
        out: Any = SIT.apply(v, *LATENTS)
        return jnp.sum(out**2)

    gradient = jax.jit(jax.grad(energy))(v)["params"]
    assert not np.any(gradient.pop("position_embed"))
    # nor is the bias of a key, which shifts all logits of a query equally
    keys = gradient["block_0"]["k"].pop("bias")
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient))
    assert float(np.abs(keys).max()) < 1e3 * EPS * largest
    assert all(bool(np.any(x)) for x in jax.tree.leaves(gradient))


@pytest.mark.soak
def test_a_diffusion_transformer_can_be_permuted_and_grown():
    c, params = describe(SIT), drawn(SIT, *LATENTS)
    spec = architectures.of(c).rules(c).spec(params)
    maps = {
        s.name: growth.permute(jnp.roll(jnp.arange(s.size), 1))
        for s in spec.spaces
        if s.nonlinearity != "outer"
    }
    assert len(maps) == 3 + 4
    assert not exactness(spec, maps).lost
    new = change_basis(params, spec, maps)
    assert certify(c, params, c, new, LATENTS).preserved
    for space in ("channel", "frequency", "label", "velocity"):
        n = spec.space(space).size
        assert exactness(spec, {space: growth.permute(jnp.roll(jnp.arange(n), 1))}).lost
    grown, plan = grow(params, c, {"width": 2, "depth": 2}, "lemon", key=KEY, require_lossless=True)
    assert (plan.config["width"], plan.config["layers"], plan.config["heads"]) == (16, 2, 4)
    assert certify(c, params, plan.config, grown, LATENTS).preserved
    # a gated average is not an average, so other multiples are not exact
    assert grow(params, c, {"width": 1.5}, "lemon")[1].report.lost


# Checkpoints of Hugging Face.


def olmo(p, c, tokens):
    """OLMo's forward pass in float64, step by step, with norms without parameters."""
    heads, k, w = c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"]
    size = w // heads

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)

    def turn(x):  # [time, head, size]: a complex number per pair (i, i + size / 2)
        z = x[..., : size // 2] + 1j * x[..., size // 2 :]
        rate = c["rope_theta"] ** (-2 * np.arange(size // 2) / size)
        z = z * np.exp(1j * np.arange(len(x))[:, None, None] * rate)
        return np.concatenate([z.real, z.imag], axis=-1)

    out = []
    p = {n: np.asarray(x, np.float64) for n, x in p.items()}
    for line in tokens:
        x = p["model.embed_tokens.weight"][line]
        for i in range(c["num_hidden_layers"]):
            t = {n: p[f"model.layers.{i}.self_attn.{n}_proj.weight"] for n in "qkvo"}
            y, mixed = norm(x), np.zeros((len(x), w))
            Q = turn((y @ t["q"].T).reshape(len(x), heads, size))
            K = turn((y @ t["k"].T).reshape(len(x), k, size))
            V = (y @ t["v"].T).reshape(len(x), k, size)
            for h in range(heads):
                g = h // (heads // k)
                for now in range(len(x)):
                    logits = K[: now + 1, g] @ Q[now, h] / size**0.5
                    weight = np.exp(logits - logits.max())
                    mixed[now, h * size : (h + 1) * size] = weight / weight.sum() @ V[: now + 1, g]
            x = x + mixed @ t["o"].T
            m = {n: p[f"model.layers.{i}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")}
            y = norm(x)
            gate = y @ m["gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (y @ m["up"].T)) @ m["down"].T
        out.append(norm(x) @ p["lm_head.weight"].T)
    return np.stack(out)


def hugging_face(name):
    """A configuration, tensors by name, and an independent computation of their logits."""
    c = GOLDEN["llama" if name == "olmo" else name.split(",")[0]]["config"]
    wanted = GOLDEN["llama" if name == "olmo" else name.split(",")[0]]["shapes"]
    if name == "olmo":
        c = c | {"model_type": "olmo", "rope_theta": 100.0, "num_key_value_heads": 2}
        c = c | {"num_attention_heads": 4, "hidden_size": 16, "head_dim": None}
        del c["rope_parameters"]
        wanted = {
            n: [16 if n.endswith("q_proj.weight") else s[0], 16]
            if len(s) == 2 and not n.endswith(("o_proj.weight", "down_proj.weight"))
            else [16, s[1]]
            for n, s in wanted.items()
            if "norm" not in n
        }
    tensors = {n: weights(n, s) for n, s in wanted.items()}
    if name == "gpt2, base names":
        tensors = {n.removeprefix("transformer."): x for n, x in tensors.items()}
        tensors["h.0.attn.bias"] = np.tri(12, dtype=bool)[None, None]
        tensors["lm_head.weight"] = tensors["wte.weight"]
    if name == "llama, tied":
        c = c | {"tie_word_embeddings": True}
        del tensors["lm_head.weight"]
    if name == "olmo":
        return c, tensors, lambda p: olmo(p, c, TOKENS)
    family: Any = architectures.of(c)
    logits = jax.jit(lambda p: family.logits(p, c, TOKENS))
    return c, tensors, logits


def saved(folder, c, tensors):
    folder.mkdir(exist_ok=True)
    save_checkpoint(folder, tensors)
    (folder / "config.json").write_text(json.dumps(c))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gpt2, base names",
        "olmo",
        *(soak_unless(False, name) for name in ("gpt2", "llama", "llama, tied")),
    ],
)
def test_checkpoints_compute_what_they_did(name, tmp_path):
    c, tensors, logits = hugging_face(name)
    found = load_pretrained(saved(tmp_path / "model", c, tensors), vocab=17, context=8)
    same(run(found.module)(found.variables, WORDS), logits(tensors))
    assert build(found.config) == found.module
    spec = architectures.of(found.config).rules(found.config).spec(found.variables)
    assert len(spec.leaves) == len(jax.tree.leaves(found.variables))
    half = convert(tensors, module_of(c), dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("gpt2", {"activation_function": "relu"}, "'activation_function' must be 'gelu_new' or"),
        ("gpt2", {"scale_attn_weights": False}, "'scale_attn_weights' must be True here, got Fal"),
        ("gpt2", {"n_head": 3}, "n_head heads in n_embd units: 3 does not divide 8"),
        ("gpt2", {"n_positions": 16}, r"'wpe.weight': expected shape \[16, 8\], got \[12, 8\]"),
        ("gpt2", {"n_layer": 3}, "the tensor 'h.2.* for .* is missing in"),
        ("gpt2", {"n_layer": 1}, "no place for the checkpoint's 'h.1.attn.c_attn.bias'"),
        ("gpt2", {"tie_word_embeddings": False}, "tensor 'lm_head.weight' for 'un.* is missing"),
        ("llama", {"vocab_size": 19}, r"expected shape \[19, 8\], got \[17, 8\]"),
        ("llama", {"tie_word_embeddings": True}, "'lm_head.weight' differs from the embeddings"),
        ("llama", {"attention_bias": True}, "'attention_bias' must be False here, got True"),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "'rope_type' must be 'default' here"),
        ("llama", {"num_key_value_heads": 4}, r"k_proj.weight': expected shape \[16, 8\], got \[8"),
        ("llama", {"model_type": "olmo2"}, "must be 'gpt2', 'llama' or 'olmo', got 'olmo2'"),
        ("olmo", {"clip_qkv": 8.0}, "'clip_qkv' must be None here, got 8.0"),
    ],
)
def test_checkpoints_that_our_modules_are_not(name, changes, text):
    c, tensors, _ = hugging_face(name)
    with pytest.raises(ValueError, match=text):
        convert(tensors, module_of(c | changes))


def test_data_that_a_checkpoint_does_not_fit(tmp_path):
    c, tensors, _ = hugging_face("gpt2")
    folder = saved(tmp_path / "model", c, tensors)
    with pytest.raises(ValueError, match=r"vocabulary has 17 tokens, the data's 256"):
        load_pretrained(folder, vocab=256)
    with pytest.raises(ValueError, match=r"of 13 were requested, but the checkpoint has pos.* 12"):
        load_pretrained(folder, context=13)
    assert load_pretrained(folder, vocab=10).module.vocab == 17  # padded
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_pretrained(folder)
    with pytest.raises(ValueError, match="expected a folder with"):
        load_pretrained(tmp_path)
