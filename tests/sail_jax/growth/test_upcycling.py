"""Mixtures of experts made from dense networks: the mapping of tensors, and the computed
function."""

import re

import jax
import mixture_reference
import ml_dtypes
import numpy as np
import pytest
import small_checkpoints
from small_checkpoints import CONFIG

from sail_jax import architectures
from sail_jax.growth import routers, upcycling
from sail_jax.growth.upcycling import Expert, upcycle
from sail_jax.merging import random_bits

QWEN = {**CONFIG, "model_type": "qwen3", "head_dim": 4}
QWEN2 = {**CONFIG, "model_type": "qwen2"}
GRANITE = {
    **CONFIG, "model_type": "granite", "embedding_multiplier": 6.0, "attention_multiplier": 0.2,
    "residual_multiplier": 0.3, "logits_scaling": 4.0,
}  # fmt: skip
NAMES = ("gate", "up", "down")
TOKENS = np.array([3, 5, 0, 7, 7, 2])


def dense(seed=0, config=CONFIG):
    found = small_checkpoints.tensors(seed, dtype=np.float32)
    if config is QWEN:
        rng = np.random.default_rng(seed)
        for i in range(2):
            for name in ("q_norm", "k_norm"):
                gain = 1 + 0.2 * rng.standard_normal(4)
                found[f"model.layers.{i}.self_attn.{name}.weight"] = gain.astype(np.float32)
    if config is QWEN2:
        for i in range(2):
            for name, n in (("q", 16), ("k", 8), ("v", 8)):
                at = f"model.layers.{i}.self_attn.{name}_proj.bias"
                found[at] = np.full(n, 0.1, np.float32)
    return found


def rows(experts, scale=1.0):
    return scale * np.random.default_rng(7).standard_normal((2, experts, 16)).astype(np.float32)


@pytest.mark.parametrize("config", [CONFIG, QWEN, GRANITE], ids=lambda own: own["model_type"])
@pytest.mark.parametrize("used", [1, 3])
def test_experts_that_are_alike_compute_what_the_dense_network_does(config, used):
    """For any router, compared with a reference that is independent of the construction."""
    params = dense(config=config)
    _, before = mixture_reference.run(params, config, TOKENS)
    for router in (rows(4), rows(4, 50.0), np.zeros((2, 4, 16))):
        mixture, new = upcycle([params], config, [Expert()] * 4, router, used=used)
        _, after = mixture_reference.run(mixture, new, TOKENS)
        assert np.abs(after - before).max() < 1e-12 * np.abs(before).max()


@pytest.mark.parametrize(
    ("expert", "shared", "share", "alike"),
    [
        (Expert(), Expert(residual=0.0), 1.0, True),
        (Expert(residual=0.5), Expert(), 0.0, True),
        (Expert(residual=0.75), Expert(residual=0.5), 0.0, True),
        (Expert(), Expert(), 0.0, False),
        (Expert(), Expert(residual=0.1), 1.0, False),
        (Expert(residual=0.5), Expert(), 1.0, False),
        (Expert(residual=0.5), Expert(1), 0.0, False),
        (Expert(residual=0.5), Expert(residual=0.0), 0.0, False),
    ],
)
def test_shared_expert_keeps_the_function_where_its_part_is_made_up_for(
    expert, shared, share, alike
):
    """The plan states this exactly where the reference shows it."""
    models = [dense(k, QWEN2) for k in range(2)]
    _, before = mixture_reference.run(models[0], QWEN2, TOKENS)
    router = rows(5)
    router[:, 4] *= share
    plan = upcycling.plan(models, QWEN2, [expert] * 4, router, shared=shared)
    assert plan.config["model_type"] == "qwen2_moe"
    mixture = {name: np.asarray(part.of(models)) for name, part in plan.parts.items()}
    _, after = mixture_reference.run(mixture, plan.config, TOKENS)
    # Scaled weights are rounded once.
    assert plan.alike == alike == (np.abs(after - before).max() < 1e-6 * np.abs(before).max())


