"""Experts of a mixture in a different order, with hidden units in a different order as well."""

import json

import jax
import mixture_reference
import numpy as np
import pytest
import small_checkpoints
from small_checkpoints import CONFIG, save

from sail_jax import architectures
from sail_jax.align.experts import experts_of, match_experts, permute_experts
from sail_jax.checkpoint import align_checkpoints, load_checkpoint
from sail_jax.growth import Expert, upcycle

QWEN = {**CONFIG, "model_type": "qwen3", "head_dim": 4}


def mixture(config=CONFIG, alike=False):
    models = [small_checkpoints.tensors(k, dtype=np.float32) for k in range(4)]
    if config is QWEN:
        norms = [f"model.layers.{i}.self_attn.{n}_norm.weight" for i in range(2) for n in "qk"]
        models = [x | {name: np.ones(4, np.float32) for name in norms} for x in models]
    router = np.random.default_rng(5).standard_normal((2, 4, 16))
    return upcycle(models, config, [Expert(0 if alike else k) for k in range(4)], router)


def shuffled(params, config, seed):
    """Experts, rows of routers, and the hidden units of each expert, by the definition."""
    rng = np.random.default_rng(seed)
    mixtral = config["model_type"] == "mixtral"
    qwen = ("mlp", "gate_proj up_proj down_proj")
    at, names = ("block_sparse_moe", "w1 w3 w2") if mixtral else qwen
    gate, up, down = names.split()
    out, orders = dict(params), []
    for i in range(2):
        h = f"model.layers.{i}.{at}."
        # Expert e of the shuffled mixture is expert order[e]; none stays.
        order = np.array([[2, 0, 3, 1], [3, 2, 1, 0]][i])
        out[h + "gate.weight"] = params[h + "gate.weight"][order]
        for new, old in enumerate(order):
            units = rng.permutation(24)
            for name in (gate, up):
                weight = params[f"{h}experts.{old}.{name}.weight"]
                out[f"{h}experts.{new}.{name}.weight"] = weight[units]
            weight = params[f"{h}experts.{old}.{down}.weight"]
            out[f"{h}experts.{new}.{down}.weight"] = weight[:, units]
        orders.append(np.argsort(order))
    return out, orders


