"""Families of maps, and the family that each nonlinearity commutes with.

Re-expressing x as `write @ x` preserves a network whose nonlinearity f has
`f(write @ x) == write @ f(x)`. Which maps those are is a property of f, not a chain from more to
less: a ReLU allows positive scales but no rotation, RMSNorm the reverse.
"""

import enum

__all__ = ["NONLINEARITIES", "Family"]


class Family(enum.Flag):
    """A set of maps, as the properties its members share; every property composes.

    So `a in b` reads "the family b lies within the family a", and `a & b` is the least family
    that holds both, hence also the compositions of their members. The properties:

    - MONOMIAL: a row of `write` has at most one nonzero entry, and a unit whose row is zero
      is not read.
    - NONNEGATIVE: no entry of `write` is negative.
    - UNIT (of monomial maps): the entries of `write` are 0 or +-1.
    - ISOMETRIC: `write.T @ write == new/old * I`, i.e. the mean square is kept.
    - INVERTIBLE: `read` is the inverse of `write`.
    - IDENTITY: nothing happens (this implies all others).

    >>> str(Family.SELECTION & Family.SIGNED_PERMUTATION)
    'signed selection'
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
        """The smallest named family that holds this one."""
        named = [family for family in type(self).__members__.values() if family in self]
        best = max(named, key=lambda family: family.value.bit_count())
        return str(best.name).lower().replace("_", " ")


NONLINEARITIES: dict[str, Family] = {
    "linear": Family.LINEAR,
    "rmsnorm": Family.ISOMETRIC,
    "relu": Family.POSITIVE_MONOMIAL,
    "odd": Family.SIGNED_SELECTION,
    "elementwise": Family.SELECTION,
    "layernorm": Family.EVEN_DUPLICATION,
    "dot": Family.INVERTIBLE,
    "softmax": Family.PERMUTATION,
    "outer": Family.IDENTITY,
    "stack": Family.IDENTITY,
}
"""The family each nonlinearity commutes with: a map within it preserves the function.

Each is sufficient. "relu" is any positively homogeneous function unit by unit, "odd" any odd one
(tanh; an attention head, whose logits are even and whose values are linear in it), "elementwise"
any at all, of several writers too (gated units). "layernorm" and "rmsnorm" are the bare
normalisations: a learned scale is a gain, see `sail_jax.basis.axes`. "dot" is linear but for its
size: queries and keys, whose product is divided by the root of their number. "softmax" stands for
any function that treats units alike; units told apart by position (RoPE pairs, pixels) are "outer".
"""
