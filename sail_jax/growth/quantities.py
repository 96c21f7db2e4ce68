"""Compensates in growth for quantities that a network computes from its sizes.

Logits are divided by the root of a head's size, rotary frequencies depend on this size, and norms
average over a width. Maps that are lossless for a linear reader must be fitted to these quantities.
`fit` does this, and `judge` reports the remaining loss, in the form of `exactness`.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from sail_jax.architectures.table import Config, Rules, look, put
from sail_jax.basis.axes import Axis, path_pattern
from sail_jax.basis.certificate import Report, exactness
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, measure, select
from sail_jax.basis.spaces import Leaf, Spec
from sail_jax.configurations import EPSILONS
from sail_jax.growth.basic import lemon_gain

# Kinds of rotary positions in which the frequency of pair i depends only on base ** (-2 i / size).
# A pair keeps its frequency if i and the size are multiplied by the same number.
_POINTWISE = ("default", "linear", "llama3")


class Fitted(NamedTuple):
    """Maps that are fitted to the quantities that a network computes from its sizes.

    Attributes:
      maps: The maps, by space.
      config: The new configuration, with changed epsilons.
      granted: The loss in spaces that the fit judges instead of `exactness`; "" for no loss.
      eta: The "layernorm" spaces with gains that `scale_norms` must multiply.
      notes: The changes, one sentence each.
    """

    maps: dict[str, SpaceMap]
    config: dict[str, Any]
    granted: Mapping[str, str] = MappingProxyType({})
    eta: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def fit(maps: Mapping[str, SpaceMap], spec: Spec, rules: Rules, config: Config) -> Fitted:
    """Fits maps to heads of a new size, and to norms over copies and averages.

    A network divides logits by the root of the size of a head, so the product of queries and keys
    is multiplied by the root of the growth of this size. Rotary pairs are moved to the positions of
    their frequencies. Under a LayerNorm over copies and averages, epsilon and gains are corrected.
    If the configuration does not state epsilon, the map is scaled instead.

    Args:
      maps: The maps of a lossless method, by space.
      spec: The spec of the network, at the old widths.
      rules: The rules of its architecture.
      config: The new configuration.

    Returns:
      The fitted maps and the other results of the fit.
    """
    out, new = dict(maps), dict(config)
    granted: dict[str, str] = {}
    eta, notes = set(), {}
    for name, m in maps.items():
        words = set(spec.space(name).nonlinearity.split())
        # Other spaces with units in a product, such as experts, are not fitted.
        if words == {"dot"} and m.new != m.old:
            # A map onto more units is not invertible, but it keeps q . k if `read @ write` is the
            # identity.
            granted[name] = _lost(m)
            # This network does not divide logits by the size of a head, so no factor is required.
            if not config.get("scale_attn_weights", True) or name in spec.undivided:
                continue
            # One side of the product is written with `write`, the other with `read`. The factors
            # multiply the product by (new / old) ** 0.5. For even copies, with `read` = old / new,
            # this split gives both sides the same scale.
            out[name] = _times(m, (m.old / m.new) ** 0.25, (m.new / m.old) ** 0.75)
            notes["products of queries and keys times the root of the growth of their number"] = 0
        elif _rotary(spec, name) and m.new != m.old:
            granted[name] = _why_not_spread(m, spec, name, config)
            if not granted[name]:
                # The method's map is replaced. Rotary units have fixed positions, and copies at
                # other positions would rotate at other frequencies.
                out[name] = _spread(m.old, m.new)
                notes[
                    "rotary pairs moved to the positions of their frequencies, zeros between, "
                    "products of queries and keys times the root of the growth of their number"
                ] = 0
        elif words == {"layernorm"} and m.family == Family.LINEAR and (t := _centred(m)):
            granted[name] = ""
            key = _epsilon(rules, config, name)
            if key and np.isclose(t, lemon_gain(m.old, m.new)) and not np.isclose(t, 1):
                new = put(new, key, t**2 * look(config, key))
                eta.add(name)
                notes[f"{key} times {t**2:.6g}, and the norms' gains times its root"] = 0
            else:
                # If the config contains no epsilon for this norm, or the factor is not LEMON's, the
                # activations are divided instead, with the same effect.
                out[name] = _times(m, 1 / t, t)
    return Fitted(out, new, granted, frozenset(eta), tuple(notes))


def judge(spec: Spec, maps: Mapping[str, SpaceMap], fitted: Fitted, lossy: str = "") -> Report:
    """Reports the loss in each space, from the axes and the fit.

    Args:
      spec: The spec of the network, at the old widths.
      maps: The maps before fitting.
      fitted: The result of `fit`.
      lossy: The reason why the method is lossy in every changed space; "" if it is not.

    Returns:
      The report of `exactness` on the unfitted maps, with the reasons of `fitted` if there are any.
    """
    rows = []
    for row in exactness(spec, maps).spaces:
        tied = any(use.tied for use in spec.uses(row.space))
        if row.space in fitted.granted and not tied:
            row = row._replace(lost=fitted.granted[row.space])
        if not row.lost and Family.IDENTITY not in row.family:
            row = row._replace(lost=lossy)
        rows.append(row)
    return Report(tuple(rows))


def undone(spec: Spec, maps: Mapping[str, SpaceMap]) -> dict[str, dict[str, float]]:
    """Finds the leaves that undo the factors with which tied leaves read larger spaces.

    A tied leaf that writes with W also reads with W. If W^T W = c I, its products become c times as
    large. The leaves in `Tie.scales` are then multiplied by 1/c.

    Args:
      spec: The spec of the network.
      maps: The maps, by space.

    Returns:
      The factor on each of these leaves, by space.
    """
    out = {}
    for name, m in maps.items():
        tied = {use.path for use in spec.uses(name) if use.tied}
        ties = [tie for tie in spec.ties if tie.space == name]
        if tied and tied == {tie.path for tie in ties} and (c := _reading(m)):
            factors: dict[str, float] = {}
            for path in (path for tie in ties for path in tie.scales):
                factors[path] = factors.get(path, 1.0) / c
            out[name] = factors
    return out


def _reading(m: SpaceMap) -> float:
    """The factor c with `write == c * read.T`; 0 if there is none."""
    write, read = (np.ones(m.new) if x is None else np.asarray(x, float) for x in m.entries)
    c = float(np.abs(write).max() / max(np.abs(read).max(), np.finfo(float).tiny))
    return c if np.allclose(write, c * read, rtol=1e-5, atol=1e-6 * np.abs(write).max()) else 0.0


def without_ties(spec: Spec, names: Collection[str]) -> Spec:
    """Removes the second use of tied leaves from some spaces."""

    def axis(factors: Axis) -> Axis:
        return tuple(f._replace(tied=f.tied and f.space not in names) for f in factors)

    return replace(spec, leaves=tuple(Leaf(p, tuple(map(axis, axes))) for p, axes in spec.leaves))


def _times(m: SpaceMap, write: float, read: float) -> SpaceMap:
    """Multiplies the entries of a map; its claimed family is at most MONOMIAL."""
    w, r = m.entries
    ones = jnp.ones(m.new)
    w, r = (write * (ones if w is None else w), read * (ones if r is None else r))
    if m.index is not None:
        return select(m.index, m.old, write=w, read=r, family=Family.MONOMIAL)
    return SpaceMap(w, r.T)


def _lost(m: SpaceMap) -> str:
    """Returns the loss of the map for a linear reader; "" if lossless or traced."""
    lost, rounding = measure(m) or (0.0, 0.0)
    return "" if lost <= rounding else f"read @ write differs from the identity by {lost:.2g}"


def _rotary(spec: Spec, name: str) -> bool:
    """Checks whether a space contains queries and keys, in pairs of units that rotary positions
    rotate.

    Keys belong to the dual of the space that queries write, so an axis has a starred factor next to
    the plain factor of their head. Other outer spaces within a head are not rotary.
    """
    keys = any(
        any(f.space == name and f.role == "read" for f in axis)
        and any(f.role == "write" for f in axis)
        for _, axes in spec.leaves
        for axis in axes
    )
    return keys and spec.space(name).nonlinearity == "outer"


def _why_not_spread(m: SpaceMap, spec: Spec, name: str, config: Config) -> str:
    """Returns why rotary pairs cannot move to the positions of their frequencies, or ""."""
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    gains = [use.path for use in spec.uses(name) if use.role == "gain"]
    if m.new % m.old or m.old % 2:
        return (
            f"{m.new} units have other rotary frequencies than {m.old}, and only a multiple "
            "keeps all frequencies: keep head_dim and multiply the heads"
        )
    if kind not in _POINTWISE:
        return f"rotary positions of type {kind!r} depend on the size of a head: keep head_dim"
    if gains:
        return f"the norm {gains[0]!r} averages over a head: keep head_dim and multiply the heads"
    return ""


def _spread(old: int, new: int) -> SpaceMap:
    """Makes the map that moves each rotary pair to the position of its frequency in the larger
    head.

    Pair (i, i + old/2) has the frequency base^(-2 i / old). It becomes pair i * new / old, which
    has the same frequency. The pairs between are zero. Each side is scaled by (new/old)^(1/4),
    which keeps the logits after division by the root of the size.
    """
    # Rotary pairs are (i, i + size / 2), so the two halves of a head are treated equally.
    r, half = new // old, new // 2
    at = np.arange(new) % half
    live = at % r == 0
    index = np.where(live, at // r + (np.arange(new) >= half) * (old // 2), 0)
    scale = jnp.asarray(live * r**0.25, float)
    return select(index, old, write=scale, read=scale, family=Family.POSITIVE_MONOMIAL)


def _centred(m: SpaceMap) -> float | None:
    """Returns the factor t > 0 of copies and averages on a space's standard deviation.

    With epsilon times t^2, a LayerNorm of `write @ x` is 1/t times `write @ LayerNorm(x)`. None
    unless the rows of `write` are equally many copies of each unit, and averages.
    """
    write = np.asarray(m.dense().write, float)
    rows = write - write.mean(axis=1, keepdims=True)
    # An average is a constant row, so it is 0 after subtracting its mean. A copy is a row with one
    # entry.
    scale = np.abs(write).max()
    average = np.abs(rows).max(axis=1) <= 1e-6 * scale
    copies = (write[~average] != 0).sum(axis=1)
    counts = (write[~average] != 0).sum(axis=0)
    mean = write[~average].max(initial=0.0) / m.old
    fits = (
        (copies == 1).all()
        and len(set(counts)) == 1
        and np.allclose(write[average], mean, rtol=1e-5)
        and np.allclose(write[~average].max(axis=1), scale, rtol=1e-6)
    )
    return float(scale * (counts[0] * m.old / m.new) ** 0.5) if fits else None


def _epsilon(rules: Rules, config: Config, space: str) -> str:
    """Returns the entry with the epsilon of the norms of a space; "" if it is missing."""
    for key, text in rules.settings:
        if path_pattern(text.split()[0]).fullmatch(space):
            tower = key.rpartition(".")[0]
            for name in EPSILONS:
                entry = f"{tower}.{name}" if tower else name
                if look(config, entry) is not None:
                    return entry
    return ""