@pytest.mark.parametrize("config", [CONFIG, QWEN], ids=["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("alike", [False, True])
def test_planted_order_is_found(config, alike):
    """This includes equal experts, which only the router distinguishes."""
    params, config = mixture(config, alike)
    moved, orders = shuffled(params, config, 1)
    tokens = np.array([3, 5, 0, 7])
    wanted = mixture_reference.run(params, config, tokens)[1]
    assert np.allclose(mixture_reference.run(moved, config, tokens)[1], wanted, atol=1e-10)
    spec = architectures.of(config).rules(config).spec(params)
    layers = experts_of(spec, params)
    assert [layer.space for layer in layers] == ["expert.0", "expert.1"]
    found = match_experts(params, moved, spec, layers)
    for layer, order in zip(layers, orders, strict=True):
        assert np.array_equal(found[layer.space].order, order)
        assert found[layer.space].after == pytest.approx(1, abs=1e-5)
        assert found[layer.space].before < 0.99
    back = permute_experts(moved, layers, {name: x.order for name, x in found.items()})
    assert np.allclose(mixture_reference.run(back, config, tokens)[1], wanted, atol=1e-10)
    router = layers[0].routers[0]
    assert np.array_equal(back[router], params[router])


def test_what_all_rows_of_a_router_share_changes_no_cosine():
    """A softmax over experts ignores it."""
    params, config = mixture(alike=True)
    moved, _ = shuffled(params, config, 1)
    spec = architectures.of(config).rules(config).spec(params)
    layers = experts_of(spec, params)
    more = {layer.routers[0]: params[layer.routers[0]] + 3 for layer in layers}
    plain = match_experts(params, moved, spec, layers)
    shifted = match_experts({**params, **more}, moved, spec, layers)
    for name, found in shifted.items():
        assert np.array_equal(found.order, plain[name].order)
        assert found.before == pytest.approx(plain[name].before, abs=1e-4)
        assert found.after == pytest.approx(1, abs=1e-5)


def test_order_is_found_under_noise():
    params, config = mixture()
    moved, orders = shuffled(params, config, 2)
    rng = np.random.default_rng(0)
    moved = {n: x + 0.5 * x.std() * rng.standard_normal(x.shape) for n, x in moved.items()}
    spec = architectures.of(config).rules(config).spec(params)
    found = match_experts(params, moved, spec, experts_of(spec, params))
    assert [list(x.order) for x in found.values()] == [list(order) for order in orders]


def test_layer_whose_experts_differ_in_shape_or_have_no_router_is_left():
    params, config = mixture()
    spec = architectures.of(config).rules(config).spec(params)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}
    odd = "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    shapes[odd] = jax.ShapeDtypeStruct((16, 25), np.float32)
    assert [layer.space for layer in experts_of(spec, shapes)] == ["expert.1"]
    router = "model.layers.1.block_sparse_moe.gate.weight"
    shapes[router] = jax.ShapeDtypeStruct((5, 16), np.float32)
    assert experts_of(spec, shapes) == ()


def fused(params, config):
    """A mixture with one tensor for all experts of a layer, as in transformers 5."""
    mixtral = config["model_type"] == "mixtral"
    names = "w1 w3 w2" if mixtral else "gate_proj up_proj down_proj"
    out = {name: x for name, x in params.items() if "moe" not in name and "mlp" not in name}
    for i in range(2):
        h = f"model.layers.{i}."
        at = h + ("block_sparse_moe." if mixtral else "mlp.")
        gate, up, down = (
            np.stack([params[f"{at}experts.{e}.{name}.weight"] for e in range(4)])
            for name in names.split()
        )
        out[h + "mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        out[h + "mlp.experts.down_proj"] = down
        out[h + "mlp.gate.weight"] = params[at + "gate.weight"]
    return out


@pytest.mark.parametrize("source", [CONFIG, QWEN], ids=["mixtral", "qwen3_moe"])
def test_planted_order_of_stacked_experts_is_found(source):
    """Also if the routers differ, so that only the weights of experts determine the order."""
    params, config = mixture(source)
    moved, orders = shuffled(params, config, 1)
    params, moved = fused(params, config), fused(moved, config)
    other = {n: x[::-1] if n.endswith("gate.weight") else x for n, x in moved.items()}
    spec = architectures.of(config).rules(config).spec(params)
    layers = experts_of(spec, params)
    assert [(layer.space, layer.stack) for layer in layers] == [
        ("expert.0",) * 2,
        ("expert.1",) * 2,
    ]
    for tree in (moved, other):
        found = match_experts(params, tree, spec, layers)
        assert [list(x.order) for x in found.values()] == [list(order) for order in orders]
    back = permute_experts(moved, layers, dict(zip(["expert.0", "expert.1"], orders, strict=True)))
    for i in range(2):
        router = f"model.layers.{i}.mlp.gate.weight"
        assert np.array_equal(back[router], params[router])


@pytest.mark.slow
def test_forward_pass_of_stacked_experts():
    params, config = mixture()
    tokens = np.array([3, 5, 0, 7])
    wanted = mixture_reference.run(params, config, tokens)[1]
    got = architectures.of(config).logits(fused(params, config), config, tokens[None])[0]
    # Float32: about a hundred roundings of logits of size 4.
    np.testing.assert_allclose(got, wanted, atol=100 * 4 * 2**-24)


@pytest.mark.parametrize("source", [CONFIG, QWEN], ids=["mixtral", "qwen3_moe"])
def test_scales_of_norms_are_folded_into_all_experts(source):
    params, config = mixture(source)
    rng = np.random.default_rng(0)
    scale = "model.layers.1.post_attention_layernorm.weight"
    params |= {scale: (1 + rng.random(16)).astype(np.float32)}
    rules = architectures.of(config).rules(config)
    folded, _ = rules.fold(params)
    folded = {name: np.asarray(x) for name, x in folded.items()}
    assert np.all(folded[scale] == 1)
    tokens = np.array([3, 5, 0, 7])
    wanted, got = (mixture_reference.run(p, config, tokens)[1] for p in (params, folded))
    # Each entry of the weights is rounded once.
    assert np.abs(got - wanted).max() < 20 * 2**-24 * np.abs(wanted).max()
    stacked, _ = rules.fold(fused(params, config))
    for name, x in fused(folded, config).items():
        assert np.array_equal(stacked[name], x)


def gpt_oss(seed):
    """The experts of a GPT-OSS: gate and up take turns, and router and experts have biases."""
    rng = np.random.default_rng(seed)
    shapes = {"input_layernorm.weight": (16,), "post_attention_layernorm.weight": (16,)}
    shapes |= {"self_attn.q_proj.weight": (16, 16), "self_attn.o_proj.weight": (16, 16)}
    shapes |= {f"self_attn.{name}_proj.weight": (8, 16) for name in "kv"}
    shapes |= {"self_attn.sinks": (4,), "mlp.router.weight": (6, 16), "mlp.router.bias": (6,)}
    shapes |= {"mlp.experts.gate_up_proj": (6, 16, 40), "mlp.experts.gate_up_proj_bias": (6, 40)}
    shapes |= {"mlp.experts.down_proj": (6, 20, 16), "mlp.experts.down_proj_bias": (6, 16)}
    shapes = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}
    shapes |= {"model.embed_tokens.weight": (20, 16), "lm_head.weight": (20, 16)}
    shapes |= {"model.norm.weight": (16,)}
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    config = CONFIG | {"model_type": "gpt_oss", "intermediate_size": 20, "head_dim": 4}
    return params, config | {"num_local_experts": 6}


def shuffled_gpt_oss(params):
    rng, out, orders = np.random.default_rng(1), dict(params), []
    for i in range(2):
        h = f"model.layers.{i}.mlp."
        order = rng.permutation(6)
        out |= {name: x[order] for name, x in params.items() if name.startswith(h)}
        for e in range(6):
            units = rng.permutation(20)
            # Columns 2 u and 2 u + 1 are the gate and the rest of unit u.
            both = np.stack([2 * units, 2 * units + 1], axis=1).ravel()
            out[h + "experts.gate_up_proj"][e] = out[h + "experts.gate_up_proj"][e][:, both]
            out[h + "experts.gate_up_proj_bias"][e] = out[h + "experts.gate_up_proj_bias"][e][both]
            out[h + "experts.down_proj"][e] = out[h + "experts.down_proj"][e][units]
        orders.append(np.argsort(order))
    return out, orders


def test_planted_order_of_gpt_oss_is_found():
    params, config = gpt_oss(0)
    moved, orders = shuffled_gpt_oss(params)
    spec = architectures.of(config).rules(config).spec(params)
    layers = experts_of(spec, params)
    assert layers[0].routers == tuple(f"model.layers.0.mlp.router.{x}" for x in ("bias", "weight"))
    assert [layer.stack for layer in layers] == ["hidden.0", "hidden.1"]
    found = match_experts(params, moved, spec, layers)
    assert [list(x.order) for x in found.values()] == [list(order) for order in orders]
    back = permute_experts(moved, layers, {name: x.order for name, x in found.items()})
    for name in ("router.weight", "router.bias", "experts.down_proj_bias"):
        name = f"model.layers.1.mlp.{name}"
        assert np.array_equal(back[name], params[name])
        assert not np.array_equal(moved[name], params[name])


@pytest.mark.soak
def test_checkpoints_of_stacked_experts_get_back_their_experts_and_units(tmp_path):
    params, config = mixture()
    moved, orders = shuffled(params, config, 3)
    params, moved = fused(params, config), fused(moved, config)
    a, b = save(tmp_path / "a", params, config), save(tmp_path / "b", moved, config)
    done = align_checkpoints(a, b, tmp_path / "out", spaces=["expert.*", "hidden.*"])
    found = load_checkpoint(tmp_path / "out")
    assert all(np.array_equal(found[name], x) for name, x in params.items())
    assert done.aligned.distance[1] == 0
    assert done.verdict.exact
    assert [list(order) for order in done.aligned.orders.values()] == [list(x) for x in orders]


@pytest.mark.slow
def test_biases_of_routers_move_along_in_files(tmp_path):
    params, config = gpt_oss(0)
    moved, _ = shuffled_gpt_oss(params)
    a, b = save(tmp_path / "a", params, config), save(tmp_path / "b", moved, config)
    # The experts' space has a name of its own in the table.
    done = align_checkpoints(a, b, tmp_path / "out", spaces="hidden.1")
    assert list(done.aligned.orders) == ["expert.1"]
    assert not done.aligned.maps
    found = load_checkpoint(tmp_path / "out")
    for name in ("mlp.router.bias", "mlp.router.weight", "mlp.experts.down_proj_bias"):
        one, two = (f"model.layers.{i}.{name}" for i in range(2))
        assert np.array_equal(found[one], moved[one])
        assert np.array_equal(found[two], params[two])


@pytest.mark.soak
def test_checkpoints_get_back_their_experts_and_units(tmp_path):
    params, config = mixture()
    moved, orders = shuffled(params, config, 3)
    a, b = save(tmp_path / "a", params, config), save(tmp_path / "b", moved, config)
    done = align_checkpoints(a, b, tmp_path / "out")
    found = load_checkpoint(tmp_path / "out")
    assert all(np.array_equal(found[name], x) for name, x in params.items())
    assert done.verdict.exact
    assert done.aligned.distance[0] > 0.5
    assert done.aligned.distance[1] == 0
    rows = json.loads((tmp_path / "out" / "align.json").read_text())["spaces"]
    own = {row["space"]: row["moved"] for row in rows if row["space"].startswith("expert")}
    assert own == {f"expert.{i}": int(np.sum(x != np.arange(4))) for i, x in enumerate(orders)}
    alone = align_checkpoints(a, b, tmp_path / "experts", spaces="expert.1")
    assert list(alone.aligned.orders) == ["expert.1"]
    assert not alone.aligned.maps
    kept = load_checkpoint(tmp_path / "experts")
    router = "model.layers.{}.block_sparse_moe.gate.weight"
    assert np.array_equal(kept[router.format(1)], params[router.format(1)])
    assert np.array_equal(kept[router.format(0)], moved[router.format(0)])
