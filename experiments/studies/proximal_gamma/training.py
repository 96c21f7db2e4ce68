"""Trains and measures in `proximal_gamma`: parts of the text, models, distances and weights.

All repetitions are computed at once. `run` calls these functions in its stages.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree, UInt

from experiments.data import text
from experiments.data.files import DataError, refused
from experiments.data.registry import SAME
from experiments.data.tokens import Ids
from experiments.lab.config import varied
from experiments.models.next_token import token_losses
from experiments.studies.proximal_gamma.config import Config
from experiments.studies.shared import gamma_sweep as line
from experiments.training.descent import descend
from sail_jax import distances
from sail_jax.distances import Distance

PERCENTILES = (33, 66)
# For each distance: whether it is squared, and its name.
DISTANCES = {
    "mmd_mean": (True, "MMD, block means"),
    "w1_mean": (False, "Wasserstein-1, block means"),
    "mmd": (True, "MMD, unigrams of blocks"),
    "energy": (True, "energy, unigrams of blocks"),
    "js": (True, "Jensen-Shannon, unigrams"),
    "tv": (False, "total variation, unigrams"),
    "tv_bigrams": (False, "total variation, bigrams"),
}
LABELS = {**{k: label for k, (_, label) in DISTANCES.items()}, "parameters": "parameters (eq. 4)"}


class Data(NamedTuple):
    """The text in blocks.

    Attributes:
      blocks: All training blocks.
      parts: The blocks of D_1, D_2 and D_t, as indices.
      held_out: Blocks like D_t's, from text that no model is trained on.
    """

    blocks: UInt[np.ndarray, "block length"]
    parts: text.Parts
    held_out: UInt[np.ndarray, "held_out length"]


def load(config: Config) -> tuple[Config, Data]:
    """Cuts the text into blocks and splits them by their mean token value.

    The thresholds are percentiles of the training blocks, and also apply to the held-out blocks. If
    the target is another text, its blocks are D_t, and the first text has no third part.

    Returns the config, with the size of the vocabulary if it is only known from the files; and the
    blocks and their parts.

    Raises `DataError` if a text cannot be read, has too few blocks of the config's length, or a
    different vocabulary from the first.
    """
    with refused():
        corpus = config.data.read()
        if config.data.known_vocab is None:
            config = varied(config, data={"vocab": corpus.vocab})
        learn, held_out = (
            _blocks(config, k, part) for k, part in enumerate((corpus.train, corpus.held_out))
        )
        thresholds = np.percentile(learn.mean(1), PERCENTILES)
        parts = text.by_mean(learn, thresholds)
        if config.target_data.name == SAME:
            high = held_out[text.by_mean(held_out, thresholds)[2]]
        else:
            target = config.target_data.read("target_data")
            if target.vocab != corpus.vocab:
                raise DataError(
                    f"target_data must have the {corpus.vocab} tokens of data, from one tokenizer; "
                    f"got {target.vocab}"
                )
            more, high = (
                _blocks(config, k, part) for k, part in enumerate((target.train, target.held_out))
            )
            parts = (*parts[:2], np.arange(len(learn), len(learn) + len(more)))
            learn = np.concatenate([learn, more])
        _check_left(config, parts, high)
    order = np.random.default_rng((config.seed, 0)).permutation(len(high))
    return config, Data(learn, parts, high[order[: config.blocks.held_out]])


def _blocks(config: Config, part: int, tokens: Ids) -> UInt[np.ndarray, "block length"]:
    """Returns the blocks of a text, at most `of_text` of them, in the order of the text."""
    every, most = text.blocks(tokens, config.blocks.length), config.blocks.of_text
    if most is None or most >= len(every):
        return np.asarray(every)
    chosen = np.random.default_rng((config.seed, 3, part)).choice(len(every), most, replace=False)
    return np.asarray(every[np.sort(chosen)])


def _check_left(config: Config, parts: text.Parts, high: np.ndarray) -> None:
    """Raises `ValueError` if a text has too few blocks."""
    for field, most in (
        ("held_out", len(high)),
        # With beta = 1 and alpha = 0, both sources come from the target and have no common block.
        ("source", min(*map(len, parts[:2]), len(parts[2]) // 2)),
    ):
        if getattr(config.blocks, field) > most:
            raise ValueError(
                f"blocks.{field} must be at most {most}, because the text has only so many "
                "blocks of "
                f"{config.blocks.length} tokens; got {getattr(config.blocks, field)}"
            )


def sources(
    config: Config, data: Data, alpha: float, beta: float
) -> Int[np.ndarray, "seed 2 count"]:
    """Draws the blocks of the two sources for every repetition.

    Args:
      config: The config.
      data: The text.
      alpha: Fraction of blocks that both sources have in common, in [0, 1].
      beta: Fraction of each source's blocks from the target, in [0, 1].

    Returns:
      Indices into the blocks.

    Raises:
      ValueError: If `alpha` or `beta` is outside [0, 1], or a part has too few blocks.
    """

    def draw(seed: int) -> np.ndarray:
        rng = np.random.default_rng((config.seed, 1, seed))
        return text.overlapping(rng, data.parts, config.blocks.source, alpha=alpha, beta=beta)

    return np.stack([draw(seed) for seed in range(config.replicates)])


def next_token_loss(
    config: Config, params: PyTree, some: Int[Array, "n length"]
) -> Float[Array, ""]:
    """Computes the mean cross-entropy of the tokens of some blocks, all but each block's first."""
    return token_losses(config.network(), params, some[:, :-1], some[:, 1:]).mean()


