"""Initial weights for the trainings of `sail_vision`, from two small trained ResNets or none.

First the sources get as many blocks as the large network, by SAIL's eq. 9 with one-hot rows: each
stage repeats its last block. (Its first block may project and then differs from all others.) Then
they are widened by a method of `sail_jax.growth`, with one key for both, so that random maps are
equal. The last step is their weighted sum. BatchNorm's running statistics are measured again
afterwards.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from experiments.studies.sail_vision.config import LIGO, OTHER, SCRATCH, TRANSFORMATIONS
from experiments.studies.sail_vision.data import Data, Examples, weights
from experiments.studies.sail_vision.training import Learner, applied
from experiments.studies.shared.growth_ways import by_maps, growing, rules
from experiments.training.sail_start import brought, merged
from sail_jax.align import weight_matching
from sail_jax.basis.change_basis import change_basis


def aligned(sizes: Mapping[str, Any], sources: Sequence[PyTree]) -> list[PyTree]:
    """Permutes the units of all sources to match the first one's.

    It returns the unchanged first source, and the others with permuted units.

    References:
      Ainsworth et al., Git Re-Basin, 2023 (arXiv 2209.04836).
    """
    first, *others = sources
    spec = rules(sizes, first)
    return [first, *(change_basis(o, spec, weight_matching(first, o, spec)) for o in others)]


def deepened(variables: PyTree, sizes: Mapping[str, Any], new: Sequence[int]) -> PyTree:
    """Repeats the last block of each stage of a ResNet up to the given number.

    - `new`: wanted number of blocks of each stage, at least the present ones.
    """
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
    """Brings one source to the depth and the width of the target.

    It returns variables with the target's shapes. BatchNorm's statistics are transformed too, and
    must be measured again.
    """
    method, options = TRANSFORMATIONS[transformation]
    deep = {**source, "blocks": target["blocks"]}
    stretched = deepened(variables, source, target["blocks"])
    return brought([(stretched, deep)], target, method, key, **options)[0]


def start(
    way: str,
    learner: Learner,
    sources: Mapping[str, Sequence[PyTree]],
    data: Data,
    keys: Sequence[PRNGKeyArray],
) -> PyTree:
    """Creates the initial variables of a training of the large network."""
    config, (first, second) = learner.config, keys
    scratch = learner.scratch(first)
    if way == SCRATCH:
        return scratch
    small, large = config.network(large=False), config.network(large=True)
    own = learner.paradigm
    if way == OTHER:
        own = next(p for p in sources if p != own)
    pair = sources[own]
    if way == LIGO:
        # LiGO has one source, which is SAIL's merge of the two
        mixed = merged(pair, jnp.asarray(weights(data), jnp.float32))
        stretched = deepened(mixed, small, large["blocks"])
        grown = ligo(learner, stretched, data, second)
        return learner.renewed(grown, data.learn.images)
    share = {"uniform_soup": [0.5, 0.5], "first": [1.0, 0.0], "second": [0.0, 1.0]}
    weight = np.asarray(share.get(way, weights(data)))
    method = way if way in TRANSFORMATIONS else config.transformation
    # A source of weight 0 does not have to be transformed.
    used = [(model, w) for model, w in zip(pair, weight, strict=True) if w]
    # One key for both sources, so that random maps are equal.
    grown = [transformed(model, small, large, method, second) for model, _ in used]
    mixed = merged(grown, jnp.array([w for _, w in used], jnp.float32))
    # BYOL's sources have not learned to classify, so the head is new
    if own == "byol" and way == OTHER:
        mixed = {**mixed, "params": {**mixed["params"], "head": scratch["params"]["head"]}}
    return learner.renewed(mixed, data.learn.images)


def ligo(learner: Learner, variables: PyTree, data: Data, key: PRNGKeyArray) -> PyTree:
    """Widens a source by maps that are learned on the new task.

    The loss normalises by the statistics of each batch. The running statistics of the result are
    not valid and must be measured.

    References:
      Wang et al., Learning to Grow Pretrained Models (LiGO), 2023 (arXiv 2303.00980).
    """
    config = learner.config
    # Images are used repeatedly if there are fewer than required.
    at = np.arange(config.maps.steps * config.budget.batch) % len(data.learn.labels)
    chosen = data.learn.where(np.random.default_rng(config.seed).permutation(at))
    shape = config.maps.steps, config.budget.batch
    batches = jax.tree.map(lambda x: jnp.asarray(x).reshape(*shape, *x.shape[1:]), chosen)
    return _ligo(learner, variables, batches, key)


@partial(jax.jit, static_argnums=0)
def _ligo(learner: Learner, variables: PyTree, batches: Examples, key: PRNGKeyArray) -> PyTree:
    """Learns the maps of `ligo` and applies them."""
    config, net = learner.config, learner.net
    large = config.network(large=True)
    source = {**config.network(large=False), "blocks": large["blocks"]}
    wide = rules(large, jax.eval_shape(net.init, key, batches.images[0, :1]))
    spec = rules(source, variables)

    def loss(grown: PyTree, batch: PyTree) -> Array:
        logits, _ = applied(net, grown["params"], grown["batch_stats"], learner.seen(batch.images))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()

    return by_maps(loss, variables, spec, growing(spec, wide), batches, config.maps.rate, key)
