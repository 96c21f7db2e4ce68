"""Experts of a mixture in another order, whose hidden units are in another order, too."""

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
    """Also of experts that are alike, which the router alone tells apart."""
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


@pytest.mark.slow
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