def held_out_loss(config: Config, held_out: Int[Array, "n length"], params: PyTree) -> Array:
    """Computes the mean loss over all held-out blocks, a few at a time to save memory."""
    block_loss = lambda block: next_token_loss(config, params, block[None])  # noqa: E731
    return jax.lax.map(block_loss, held_out.astype(int), batch_size=config.training.batch).mean()


def trained(
    config: Config,
    params: PyTree,
    blocks: Array,
    part: tuple[Int[Array, " most"], Int[Array, ""]],
    key: Array,
    steps: int,
    measure: Callable[[PyTree], Any],
) -> tuple[PyTree, Any]:
    """Trains a model on one part of the blocks.

    Equal keys give equal minibatches.

    Args:
      config: The config.
      params: The variables before the first step.
      blocks: All blocks, of shape (block, length).
      part: The blocks of the part, as indices padded to a common length, and their number.
      key: The key of the minibatches.
      steps: Number of steps, a multiple of `config.every`.
      measure: A function of the variables that computes the measurements.

    Returns:
      The variables after training; and what `measure` returned before the first step and after
      every `config.every` steps, stacked.
    """
    (which, count), how = part, config.training

    def draw(t: Array) -> Array:
        drawn = jax.random.randint(jax.random.fold_in(key, t), (how.batch,), 0, count)
        return blocks[which[drawn]].astype(int)

    end = descend(
        lambda params, _, rows: (next_token_loss(config, params, rows), None),
        optax.scale_by_adam(),
        lambda t: how.rate * jnp.minimum(1, (t + 1) / how.warmup),
        params,
        jnp.arange(steps),
        draw,
        measure=lambda params, *_: measure(params),
        every=config.every,
    )
    return end.params, end.measured


def _keys(config: Config) -> Array:
    """Creates six keys for each repetition, of shape (seed, 6).

    Three are for initial weights, two for minibatches of the sources, and the last for minibatches
    of the target.
    """
    return jax.random.split(jax.random.key(config.seed), (config.replicates, 6))


@partial(jax.jit, static_argnums=0)
def initial(config: Config) -> PyTree:
    """Draws initial weights of three models for every repetition.

    Returns the variables, in leaves of shape (seed, 3, ...).
    """
    init = config.network().init
    tokens = jnp.zeros((1, config.blocks.length - 1), int)
    return jax.vmap(jax.vmap(lambda key: init(key, tokens)))(_keys(config)[:, :3])


