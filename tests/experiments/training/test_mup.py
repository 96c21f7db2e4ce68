"""muP: its scales by the paper's table, and the coordinate check of what training changes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lab import registry
from experiments.lab.config import varied
from experiments.models import presets
from experiments.models.next_token import token_losses
from experiments.studies.overtraining_language import stages
from experiments.studies.shared import language_training as training
from experiments.studies.shared.language_config import Model
from experiments.training import Optimizer, Schedule, mup
from sail_jax import architectures
from sail_jax.basis.spaces import spec

TINY = registry.load("overtraining_language").presets["tiny"]
BASE, WIDTHS, SEEDS, STEPS = 16, (16, 128), 6, 4


def _config(width, tied=True, **changes):
    """An OLMo of one block whose heads keep their size."""
    sizes = {"width": width, "heads": width // 8, "head_dim": 8, "hidden": 2 * width, "layers": 1}
    how = {"model_type": "flax_llama", "norm": "layernorm", "vocab": 5, "context": 8}
    return {**how, **sizes, "tied": tied, **changes}


def _spec(config):
    net = presets.build(config)
    shapes = jax.eval_shape(lambda key: training.first(net, key), jax.random.key(0))
    return architectures.of(config).rules(config).spec(shapes)


def _scales(width, tied, **changes):
    return mup.scales(_spec(_config(BASE, tied)), _spec(_config(width, tied, **changes)))


def test_scales_of_three_matrices_by_hand():
    """Four times the width; LeCun's initial values fall by 2 where a matrix reads the width."""
    rules = {"in/kernel": "x* g", "mid/kernel": "g* h", "out/kernel": "h* y"}

    def of_width(n):
        shapes = {"in/kernel": (3, n), "mid/kernel": (n, n), "out/kernel": (n, 2)}
        net = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        return spec(net, rules, spaces={"{x,y}": "outer", "{g,h}": "relu"})

    found = mup.scales(of_width(4), of_width(16))
    assert [tuple(s) for s in found] == [
        ("in/kernel", 1, 1),
        ("mid/kernel", 1, 1 / 4),
        ("out/kernel", 1 / 2, 1 / 4),
    ]


@pytest.mark.soak
def test_scales_are_those_of_the_table():
    """Table 3 of Yang et al.: deviations and Adam's rates relative to those of the base width."""
    grown, base = _config(4 * BASE, tied=False), _config(BASE, tied=False)
    found = {s.path: s for s in _scales(4 * BASE, tied=False)}
    kinds = {"token_embed/embedding": "input", "unembed/kernel": "output"}
    key = jax.random.key(0)
    first = [training.first(presets.build(c), key) for c in (base, grown)]
    for (path, small), (_, large) in zip(
        *(jax.tree_util.tree_leaves_with_path(p) for p in first), strict=True
    ):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        kind = kinds.get(name, "hidden")
        wanted = {"input": 1.0, "output": 1 / 4, "hidden": 1 / 2}[kind]
        assert found[name].rate == (1 if kind == "input" else 1 / 4)
        ratio = float(np.std(large)) * found[name].initial / float(np.std(small))
        # the standard error of a deviation of n normal numbers is 1 / sqrt(2 n) of it
        error = math.sqrt(1 / (2 * small.size) + 1 / (2 * large.size))
        assert abs(math.log(ratio / wanted)) < 5 * error, name
    assert all(s[1:] == (1, 1) for s in _scales(BASE, tied=True))
    with pytest.raises(ValueError, match=r"base must have the 16 units of 'qk.0', which is no"):
        _scales(2 * BASE, True, heads=2, head_dim=16)
    with pytest.raises(ValueError, match="base must have the leaves of spec"):
        _scales(2 * BASE, True, layers=2)


def _moved(width, tied, by_mup):
    """Computes how much a few steps of Adam change logits and hidden units, for each seed: root
    mean squares, `(2, seed)`.
    """
    config = _config(width, tied)
    scales = _scales(width, tied) if by_mup else ()
    if by_mup and tied:
        config["logit_scale"] = BASE / width
    net = presets.build(config)
    tokens = np.random.default_rng(0).integers(0, 5, (16, 9)).astype(np.int32)
    adam = Optimizer(Schedule(0.02, STEPS, decay="constant"), rates=mup.rates(scales))
    transformation = adam.transformation()

    def loss(params):
        return token_losses(net, {"params": params}, tokens[:, :-1], tokens[:, 1:]).mean()

    def seen(params):
        logits, sown = net.apply({"params": params}, tokens[:, :-1], mutable="intermediates")
        return [logits, *jax.tree.leaves(sown)]

    def of_seed(key):
        start = mup.scaled(training.first(net, key), scales)

        def step(carry, _):
            params, state = carry
            update, state = transformation.update(jax.grad(loss)(params), state, params)
            return (jax.tree.map(jnp.add, params, update), state), None

        (end, _), _ = jax.lax.scan(step, (start, transformation.init(start)), None, length=STEPS)
        pairs = zip(seen(start), seen(end), strict=True)
        return jnp.stack([jnp.sqrt(jnp.mean((b - a) ** 2)) for a, b in pairs])

    keys = jax.random.split(jax.random.key(1), SEEDS)
    return np.asarray(jax.jit(jax.vmap(of_seed))(keys)).T