@pytest.mark.parametrize(
    ("expert", "shared", "alike"),
    [
        (Expert(), Expert(residual=0.0), True),
        (Expert(residual=0.25), Expert(residual=0.75), True),
        (Expert(residual=0.5), Expert(), False),
        (Expert(residual=0.25), Expert(1, residual=0.75), False),
    ],
)
def test_shared_expert_of_granite_has_a_share_of_1(expert, shared, alike):
    models = [dense(k) for k in range(2)]
    _, before = mixture_reference.run(models[0], GRANITE, TOKENS)
    plan = upcycling.plan(
        models, GRANITE, [expert] * 4, rows(4), shared=shared, kind="granitemoeshared"
    )
    mixture = {name: np.asarray(part.of(models)) for name, part in plan.parts.items()}
    _, after = mixture_reference.run(mixture, plan.config, TOKENS)
    assert plan.alike == alike == (np.abs(after - before).max() < 1e-6 * np.abs(before).max())
    with pytest.raises(ValueError, match=r"expected an array \[2, 4, 16\] of layers, experts"):
        upcycling.plan(
            models, GRANITE, [expert] * 4, rows(5), shared=shared, kind="granitemoeshared"
        )


@pytest.mark.parametrize("one", [np.float64, ml_dtypes.bfloat16])
def test_experts_of_granite_lie_in_two_tensors(one):
    models = [dense(k) for k in range(2)]
    models[1] = {name: x.astype(one) for name, x in models[1].items()}
    mixture, config = upcycle(models, GRANITE, [Expert(1), Expert()], rows(2), used=1)
    at = "model.layers.1.block_sparse_moe."
    for e, model in enumerate(models[::-1]):
        gate, up, down = (model[f"model.layers.1.mlp.{n}_proj.weight"] for n in NAMES)
        assert np.array_equal(mixture[at + "input_linear.weight"][e], np.concatenate([gate, up]))
        assert np.array_equal(mixture[at + "output_linear.weight"][e], down)
    # The common dtype of two dtypes.
    assert mixture[at + "output_linear.weight"].dtype == np.result_type(one, np.float32)
    kept = {**GRANITE, "model_type": "granitemoe", "architectures": ["GraniteMoeForCausalLM"]}
    kept |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    assert {key: config[key] for key in kept} == kept


def test_llama_makes_qwen2_moe_without_biases():
    """Qwen2-MoE has them unless its configuration states that it does not."""
    shared = Expert(residual=0.0)
    mixture, config = upcycle(
        [dense()], CONFIG, [Expert()] * 2, rows(3), shared=shared, kind="qwen2_moe"
    )
    _, before = mixture_reference.run(dense(), CONFIG, TOKENS)
    _, after = mixture_reference.run(mixture, config, TOKENS)
    assert np.abs(after - before).max() < 1e-12 * np.abs(before).max()
    assert config["qkv_bias"] is False
    assert upcycling.mixture_config(QWEN2, "qwen2_moe", 2, 2)["qkv_bias"] is True


def test_other_experts_are_mixed_by_the_router():
    """A router that strongly prefers one expert gives the network with that feed-forward part."""
    base, other = dense(0), dense(1)
    router = np.zeros((2, 2, 16), np.float32)
    swapped = {n: other[n] if ".mlp." in n else x for n, x in base.items()}
    wanted = mixture_reference.run(swapped, CONFIG, TOKENS)[1]
    mixture, config = upcycle([base, other], CONFIG, [Expert(1), Expert(1)], router)
    assert np.allclose(mixture_reference.run(mixture, config, TOKENS)[1], wanted, atol=1e-12)
    mixture, config = upcycle([base, other], CONFIG, [Expert(0), Expert(1)], router)
    assert not np.allclose(mixture_reference.run(mixture, config, TOKENS)[1], wanted, atol=0.1)