def _looks(config: Config, steps: int) -> Array:
    """Returns the positions of the looks up to `steps` among the measurements of `trained`."""
    return jnp.array([look // config.every for look in config.looks if look <= steps])


def parts(
    data: Data, pairs: Int[np.ndarray, "seed 2 count"]
) -> tuple[Int[np.ndarray, "seed 3 most"], Int[np.ndarray, "seed 3"]]:
    """Lists the training data of theta_1, theta_2 and theta*: the two sources, and the target.

    Args:
      data: The text.
      pairs: The result of `sources`.

    Returns:
      The indices of the blocks, padded with zeros to one length; and their numbers.
    """
    target = data.parts[2]
    # One length for all three, so that one program trains them. The target is longer than a source.
    filled = np.zeros((len(pairs), 3, len(target)), np.int32)
    filled[:, :2, : pairs.shape[-1]], filled[:, 2] = pairs, target
    count = [pairs.shape[-1]] * 2 + [len(target)]
    return filled, np.tile(np.array(count, np.int32), (len(pairs), 1))


def _over(config: Config, fn: Callable[..., Any], *trees: PyTree) -> Any:
    """Maps `fn` over the two leading axes, with `config.at_once` calls in parallel."""
    seeds, several = jax.tree.leaves(trees)[0].shape[:2]
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), trees)
    count = min(config.at_once, seeds * several)
    results = jax.lax.map(lambda args: fn(*args), flat, batch_size=count)
    return jax.tree.map(lambda leaf: leaf.reshape(seeds, several, *leaf.shape[1:]), results)


@partial(jax.jit, static_argnums=0)
def learn(config: Config, first: PyTree, data: Data, which: Array, count: Array) -> PyTree:
    """Trains theta_1 and theta_2 on the sources, and theta* on the target.

    Args:
      config: The config; static.
      first: Initial variables, in leaves of shape (seed, 3, ...).
      data: The text.
      which: The blocks of each part, from `parts`.
      count: Their numbers, from `parts`.

    Returns:
      `model`, the variables in leaves of shape (seed, 3, ...); and `loss`, the held-out loss on the
      target at all looks, of shape (seed, 3, look). The loss of theta* is the loss of training from
      scratch.
    """
    measure = partial(held_out_loss, config, jnp.asarray(data.held_out))

    def of_part(params: PyTree, part: tuple, key: Array) -> dict[str, Any]:
        blocks, steps = jnp.asarray(data.blocks), config.training.steps
        model, loss = trained(config, params, blocks, part, key, steps, measure)
        return {"model": model, "loss": loss[_looks(config, steps)]}

    return _over(config, of_part, first, (which, count), _keys(config)[:, 3:])


@partial(jax.jit, static_argnums=(0, 1))
def tune(config: Config, steps: int, models: PyTree, data: Data) -> dict[str, Array]:
    """Trains on the target from every point of the line through theta_1 and theta_2.

    Returns `loss`, the held-out loss at the looks up to `steps`, of shape (seed, gamma, look).
    """
    blocks, target = jnp.asarray(data.blocks), jnp.asarray(data.parts[2])
    part = target, jnp.asarray(len(target))
    measure = partial(held_out_loss, config, jnp.asarray(data.held_out))

    def at_gamma(seed: Array, gamma: Array) -> Array:
        first, second = (jax.tree.map(lambda leaf, i=i: leaf[seed, i], models) for i in range(2))
        params = line.on_line(first, second, gamma)
        key = _keys(config)[seed, 5]
        return trained(config, params, blocks, part, key, steps, measure)[1][_looks(config, steps)]

    gamma = jnp.asarray(config.gamma.values(), jnp.float32)
    pairs = jnp.meshgrid(jnp.arange(config.replicates), gamma, indexing="ij")
    return {"loss": _over(config, at_gamma, *pairs)}


def unigrams(
    some: UInt[np.ndarray, "block length"], vocab: int
) -> Float[np.ndarray, "block vocab"]:
    """Computes how often each token occurs in each block.

    Args:
      some: The blocks.
      vocab: The size of the vocabulary.

    Returns:
      The frequency of each token, rows of sum 1.

    >>> unigrams(np.array([[1, 1, 0, 2]], np.uint8), 3).tolist()
    [[0.25, 0.5, 0.25]]
    """
    at = np.arange(len(some))[:, None] * vocab + some
    counts = np.bincount(at.ravel(), minlength=len(some) * vocab)
    return counts.reshape(-1, vocab) / some.shape[1]