def _growth(tied, by_mup):
    """Computes the exponent of the width in the changes: means and standard errors over seeds."""
    small, large = (np.log(_moved(width, tied, by_mup)) for width in WIDTHS)
    power = (large - small) / math.log(WIDTHS[1] / WIDTHS[0])
    return power.mean(1), power.std(1, ddof=1) / math.sqrt(SEEDS)


# Halfway between what does not depend on the width and what falls or grows by its root, as a sum of
# unrelated terms does. Few units are not yet in the limit: means move by the first correction.
BETWEEN = 0.25


@pytest.mark.soak
@pytest.mark.parametrize("tied", [True, False])
def test_what_training_changes_does_not_depend_on_the_width(tied):
    power, error = _growth(tied, by_mup=True)
    assert (np.abs(power) + 3 * error < BETWEEN).all(), (power, error)


@pytest.mark.soak
def test_in_the_standard_parametrisation_it_grows():
    power, error = _growth(tied=True, by_mup=False)
    assert (power - 3 * error > BETWEEN).all(), (power, error)


@pytest.mark.slow
def test_a_study_draws_and_trains_by_it():
    """Logits, initial parameters and rates of a network twice as wide as the base."""
    model = {"context": 24, "width": 16, "layers": 1, "heads": 2, "hidden": 32}
    plain = varied(TINY, model=model)
    config = varied(plain, model={"mup": 8})
    assert config.network["logit_scale"] == 0.5
    assert "logit_scale" not in plain.network
    assert plain.model.parametrisation() == ()
    scales = {s.path: s for s in config.model.parametrisation()}
    assert scales["token_embed/embedding"].initial == pytest.approx(math.sqrt(2))
    (grown,) = stages._initial(config, presets.build(config.network), [0])
    (drawn,) = stages._initial(plain, presets.build(plain.network), [0])
    ratio = grown["token_embed"]["embedding"] / drawn["token_embed"]["embedding"]
    # one product in float32
    np.testing.assert_allclose(ratio, math.sqrt(2), rtol=4 * float(jnp.finfo(jnp.float32).eps))
    same = grown["block_0"]["q"]["kernel"] == drawn["block_0"]["q"]["kernel"]
    assert same.all()
    assert scales["block_0/q/kernel"].rate == 0.5
    with pytest.raises(ValueError, match=r"^mup must leave whole heads, of 2 at width 16; got 6"):
        Model(width=16, heads=2, hidden=32, mup=6)


@pytest.mark.slow
def test_own_rates_of_parameters_are_checked_and_spare_weight_decay():
    params = {"a": {"kernel": jnp.ones(2)}, "b": {"kernel": jnp.ones(2)}}
    how = {"weight_decay": 0.1, "rates": (("a/kernel", 0.25),)}
    adam = Optimizer(Schedule(0.5, 9, decay="constant"), **how).transformation()
    found, _ = adam.update(jax.tree.map(jnp.ones_like, params), adam.init(params), params)
    # Adam's first step is the sign of the gradient: 1 - b2 = 0.001 keeps eps / 0.001 in float32
    near = {"rtol": float(jnp.finfo(jnp.float32).eps) / 0.001}
    np.testing.assert_allclose(found["a"]["kernel"], -0.5 * (0.25 + 0.1), **near)
    np.testing.assert_allclose(found["b"]["kernel"], -0.5 * (1 + 0.1), **near)
    with pytest.raises(ValueError, match=r"rates.* must be at least 0; got -1.0"):
        Optimizer(Schedule(0.5, 9), rates=(("a", -1.0),))
    unknown = Optimizer(Schedule(0.5, 9), rates=(("c/kernel", 1.0),)).transformation()
    with pytest.raises(ValueError, match=r"rates: no parameter has the path 'c/kernel'"):
        unknown.update(params, unknown.init(params), params)