def test_tensors_get_the_names_of_mixtral_and_are_not_copied():
    base, other = dense(0), dense(1)
    mixture, config = upcycle([base, other], CONFIG, [Expert(1), Expert(0)], rows(2))
    for new, old in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        for e, model in enumerate((other, base)):
            at = f"model.layers.1.block_sparse_moe.experts.{e}.{new}.weight"
            assert mixture.pop(at) is model[f"model.layers.1.mlp.{old}.weight"]
    router = mixture["model.layers.1.block_sparse_moe.gate.weight"]
    assert np.array_equal(router, rows(2)[1])
    kept = [name for name in mixture if name in base]
    assert all(mixture[name] is base[name] for name in kept)
    assert {*base} - {*kept} == {name for name in base if ".mlp." in name}
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (2, 2)


def test_what_a_dense_network_has_by_default_is_stated():
    """Mixtral's own epsilon is 1e-5, its base of rotary positions 1e6, and it has 8 key heads."""
    bare = {k: v for k, v in CONFIG.items() if k not in ("rms_norm_eps", "num_key_value_heads")}
    new = upcycling.mixture_config(bare, "mixtral", 4, 2)
    stated = [new[k] for k in ("rms_norm_eps", "rope_theta", "num_key_value_heads")]
    assert stated == [1e-6, 1e4, 4]
    new = upcycling.mixture_config(QWEN, "qwen3_moe", 4, 2)
    assert new["norm_topk_prob"] is True
    assert new["moe_intermediate_size"] == 24
    tower = {**CONFIG, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert "rope_theta" not in upcycling.mixture_config(tower, "mixtral", 4, 2)


@pytest.mark.slow
def test_dropped_units_are_drawn_with_the_moments_of_what_they_replace():
    """round(0.3 * 200) units; the same ones in all three weights, and others in each expert."""
    rng = np.random.default_rng(0)
    weight = (2 + 0.5 * rng.standard_normal((200, 100))).astype(np.float32)
    keys = random_bits.key(0), random_bits.key(1)
    lost = []
    for expert in range(2):
        found = []
        for place, (axis, x) in enumerate(((0, weight), (0, 3 * weight), (1, weight.T))):
            edit = jax.jit(upcycling.Edit(0.0, 1.0, 0.3, axis))
            y = np.asarray(edit((keys[0], np.array([0, expert, place], np.uint32)), x))
            moved = (y != x).all(1 - axis)
            assert np.array_equal(moved, (y != x).any(1 - axis))
            old, new = np.compress(moved, x, axis), np.compress(moved, y, axis)
            # Of 6000 entries: 5 standard errors of the mean and of the standard deviation.
            assert abs(new.mean() - old.mean()) < 5 * old.std() / 6000**0.5
            assert abs(new.std() - old.std()) < 5 * old.std() / 12000**0.5
            # Nothing is drawn for two units.
            assert np.unique(new).size > 0.99 * new.size
            found.append(moved)
        assert found[0].sum() == 60
        assert all(np.array_equal(found[0], other) for other in found)
        lost.append(found[0])
    assert not np.array_equal(*lost)


@pytest.mark.slow
def test_noise_is_added_before_the_last_layer_is_scaled():
    x = np.zeros((100, 60), np.float32)
    drawn = random_bits.key(3), np.array([0, 0, 2], np.uint32)
    y = np.asarray(jax.jit(upcycling.Edit(0.5, 1.0, 0.0, 1))(drawn, x))
    z = np.asarray(jax.jit(upcycling.Edit(0.5, 2.0, 0.0, 1))(drawn, x + 1))
    assert abs(y.std() - 0.5) < 5 * 0.5 / 12000**0.5
    assert np.allclose(z, 2 * (1 + y), atol=1e-6)


def test_last_layer_alone_is_scaled():
    base = dense()
    mixture, _ = upcycle([base], CONFIG, [Expert(residual=0.5)] * 2, rows(2))
    at = "model.layers.0.block_sparse_moe.experts.1."
    half = base["model.layers.0.mlp.down_proj.weight"] / 2
    assert np.array_equal(mixture[at + "w2.weight"], half)
    assert mixture[at + "w1.weight"] is base["model.layers.0.mlp.gate_proj.weight"]


def without(name):
    return {n: x for n, x in dense(1).items() if n != name}


DOWN = "model.layers.1.mlp.down_proj.weight"
REFUSED = {
    "no experts": ({"experts": []}, "experts: expected at least one, got none"),
    "k above the experts": ({"used": 3}, "experts_per_token: expected at most 2"),
    "k of 0": ({"used": 0}, "experts_per_token: expected an integer >= 1, got 0"),
    "an expert without a tensor": (
        {"models": [dense(), without(DOWN)]},
        f"experts[1]: the tensor '{DOWN}' is missing",
    ),
    "an expert of another shape": (
        {"models": [dense(), {**dense(1), DOWN: np.ones((16, 25))}]},
        f"experts[1]: '{DOWN}' is [16, 25], expected [16, 24] as in the base",
    ),
    "a base without a part": (
        {"models": [without(DOWN), dense()]},
        f"layer 1 has no tensor {DOWN}",
    ),
    "a model that is not there": (
        {"experts": [Expert(2), Expert()]},
        "experts[0].model: expected one of 0, 1; got 2",
    ),
    "a share above 1": (
        {"experts": [Expert(), Expert(drop=1.5)]},
        "experts[1].drop: expected a number from 0 to 1, got 1.5",
    ),
    "rows of another width": (
        {"router": np.zeros((2, 2, 15))},
        "router: expected an array [2, 2, 16] of layers, experts and the width, got [2, 2, 15]",
    ),
    "biases": (
        {"models": [{**dense(), "model.layers.0.mlp.up_proj.bias": np.ones(24)}, dense(1)]},
        "the tensors do not fit Mixtral: no rule matches leaf 'model.layers.0.mlp.up_proj.bias'",
    ),
    "an unknown kind": ({"kind": "deepseek"}, "architecture: no mixture is called 'deepseek'"),
    "another network": (
        {"config": {**CONFIG, "model_type": "gpt2"}},
        "no mixture is made of networks of the type 'gpt2'",
    ),
    "a window": (
        {"config": {**CONFIG, "layer_types": ["full_attention", "sliding_attention"]}},
        "Mixtral does not support the sliding-window layers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_mixture_is_refused(case):
    change, message = REFUSED[case]
    given = {
        "models": [dense(), dense(1)], "config": CONFIG, "experts": [Expert(0), Expert(1)],
        "router": rows(2), **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=re.escape(message)):
        upcycling.plan(**given)


def test_what_is_drawn_needs_a_key():
    with pytest.raises(TypeError, match="key: expected a PRNG key"):
        upcycling.plan([dense()], CONFIG, [Expert(drop=0.5)] * 2, rows(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "normalised"),
    [(CONFIG, True), (QWEN, True), (QWEN, False), (QWEN2, True), (GRANITE, True)],
)
def test_forward_pass_of_a_mixture_is_its_definition(config, normalised):
    models = [dense(k, config) for k in range(3)]
    experts = [Expert(k) for k in range(3)]
    shared = Expert(1) if config in (QWEN2, GRANITE) else None
    kind = "granitemoeshared" if config is GRANITE else None
    router = rows(4 if config is QWEN2 else 3)
    mixture, new = upcycle(models, config, experts, router, shared=shared, kind=kind)
    new = {**new, "norm_topk_prob": normalised} if config is QWEN else new
    wanted = mixture_reference.run(mixture, new, TOKENS)[1]
    forward = architectures.of(new).logits
    logits = jax.jit(lambda params: forward(params, new, TOKENS[None]))(mixture)[0]
    assert np.allclose(logits, wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.slow
def test_router_of_fewer_rows_than_experts_that_are_used_is_refused():
    mixture, config = upcycle([dense()], CONFIG, [Expert()] * 2, rows(2))
    with pytest.raises(ValueError, match="'num_experts_per_tok' is 3, but a router has 2 rows"):
        architectures.of(config).logits(mixture, {**config, "num_experts_per_tok": 3}, TOKENS[None])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "mean", "most"),
    [
        (CONFIG, False, 1 << 28), (CONFIG, True, 1 << 28), (CONFIG, True, 15_000),
        (GRANITE, False, 1 << 28),
    ],
)  # fmt: skip
def test_rows_of_hidden_states_are_what_layers_read(config, mean, most):
    """Prompts of several lengths are padded and run together; a group reads each tensor once."""
    params, read = dense(), []

    class Stored(dict):
        def __getitem__(self, name):
            read.append(name)
            return super().__getitem__(name)

    table = params["model.embed_tokens.weight"]
    states = routers.hidden(
        Stored(params), config, table.__getitem__, "model.embed_tokens.weight", mean=mean, most=most
    )
    prompts = routers.Prompts(((3, 5, 0, 7), (2,)), ((1, 1),))
    found = routers.of_prompts([prompts], states)

    # A token takes at most 4 (12 16 + 4 24 + 4 4 4) = 1408 bytes. So the prompts of one and of two
    # tokens fit in 15,000 bytes together, and the one of four does not fit in addition.
    groups = 1 if most > 15_000 else 2
    assert len(read) == 10 * groups
    assert len({*read}) == 10

    def state(prompt):
        inputs = mixture_reference.run(params, config, np.array(prompt))[0]
        return inputs.mean(1) if mean else inputs[:, -1]

    positive, negative = (np.mean([state(x) for x in group], 0) for group in prompts)
    wanted = positive - negative
    wanted /= np.linalg.norm(wanted, axis=-1, keepdims=True)
    assert found.shape == (2, 1, 16)
    assert np.allclose(found[:, 0], wanted, atol=2e-6)


def test_rows_of_embeddings_are_their_sums():
    """mergekit-moe's cheap_embed: all prompts of an expert together, the same for all layers."""
    table = dense()["model.embed_tokens.weight"].astype(np.float64)
    experts = [routers.Prompts(((3, 5, 3), (1,))), routers.Prompts(((4,),), ((5, 6),))]
    found = routers.of_prompts(experts, routers.embedded(table.__getitem__, 2), unit=True)

    def unit(x):
        return x / np.linalg.norm(x)

    wanted = [unit(2 * table[3] + table[5] + table[1])]
    wanted.append(unit(unit(table[4]) - unit(table[5] + table[6])))
    for layer in found:
        assert np.allclose(layer, wanted, atol=1e-6)


def test_drawn_routers_have_their_distributions():
    key = jax.random.key(0)
    normal = routers.drawn("random", 3, 4, 1000, key)
    uniform = routers.drawn("uniform_random", 3, 4, 1000, key) * 1000**0.5
    assert normal.shape == uniform.shape == (3, 4, 1000)
    assert abs(normal.std() - 1) < 5 / 24000**0.5
    assert 0.999 < np.abs(uniform).max() <= 1
    assert abs(uniform.std() - 3**-0.5) < 5 / 24000**0.5
    assert not routers.drawn("zero", 3, 4, 5, key).any()
    with pytest.raises(ValueError, match="gate_mode: expected one of 'random'"):
        routers.drawn("rnadom", 3, 4, 5, key)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (routers.Prompts(()), r"experts\[0\].positive_prompts: expected at least one, got none"),
        (routers.Prompts(((1,), ())), r"experts\[0\].positive_prompts: expected tokens, got none"),
        (routers.Prompts(((1,),), ((),)), r"experts\[0\].negative_prompts: expected tokens"),
    ],
)
def test_empty_prompts_are_refused(prompts, message):
    with pytest.raises(ValueError, match=message):
        routers.of_prompts([prompts], routers.embedded(np.eye(3).__getitem__, 1))


def test_rows_that_depend_on_one_another_are_found():
    near = np.array([[1.0, 0, 0], [1, 0.1, 0]])
    assert routers.dependent(np.stack([np.eye(3)[:2], near])) == [1]
    assert routers.dependent(np.ones((2, 4, 3))) == [0, 1]
