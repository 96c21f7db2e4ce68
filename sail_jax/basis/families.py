"""Families of maps, and the family that each nonlinearity commutes with.

To re-express x as `write @ x` preserves a network whose nonlinearity f has
`f(write @ x) == write @ f(x)`. Which maps those are is a property of f, and the answers are not
ordered from more to less: a ReLU allows positive scales but no rotation, RMSNorm the reverse.
"""

import enum


class Family(enum.Flag):
    """A set of maps, described by the properties that all its members share.

    The properties are flags. More properties make a smaller family: `a in b` says that the family b
    lies within the family a. `a & b` is the smallest family that holds both a and b. As every
    property survives composition, it also holds the compositions of their members. The properties:

    - MONOMIAL: a row of `write` has at most one nonzero entry, and a unit whose row is zero
      is not read.
    - NONNEGATIVE: no entry of `write` is negative.
    - UNIT (of monomial maps): the entries of `write` are 0 or +-1.
    - ISOMETRIC: `write.T @ write == new/old * I`, so that the mean square of the units is kept.
    - INVERTIBLE: `read` is the inverse of `write`.
    - IDENTITY: nothing happens (this implies all others).

    LINEAR has no property: it holds all maps. The other names stand for several properties at once;
    a SELECTION, for example, takes each new unit from one old unit, or makes it zero.

    >>> str(Family.SELECTION & Family.SIGNED_PERMUTATION)
    'signed selection'
    >>> Family.SELECTION in Family.PERMUTATION  # every permutation is a selection
    True
    """

    LINEAR = 0
    MONOMIAL = 1
    NONNEGATIVE = 2
    UNIT = 4
    ISOMETRIC = 8
    INVERTIBLE = 16
    POSITIVE_MONOMIAL = MONOMIAL | NONNEGATIVE
    SIGNED_SELECTION = MONOMIAL | UNIT
    SELECTION = MONOMIAL | NONNEGATIVE | UNIT
    ORTHOGONAL = ISOMETRIC | INVERTIBLE
    SIGNED_EVEN_DUPLICATION = SIGNED_SELECTION | ISOMETRIC
    EVEN_DUPLICATION = SELECTION | ISOMETRIC
    SIGNED_PERMUTATION = SIGNED_SELECTION | ORTHOGONAL
    PERMUTATION = SELECTION | ORTHOGONAL
    IDENTITY = PERMUTATION | 32

    def __str__(self) -> str:
        """The name of the smallest named family that holds this one, in lower case."""
        named = [family for family in type(self).__members__.values() if family in self]
        best = max(named, key=lambda family: family.value.bit_count())
        return str(best.name).lower().replace("_", " ")


NONLINEARITIES: dict[str, Family] = {
    "linear": Family.LINEAR,
    "rmsnorm": Family.ISOMETRIC,
    "relu": Family.POSITIVE_MONOMIAL,
    "odd": Family.SIGNED_SELECTION,
    "gated": Family.MONOMIAL,
    "elementwise": Family.SELECTION,
    "layernorm": Family.EVEN_DUPLICATION,
    "dot": Family.INVERTIBLE,
    "softmax": Family.PERMUTATION,
    "outer": Family.IDENTITY,
    "stack": Family.IDENTITY,
}
"""The family that each nonlinearity commutes with: a map within it preserves the function.

Each family is sufficient; a network may allow more.

- "linear": no nonlinearity, or a constant multiple of its input.
- "rmsnorm", "layernorm": the bare normalisations; a learned scale is a gain, see
  `sail_jax.basis.axes`.
- "relu": any positively homogeneous function, unit by unit.
- "odd": any odd function, unit by unit (tanh). Also attention over its heads: with the sign of a
  head, its logits stay and its values change sign.
- "gated": a product unit by unit, of which the other factor is written by gains ("diag") alone: the
  gates of gated units.
- "elementwise": any function unit by unit, also one of several writers (gated units).
- "dot": linear but for its size: queries and keys, whose product is divided by the root of their
  number.
- "softmax": any function that treats units alike.
- "outer": the network's input or output, or units that are told apart by position (RoPE pairs,
  pixels).
- "stack": the axis of stacked layers.
"""
