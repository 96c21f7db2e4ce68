"""Makes initial routers for mixtures of experts: random, zero, or from prompts.

A router has a row for each expert. A token's state is multiplied by the rows, and the experts with
the largest products are used. A row in the direction of the states of some prompts therefore routes
similar text to its expert:

    row = (s - t) / |s - t|,    with the states s of positive and t of negative prompts

The states are embeddings (`embedded`), or the input of each layer of the dense network (`hidden`).
mergekit-moe computes the same rows, but runs the network in bfloat16.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from sail_jax import architectures
from sail_jax.architectures.table import count, stated
from sail_jax.checks import one_of
from sail_jax.configurations import Config

Drawn = Literal["random", "uniform_random", "zero"]
"""Routers that do not need prompts."""
Read = Literal["hidden", "hidden_avg", "hidden_last", "cheap_embed"]
"""Routers from prompts: states of the last token ("hidden" or "hidden_last"), the mean over all
tokens, or embeddings.
"""

Rows = Callable[[Int[np.ndarray, " n"]], Float[np.ndarray, "n width"]]
"""A function that looks up the embeddings of tokens."""
States = Callable[[Sequence["Tokens"]], Float[np.ndarray, "prompt layer width"]]
"""A function that computes the state of each prompt at the input of each layer."""
Tokens = Sequence[int]
"""A prompt: the numbers of its tokens."""

_LEAST = 1e-8

TOGETHER = 1 << 28
"""The bytes of activations of prompts that run together. The network is read once for each such
group. Larger groups need fewer reads and more memory.
"""


class Prompts(NamedTuple):
    """The prompts that describe an expert.

    Attributes:
      positive: Prompts for this expert, at least one.
      negative: Prompts for other experts.
    """

    positive: tuple[Tokens, ...]
    negative: tuple[Tokens, ...] = ()


def drawn(
    kind: Drawn, layers: int, experts: int, width: int, key: Key[Array, ""]
) -> Float[np.ndarray, "layer expert width"]:
    """Makes rows of routers without prompts.

    Args:
      kind: "random" draws from the standard normal distribution. "uniform_random" draws uniformly
        up to 1 / sqrt(width), like PyTorch's linear layers. "zero" gives every expert the same
        weight.
      layers: The number of layers.
      experts: The number of experts.
      width: The width of the network.
      key: A PRNG key.

    Returns:
      The rows, float32.

    Raises:
      ValueError: For an unknown kind.
    """
    one_of("gate_mode", kind, Drawn)
    shape = (layers, experts, width)
    if kind == "zero":
        return np.zeros(shape, np.float32)
    if kind == "random":
        return np.asarray(jax.random.normal(key, shape, jnp.float32))
    most = width**-0.5
    return np.asarray(jax.random.uniform(key, shape, jnp.float32, -most, most))


def of_prompts(
    experts: Sequence[Prompts], states: States, *, unit: bool = False
) -> Float[np.ndarray, "layer expert width"]:
    """Makes rows of routers in the direction of the prompts of experts.

    Args:
      experts: The prompts of each expert.
      states: A function that computes the states of prompts, such as from `hidden`.
      unit: Whether the mean states of positive and negative prompts are normalised before they are
        subtracted. mergekit-moe does this for embeddings.

    Returns:
      The rows, float32, each of length 1: the mean state of positive prompts minus the mean state
      of negative prompts.

    Raises:
      ValueError: If an expert has no prompts, or a prompt has no tokens.
    """
    for e, prompts in enumerate(experts):
        if not prompts.positive:
            raise ValueError(f"experts[{e}].positive_prompts: expected at least one, got none")
        for name, given in prompts._asdict().items():
            if any(not len(prompt) for prompt in given):
                raise ValueError(f"experts[{e}].{name}_prompts: expected tokens, got none")
    groups = [group for prompts in experts for group in prompts]
    # All prompts run together, so a network in a file is read once.
    found = states([prompt for group in groups for prompt in group])
    ends = np.cumsum([len(group) for group in groups])
    means = []
    for group, end in zip(groups, ends, strict=True):
        mean = found[end - len(group) : end].mean(0) if group else np.zeros(found.shape[1:])
        means.append(_direction(mean) if unit else mean)
    rows = [_direction(a - b) for a, b in zip(means[::2], means[1::2], strict=True)]
    return np.stack(rows, axis=1).astype(np.float32)


def _direction(x: Float[np.ndarray, "*n width"]) -> Float[np.ndarray, "*n width"]:
    """Divides x by its length, or by 1e-8 if that is larger."""
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), _LEAST)


def embedded(rows: Rows, layers: int) -> States:
    """Makes a function that sums the embeddings of prompts.

    Args:
      rows: Looks up embeddings.
      layers: The number of layers, all of which get the same state.

    Returns:
      The function.
    """

    def states(prompts: Sequence[Tokens]) -> Float[np.ndarray, "prompt layer width"]:
        sums = [rows(np.asarray(prompt, np.int64)).astype(np.float32).sum(0) for prompt in prompts]
        return np.repeat(np.stack(sums)[:, None], layers, axis=1)

    return states


def hidden(
    tensors: Mapping[str, Any],
    config: Config,
    rows: Rows,
    embeddings: str,
    *,
    mean: bool = False,
    most: int = TOGETHER,
) -> States:
    """Makes a function that computes the inputs of each layer for prompts.

    The network runs layer by layer, and each tensor is read once for a group of prompts. `tensors`
    may therefore read them lazily from a file.

    Args:
      tensors: The tensors of the dense network by name. The table of embeddings is not read.
      config: Its configuration.
      rows: Looks up embeddings.
      embeddings: The name of their table.
      mean: Whether the state is the mean over all tokens; if not, the last token.
      most: The largest number of bytes for activations of prompts that run together. A prompt that
        requires more runs alone.

    Returns:
      The function.

    Raises:
      ValueError: If the forward pass of the network is unknown, or it is not causal.
    """
    family = architectures.of(config)
    run = family.outputs
    if run is None or not family.causal:
        raise ValueError(
            f"gate_mode: no causal forward pass of {family.name!r} is known, so hidden states "
            "of prompts cannot be computed; 'cheap_embed' needs none"
        )
    layers = int(config["num_hidden_layers"])
    # The output of the last layer is not needed, and neither is a head.
    short: Config = {**config, "num_hidden_layers": layers - 1, "architectures": ["Model"]}

    def states(prompts: Sequence[Tokens]) -> Float[np.ndarray, "prompt layer width"]:
        found: dict[int, Float[np.ndarray, "layer width"]] = {}
        for group in _groups(config, [len(prompt) for prompt in prompts], most):
            found |= zip(group, together([prompts[k] for k in group]), strict=True)
        return np.stack([found[k] for k in range(len(prompts))])

    def together(prompts: Sequence[Tokens]) -> Float[np.ndarray, "prompt layer width"]:
        lengths = np.array([len(prompt) for prompt in prompts])
        # Padding follows the prompts, because tokens of a causal network do not depend on later
        # tokens.
        padded = np.zeros((len(prompts), lengths.max()), np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        used, tokens = np.unique(padded, return_inverse=True)
        table = jnp.asarray(rows(used), jnp.float32)
        tokens, found = tokens.reshape(padded.shape), []

        def see(name: str, x: Float[Array, "b t n"]) -> Float[Array, "b t n"]:
            del name
            real = np.arange(padded.shape[1]) < lengths[:, None]
            last = np.arange(padded.shape[1]) == lengths[:, None] - 1
            weights = real / lengths[:, None] if mean else last
            found.append(np.einsum("bt,btn->bn", weights, np.asarray(x)))
            return x

        # Granite multiplies embeddings by a number, which cancels in rows of length 1.
        see("embeddings", table[tokens])
        run(_Body(tensors, embeddings, table), stated(short), tokens, see=see)
        return np.stack(found, axis=1)

    return states


def activations(config: Config, tokens: int) -> int:
    """Estimates the memory of a prompt while a network runs on it.

    Args:
      config: The configuration of the network.
      tokens: The length of the prompt.

    Returns:
      The bytes of one layer's arrays that are in memory at once, in float32.
    """
    width, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    hidden = count(config, "intermediate_size", default=4 * width)
    # Several states of each token, the feed-forward activations, and the attention weights with
    # their inputs.
    return 4 * tokens * (12 * width + 4 * hidden + 4 * heads * tokens)


def _groups(config: Config, lengths: Sequence[int], most: int) -> list[list[int]]:
    """Groups prompts of similar lengths, because all are padded to the longest."""
    groups: list[list[int]] = []
    for k in sorted(range(len(lengths)), key=lambda k: lengths[k]):
        if groups and (len(groups[-1]) + 1) * activations(config, lengths[k]) <= most:
            groups[-1].append(k)
        else:
            groups.append([k])
    return groups


class _Body(Mapping[str, Any]):
    """The tensors of a network without its heads, in float32, each read on demand."""

    def __init__(self, tensors: Mapping[str, Any], embeddings: str, table: Array) -> None:
        self._tensors, self._embeddings, self._table = tensors, embeddings, table
        prefix = embeddings.rpartition("embed_tokens.")[0]
        self._names = [name for name in tensors if name.startswith(prefix)]
        # Without this set, checking whether a tensor exists would read it.
        self._known = frozenset(self._names)

    def __getitem__(self, name: str) -> Array:
        own = self._table if name == self._embeddings else self._tensors[name]
        return jnp.asarray(own, jnp.float32)

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def dependent(rows: Float[np.ndarray, "layer expert width"], most: float = 5.0) -> list[int]:
    """Lists the layers with nearly dependent rows, in which some experts remain unused.

    Args:
      rows: The rows of routers.
      most: The condition number above which a layer is listed.

    Returns:
      The numbers of the layers.
    """
    if rows.shape[1] > rows.shape[2]:
        return list(range(len(rows)))
    lengths = np.linalg.svd(rows.astype(np.float64), compute_uv=False)
    return [k for k, x in enumerate(lengths) if x[0] > most * x[-1]]
