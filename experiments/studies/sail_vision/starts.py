"""The ways in which `sail_vision` starts a training, from two smaller trained ResNets or none.

Depth is SAIL's eq. 9 with rows that are one-hot: each stage repeats its last block, since others
may project and have no like. Width is a method of `sail_jax.growth`, given the same key for both
sources, so that random maps are the same for both. Their weighted sum follows, and BatchNorm's
running statistics are measured anew.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PRNGKeyArray, PyTree

from experiments.models.resnet import ResNet
from experiments.studies.sail_vision.config import LIGO, OTHER, SCRATCH, TRANSFORMATIONS, Config
from experiments.studies.sail_vision.data import Data, Scale, weights
from experiments.studies.sail_vision.training import Learner, applied, standardised
from experiments.training.sail_start import brought, merged
from sail_jax import architectures
from sail_jax.align import weight_matching
from sail_jax.basis.change_basis import change_basis
from sail_jax.basis.spaces import Spec
from sail_jax.growth import learned


def spec_of(sizes: Mapping[str, Any], variables: PyTree) -> Spec:
    return architectures.of(sizes).rules(sizes).spec(variables)


def aligned(sizes: Mapping[str, Any], sources: Sequence[PyTree]) -> list[PyTree]:
    """The sources with the units of all in the order of the first's (Git Re-Basin)."""
    first, *others = sources
    spec = spec_of(sizes, first)
    return [first, *(change_basis(o, spec, weight_matching(first, o, spec)) for o in others)]


def deepened(variables: PyTree, sizes: Mapping[str, Any], new: Sequence[int]) -> PyTree:
    """The variables of a ResNet with `new` blocks by stage, each stage's last block repeated."""
    was = sizes["blocks"]
    out = {}
    for collection, modules in variables.items():
        modules = dict(modules)
        for stage, (old, more) in enumerate(zip(was, new, strict=True)):
            for b in range(old, more):
                modules[f"stage{stage}_block{b}"] = modules[f"stage{stage}_block{old - 1}"]
        out[collection] = modules
    return out


def transformed(
    variables: PyTree,
    source: Mapping[str, Any],
    target: Mapping[str, Any],
    transformation: str,
    key: PRNGKeyArray,
) -> PyTree:
    """One source in the target's shape."""
    method, options = TRANSFORMATIONS[transformation]
    deep = {**source, "blocks": target["blocks"]}
    stretched = deepened(variables, source, target["blocks"])
    return brought([(stretched, deep)], target, method, key, **options)[0]


def start(
    way: str,
    config: Config,
    learner: Learner,
    sources: Mapping[str, Sequence[PyTree]],
    data: Data,
    keys: Sequence[PRNGKeyArray],
) -> PyTree:
    """The ResNet's variables before the first step of the large training.

    sources: by paradigm, the trained small networks. keys: of initial weights, of transformations.
    """
    first, second = keys
    scratch = learner.scratch(first)
    if way == SCRATCH:
        return scratch
    small, large = config.network(large=False), config.network(large=True)
    own = learner.paradigm
    if way == OTHER:
        own = next(p for p in sources if p != own)
    pair = sources[own]
    if way == LIGO:
        mixed = merged(pair, jnp.asarray(weights(data), jnp.float32))
        stretched = deepened(mixed, small, large["blocks"])
        grown = ligo(config, learner, stretched, data, second)
        return learner.renewed(grown, data.learn.images)
    share = {"uniform_soup": [0.5, 0.5], "first": [1.0, 0.0], "second": [0.0, 1.0]}
    weight = np.asarray(share.get(way, weights(data)))
    method = way if way in TRANSFORMATIONS else config.transformation
    used = [(model, w) for model, w in zip(pair, weight, strict=True) if w]
    grown = [transformed(model, small, large, method, second) for model, _ in used]
    mixed = merged(grown, jnp.array([w for _, w in used], jnp.float32))
    if own == "byol" and way == OTHER:  # which has not learned to classify
        mixed = {**mixed, "params": {**mixed["params"], "head": scratch["params"]["head"]}}
    return learner.renewed(mixed, data.learn.images)


def ligo(
    config: Config, learner: Learner, variables: PyTree, data: Data, key: PRNGKeyArray
) -> PyTree:
    """Wider by maps that are learned on the new task (Wang et al. 2023), under the statistics of
    the batch; the running ones are then to be measured."""
    at = np.arange(config.maps.steps * config.budget.batch) % len(data.learn.labels)
    chosen = data.learn.where(np.random.default_rng(config.seed).permutation(at))
    shape = config.maps.steps, config.budget.batch
    batches = jax.tree.map(lambda x: jnp.asarray(x).reshape(*shape, *x.shape[1:]), chosen)
    return _ligo(config, learner.net, learner.scale, variables, batches, key)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _ligo(
    config: Config,
    net: ResNet,
    scale: Scale,
    variables: PyTree,
    batches: PyTree,
    key: PRNGKeyArray,
) -> PyTree:
    large = config.network(large=True)
    source = {**config.network(large=False), "blocks": large["blocks"]}
    spec = spec_of(source, variables)
    image = batches.images[0, :1]
    wide = spec_of(large, jax.eval_shape(net.init, key, image))
    sizes = {
        space.name: wide.space(space.name).size
        for space in spec.spaces
        if wide.space(space.name).size != space.size
    }

    def loss(grown: PyTree, batch: Any) -> jax.Array:
        seen = standardised(batch.images, scale)
        logits, _ = applied(net, grown["params"], grown["batch_stats"], seen)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()

    return learned.learn_maps(
        loss,
        variables,
        learned.ligo_spec(spec),
        learned.ligo_init(spec, sizes, key),
        learned.ligo_maps,
        batches,
        steps=config.maps.steps,
        optimizer=optax.adam(config.maps.rate),
    ).params
