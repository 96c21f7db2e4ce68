"""Measures the cross-task linearity of checkpoints, layer by layer, on a few examples.

Zhou et al. (2024, arXiv 2402.03660) measured it on ViT, T5 and soups of ImageNet models (Figures 4
to 10 and 17 to 24). This module measures it on any checkpoints with a known forward pass.
"""

import itertools
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from sail_jax import probe
from sail_jax.checkpoint.operations.running import DEFAULTS, RunOptions
from sail_jax.checkpoint.operations.trying import Examples, Params, Running, running, unfit
from sail_jax.probe.networks import OUTPUT, layers

# Weights of the first of two models.
ALPHAS = (0.25, 0.5, 0.75)
# Scales of task vectors, as in the paper's figures.
SCALES = (0.4,)
# The largest number of sets of three that are measured, the number for the paper's 20 models.
SETS = 1140


class Identity(NamedTuple):
    """Both sides of one identity, for one set of models.

    Attributes:
      name: "interpolation", "average", "addition", "midpoint" or "reflection".
      models: The models, by number.
      points: The weights of the first of two models, or the scales of task vectors; one entry, the
        share of each model, for an average.
      found: The cosines, coefficients and gaps, by layer and point.
      baseline: The mean cosine between the features of the models on the right side, by layer and
        point.
    """

    name: str
    models: tuple[int, ...]
    points: tuple[float, ...]
    found: probe.Linearity
    baseline: probe.Estimate


class Stitched(NamedTuple):
    """Results of upper layers on features from other lower layers, for several layers.

    Attributes:
      name: "plain" (features of the first model in the second), "addition" (the mean of two moved
        models' features in the base), "addition, weights" (features of the two moved models' mean),
        "single" (features of one moved model), "negation" (2 f(base) - f(base + s tau)) or
        "negation, weights" (f(base - s tau)).
      models: The models, by number.
      scale: The scale of task vectors; None for "plain".
      layers: The layers.
      metric: The metric of the upper network with these features, by layer.
      upper: The metric of the unchanged upper network.
    """

    name: str
    models: tuple[int, ...]
    scale: float | None
    layers: tuple[str, ...]
    metric: probe.Estimate
    upper: probe.Estimate


class LayerwiseLinearity(NamedTuple):
    """The results of `measure_linearity`.

    Attributes:
      identities: Both sides of each identity, for each pair or model.
      sets: Which models are averaged, by number.
      averaging: Averages compared with ensembles, for each of the sets; None without labels.
      metric: "accuracy" if each example has a label, "loss" in nats if each token has one; None
        without labels.
      stitched: Results of upper layers on features from other lower layers; empty without labels.
    """

    identities: tuple[Identity, ...]
    sets: tuple[tuple[int, ...], ...]
    averaging: probe.Averaging | None
    metric: str | None
    stitched: tuple[Stitched, ...]


def measure_linearity(
    paths: Sequence[str | PathLike[str]],
    examples: Examples,
    base: str | PathLike[str] | None = None,
    config: Mapping[str, Any] | None = None,
    *,
    alphas: Sequence[float] = ALPHAS,
    scales: Sequence[float] = SCALES,
    every_layer: bool = False,
    batch_size: int = 8,
    run: RunOptions = DEFAULTS,
) -> LayerwiseLinearity:
    """Measures how linear checkpoints are in their parameters, layer by layer.

    For every pair, it compares features of interpolated weights with interpolated features. For all
    models, and for sets of two and three, it compares averaged weights with ensembles. With a base,
    it also compares features under sums of task vectors, and under their negatives. It also
    stitches lower layers of combined models to upper ones. Features are the outputs of a network's
    blocks, with all tokens of an example concatenated. For T5 they are, as in the paper, the mean
    over the encoder's tokens, and the decoder's first. All models are in memory twice, in float32.

    Args:
      paths: The checkpoints of the models, two or more.
      examples: The examples that they are run on.
      base: The checkpoint before fine-tuning. None: no addition or negation.
      config: The configuration of the models; by default the first one's config.json.
      alphas: The weights of the first of two models, between 0 and 1.
      scales: The scales of task vectors.
      every_layer: Whether features are stitched at every layer, instead of at a quarter, a half and
        three quarters of them.
      batch_size: The number of examples that are run at a time.
      run: Whether PyTorch's pickles are read, and models downloaded.

    Returns:
      The estimates, with standard errors over examples.

    Raises:
      CheckpointError: If the configuration is missing, no forward pass of its architecture is
        known, or the models cannot be run on these examples.
      ValueError: If the architecture is unknown.

    References:
      Zhou et al., On the Emergence of Cross-Task Linearity, 2024 (arXiv 2402.03660).
    """
    everything = [*paths] if base is None else [*paths, base]
    ready = running(everything, examples, config, run=run)
    models = ready.models[: len(paths)]
    origin = None if base is None else ready.models[-1]
    try:
        identities = _identities(ready, models, origin, tuple(alphas), tuple(scales), batch_size)
        if "labels" not in ready.data:
            return LayerwiseLinearity(tuple(identities), (), None, None, ())
        sets = _sets(len(models))
        metric = "accuracy" if ready.data["labels"].ndim == 1 else "loss"
        score = _correct if metric == "accuracy" else ready.loss
        weights = np.array([[(i in s) / len(s) for i in range(len(models))] for s in sets])
        averaged = probe.averaging(
            _outputs(ready), models, ready.data, score, weights, batch_size=batch_size
        )
        stitched = _stitched(ready, models, origin, tuple(scales), score, every_layer, batch_size)
    except (TypeError, LookupError, ValueError) as error:
        raise unfit(paths[0], error) from error
    return LayerwiseLinearity(tuple(identities), sets, averaged, metric, tuple(stitched))


