"""Families of maps, and the family that each nonlinearity commutes with.

Re-expressing x as `write @ x` preserves a network if its nonlinearity f satisfies
`f(write @ x) == write @ f(x)`. The set of such maps depends on f, and these sets are not nested: a
ReLU allows positive scales but no rotation, RMSNorm the reverse.
"""

import enum


class Family(enum.Flag):
    """A set of maps, described by properties that all its members have.

    The properties are flags. More properties make a smaller family: `a in b` means that the family
    b lies within the family a. `a & b` is the smallest family that contains both a and b. Every
    property survives composition, so `a & b` also contains the compositions of their members. The
    properties:

    - MONOMIAL: a row of `write` has at most one nonzero entry, and units with a zero row are not
      read.
    - NONNEGATIVE: `write` has only entries >= 0.
    - UNIT (of monomial maps): the entries of `write` are 0 or +-1.
    - ISOMETRIC: `write.T @ write == new/old * I`, which preserves the mean square of the units.
    - INVERTIBLE: `read` is the inverse of `write`.
    - IDENTITY: nothing changes (this implies all others).

    LINEAR is the family of all maps, without any property. The other names stand for several
    properties at once. For example, a SELECTION takes each new unit from one old unit, or sets it
    to zero.

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
        """Returns the smallest named family that contains this one, in lower case."""
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
    "residual": Family.IDENTITY,
}
"""The family that each nonlinearity commutes with: its maps preserve the function.

Each family is sufficient; a network may allow more.

- "linear": no nonlinearity, or a constant multiple of its input.
- "rmsnorm", "layernorm": the bare normalisations; a learned scale is a gain, see
  `sail_jax.basis.axes`.
- "relu": any positively homogeneous function, unit by unit.
- "odd": any odd function, unit by unit (tanh). Also attention over its heads: under the sign of a
  head, its logits stay and its values change sign.
- "gated": a product unit by unit in which only gains ("diag") write the other factor: the gates of
  gated units.
- "elementwise": any function unit by unit, also of several writers (gated units).
- "dot": linear, but dependent on the size: queries and keys, with a product divided by the root of
  their number.
- "softmax": any function that treats all units equally.
- "outer": the network's input or output, or units distinguished by position (RoPE pairs, pixels).
- "stack": the axis of stacked layers.
- "residual", next to "stack": a layer whose outputs are zero is the identity, as in `h + f(h)`.
"""
