"""Initial scales and learning rates for every width: the maximal update parametrisation (muP).

Two specs of one network, at a base width and at another, show which spaces are wide: those that
grew. The rules therefore come from `sail_jax.architectures`, and this module contains no names of
layers.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jaxtyping import PyTree

from sail_jax.basis.axes import Role
from sail_jax.basis.spaces import Leaf, Spec
from sail_jax.trees import path_str


class Scales(NamedTuple):
    """The factors of a parameter relative to the standard parametrisation.

    Attributes:
      path: The path of the parameter.
      initial: The factor on its initial value.
      rate: The factor on Adam's learning rate for it.
    """

    path: str
    initial: float
    rate: float


def scales(base: Spec, spec: Spec) -> tuple[Scales, ...]:
    """Computes the scales of all parameters, for Adam, from the spaces that grew between two
    widths.

    Let the spaces that a parameter reads be `r` times as large as at the base, and the spaces that
    it writes `w` times as large:

        kind      r    w    standard deviation    Adam's rate
        hidden    > 1  > 1  base / sqrt(r)        base / r
        output    > 1  1    base / r              base / r
        input     1    any  base                  base

    Norms, biases and embeddings are inputs. An embedding that also computes the logits is
    considered an input too; the network must divide its logits by the growth of the width,
    `logit_scale`. The initial scales correct flax's initial values: a kernel with variance 1 /
    (inputs), an embedding with variance 1 / (features), everything else independent of the width.
    At the base width all scales are 1.

    Args:
      base: The spec of the network at the base width.
      spec: The spec of the network itself, with the same leaves.

    Returns:
      The scales of each parameter, in the order of the spec.

    Raises:
      ValueError: If the specs have different leaves, or if an "outer" space has different sizes.
        The network returns outer spaces or compares them by products (logits, queries and keys).
        Products of queries and keys would have to be divided by their number, not by its square
        root.

    References:
      Yang et al., Tensor Programs V, 2022 (arXiv 2203.03466), Table 3.
    """
    if [leaf.path for leaf in base.leaves] != [leaf.path for leaf in spec.leaves]:
        raise ValueError("base must have the leaves of spec, with other widths but equal layers")
    for space in spec.spaces:
        was = base.space(space.name).size
        if space.size != was and "outer" in space.nonlinearity.split():
            raise ValueError(
                f"base must have the {space.size} units of {space.name!r}, "
                f"which is not a width; got {was}"
            )
    return tuple(_of_leaf(base, spec, leaf) for leaf in spec.leaves)


def _of_leaf(base: Spec, spec: Spec, leaf: Leaf) -> Scales:
    """Computes the scales of one parameter."""
    reads, writes = (_growth(base, spec, leaf, role) for role in ("read", "write"))
    # Standard deviations, relative to those at the base width.
    drawn, wanted = 1.0, 1.0
    if leaf.path.endswith("kernel"):
        drawn = 1 / math.sqrt(reads)
        wanted = 1 / math.sqrt(reads) if writes != 1 else 1 / reads
    elif leaf.path.endswith("embedding"):
        drawn = 1 / math.sqrt(writes)
    return Scales(leaf.path, wanted / drawn, 1 / reads)


def _growth(base: Spec, spec: Spec, leaf: Leaf, role: Role) -> float:
    """Computes the growth of the spaces that a parameter, in its first use, reads or writes."""
    names = [f.space for axis in leaf.axes for f in axis if f.role == role]
    return math.prod(spec.space(n).size / base.space(n).size for n in names)


def scaled(params: PyTree, by: Sequence[Scales]) -> PyTree:
    """Multiplies initial parameters by their scales.

    Args:
      params: The initial parameters, as flax draws them.
      by: The scales; parameters without scales do not change.

    Returns:
      The parameters, with their dtypes.

    >>> params = {"out": {"kernel": jax.numpy.ones(2)}}
    >>> scaled(params, [Scales("out/kernel", 0.5, 1.0)])["out"]["kernel"].tolist()
    [0.5, 0.5]
    """
    initial = {each.path: each.initial for each in by}

    def leaf(path: tuple, x: jax.Array) -> jax.Array:
        """Scales one parameter. A scale of 1 preserves every bit."""
        scale = initial.get(path_str(path), 1.0)
        return x if scale == 1 else x * scale

    return jax.tree.map_with_path(leaf, params)


def rates(by: Sequence[Scales]) -> tuple[tuple[str, float], ...]:
    """Lists the learning rates in the form of `Optimizer.rates`.

    Args:
      by: The scales.

    Returns:
      A path and its fraction of the learning rate, for each fraction that is not 1.
    """
    return tuple((each.path, each.rate) for each in by if each.rate != 1)