def _sets(models: int) -> tuple[tuple[int, ...], ...]:
    """Lists all pairs, sets of three (or `SETS` of them, drawn once) and the set of all."""
    threes = list(itertools.combinations(range(models), 3))
    if len(threes) > SETS:
        chosen = np.random.default_rng(0).choice(len(threes), SETS, replace=False)
        threes = [threes[i] for i in sorted(chosen)]
    sets = [*itertools.combinations(range(models), 2), *threes, tuple(range(models))]
    return tuple(dict.fromkeys(sets))


def _outputs(run: Running) -> probe.Apply:
    return lambda params, batch: run.network(params, batch)[0]


def _pooled(run: Running) -> probe.Apply:
    """Makes the network with the features that are compared."""
    if run.family.name != "t5":
        return run.network

    def apply(params: Params, batch: Params) -> tuple[Array, dict[str, Array]]:
        out, seen = run.network(params, batch)
        # Texts differ in length, so only the mean over the encoder's tokens and the decoder's first
        # state are comparable between them. The paper uses these two as well, after sentence-T5
        # (Ni et al., 2021).
        first = {name: name.startswith("decoder.") for name in seen}
        return out, {n: x[:, 0] if first[n] else x.mean(1) for n, x in seen.items()}

    return apply


def _identities(
    run: Running, models: Sequence[Params], base: Params | None, alphas: tuple[float, ...],
    scales: tuple[float, ...], batch_size: int,
) -> list[Identity]:  # fmt: skip
    """Measures equations 1 to 4, and cross-task linearity itself, for every pair or model."""
    apply, data, k = _pooled(run), run.data, len(models)
    how: dict[str, Any] = {"batch_size": batch_size}
    found = []

    def add(
        name: str, which: tuple[int, ...], points: Sequence[float], it: probe.Linearity
    ) -> None:
        found.append(Identity(name, which, tuple(points), it, _baseline(it)))

    for i, j in itertools.combinations(range(k), 2):
        it = probe.cross_task_linearity(apply, models[i], models[j], data, alphas, **how)
        add("interpolation", (i, j), alphas, it)
    if k > 2:
        it = probe.k_model_linearity(apply, models, data, **how)
        add("average", tuple(range(k)), [1 / k], it)
    if base is None:
        return found
    for i, j in itertools.combinations(range(k), 2):
        pair = [models[i], models[j]]
        add("addition", (i, j), scales, probe.addition(apply, base, pair, data, scales, **how))
    for i, form in itertools.product(range(k), ("midpoint", "reflection")):
        it = probe.negation(apply, base, models[i], data, scales, form=form, **how)
        add(form, (i,), scales, it)
    return found


def _baseline(found: probe.Linearity) -> probe.Estimate:
    """Returns mean cosines between the members' features by layer and point.

    The error is the mean of the members' errors, because all of them use the same examples.
    """
    points, members = found.cosine.value.shape[1], found.baseline.value.shape[-1]
    upper = np.triu_indices(members, 1)

    def mean(x: Array) -> Array:
        pairs = x[..., upper[0], upper[1]].mean(-1)
        return pairs if pairs.ndim > 1 else jnp.tile(pairs[:, None], points)

    return probe.Estimate(*map(mean, found.baseline))


def _stitched(
    run: Running, models: Sequence[Params], base: Params | None, scales: tuple[float, ...],
    score: probe.Metric, every_layer: bool, batch_size: int,
) -> list[Stitched]:  # fmt: skip
    """Measures figures 9 and 10, and the features of each model in every other."""
    # A T5 decoder's state from one encoder cannot continue with another encoder.
    names = [
        name
        for name in layers(run.network, models[0], run.data)
        if name != OUTPUT and not name.startswith("decoder.")
    ]
    if not every_layer:
        at = (round(share * len(names)) - 1 for share in (0.25, 0.5, 0.75))
        names = [names[i] for i in dict.fromkeys(max(0, i) for i in at)]
    found = []

    def add(
        name: str, which: tuple[int, ...], scale: float | None, lower: list[Params], upper: Params,
        weights: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        it = probe.stitching(
            run.network, lower, upper, run.data, score, weights, layers=names,
            batch_size=batch_size,
        )  # fmt: skip
        found.append(Stitched(name, which, scale, tuple(it.layers), it.stitched, it.upper))

    for i, j in itertools.permutations(range(len(models)), 2):
        add("plain", (i, j), None, [models[i]], models[j])
    if base is None:
        return found
    for s in scales:
        ahead = [_moved(base, model, s) for model in models]
        for i, j in itertools.combinations(range(len(models)), 2):
            pair = [ahead[i], ahead[j]]
            add("addition", (i, j), s, pair, base)
            # Half way between the two moved models lies base + s (tau_i + tau_j) / 2.
            add("addition, weights", (i, j), s, [_moved(pair[0], pair[1], 0.5)], base)
        for i, model in enumerate(models):
            add("single", (i,), s, [ahead[i]], base)
            add("negation", (i,), s, [base, ahead[i]], base, (2.0, -1.0))
            add("negation, weights", (i,), s, [_moved(base, model, -s)], base)
    return found


@jax.jit
def _moved(base: Params, params: Params, scale: ArrayLike) -> Params:
    """Computes base + scale (params - base) of floating tensors."""

    def leaf(b: Array, p: Array) -> Array:
        return b + scale * (p - b) if jnp.issubdtype(b.dtype, jnp.floating) else b

    return jax.tree.map(leaf, base, params)


def _correct(out: Array, batch: Mapping[str, Array]) -> Float[Array, "example"]:
    """Checks whether the class of each example is right."""
    return (out.argmax(-1) == batch["labels"]).astype(jnp.float32)