def mapped(config: Config, data: Data) -> Float[np.ndarray, "3 block 2"]:
    """Embeds blocks of D_1, D_2 and D_t in the plane, by t-SNE of their token frequencies.

    SAIL does not specify the features of its maps.

    Returns the positions of `config.tsne` blocks of each part, or of as many as the smallest part
    has.

    References:
      van der Maaten and Hinton, Visualizing data using t-SNE, 2008.
    """
    from sklearn.decomposition import PCA  # slow to import
    from sklearn.manifold import TSNE

    rng = np.random.default_rng((config.seed, 4))
    count = min(config.tsne, *map(len, data.parts))
    drawn = np.concatenate([rng.permutation(part)[:count] for part in data.parts])
    shares = unigrams(data.blocks[drawn], config.vocab).astype(np.float32)
    few = PCA(min(50, *shares.shape), random_state=config.seed).fit_transform(shares)
    perplexity = min(30.0, float(count))
    return (
        TSNE(perplexity=perplexity, random_state=config.seed)
        .fit_transform(few)
        .reshape(3, count, 2)
    )


def apart(config: Config, data: Data, overlaps: tuple[float, float]) -> dict[str, np.ndarray]:
    """Measures distances between sources and target, and predicts gamma from each.

    Args:
      config: The config.
      data: The text.
      overlaps: alpha and beta, as in `sources`.

    Returns:
      `value` and `error`, the distances and their standard errors, of shape (seed, distance, pair);
      and `weight`, the weight of theta_1 by eq. 11, of shape (seed, distance). It is NaN if the
      sources cannot be distinguished.
    """
    shape = config.replicates, len(DISTANCES), len(line.PAIRS)
    value, error, weight = np.zeros(shape), np.zeros(shape), np.zeros(shape[:2])
    for seed, pair in enumerate(sources(config, data, *overlaps)):
        rng = np.random.default_rng((config.seed, 2, seed))
        one, two, target = (
            data.blocks[rng.permutation(part)[: config.blocks.distance]]
            for part in (*pair, data.parts[2])
        )
        for i, (name, by_pair) in enumerate(measured(one, two, target, config.vocab).items()):
            value[seed, i] = [float(by_pair[p].value) for p in line.PAIRS]
            error[seed, i] = [float(by_pair[p].stderr) for p in line.PAIRS]
            weight[seed, i] = line.weight(by_pair, squared=DISTANCES[name][0])
    return {"value": value, "error": error, "weight": weight}


def measured(
    one: UInt[np.ndarray, "m length"],
    two: UInt[np.ndarray, "n length"],
    target: UInt[np.ndarray, "k length"],
    vocab: int,
) -> dict[str, dict[str, Distance]]:
    """Measures every distance of `DISTANCES` between three samples of blocks.

    Args:
      one: Blocks of the first source.
      two: Blocks of the second source.
      target: Blocks of the target.
      vocab: The size of the vocabulary.

    Returns:
      Distances by their name, then by the pairs of `gamma_sweep.PAIRS`. The MMD has one bandwidth
      for all pairs.
    """
    streams = one, two, target
    means = [stream.mean(1) for stream in streams]
    shares = [unigrams(stream, vocab) for stream in streams]
    bigrams = partial(distances.total_variation_tokens, n=2)
    by_name = {
        "mmd_mean": line.mmd(*(mean[:, None] for mean in means)),
        "w1_mean": line.distances(distances.wasserstein, *means),
        "mmd": line.mmd(*shares),
        "energy": line.distances(distances.energy, *shares),
        "js": line.distances(distances.jensen_shannon_tokens, *streams),
        "tv": line.distances(distances.total_variation_tokens, *streams),
        "tv_bigrams": line.distances(bigrams, *streams),
    }
    return {name: by_name[name] for name in DISTANCES}
