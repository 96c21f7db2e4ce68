"""Order statistics of tensors and trees, exactly, by folds that count digits (`selection`)."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.tree_util import Partial
from jaxtyping import Array, UInt

from sail_jax.merging import ranking as selection
from sail_jax.merging.task_vectors import Fold, Grain, Kernel, Piece, Place

__all__ = ["Found", "magnitudes", "order_statistics", "placed"]

Found = tuple[Array, selection.Wide]  # a key per task, and its rank among those equal to it


def order_statistics(
    keys: Kernel,
    ranks: Callable[..., Sequence[selection.Wide]],
    then: Callable[[list[Found], int], Any],
    grain: Grain = "entry",
    *,
    nonzero: bool = False,
    after: int = 0,
) -> Fold:
    """The keys of some ranks over all leaves, exactly, by counting; the rule or count goes on as
    `then(found, size)`.

    keys: a kernel `(place, delta, weight) -> [k, ...]`, unsigned integers as wide as
        `selection.magnitude` gives them; statistics are taken of each of the k.
    ranks: `(size) ->` ranks counted from 1, the largest key; 0 for a key above all. They share one
        visit to the leaves for every digit of a key.
    nonzero: `ranks` gets also how many keys are not 0, [k].
    after: how many visits `then` asks for before it is a `Leafwise`.
    """
    start, first = selection.start()

    def counted(prefixes: Sequence[Array], shift: int, go_on: Callable[[Any, int], Any]) -> Fold:
        summary = Partial(_count_digits(shift, nonzero and shift == first), tuple(prefixes), keys)
        return Fold(summary, go_on, _add, grain, visits=shift // 16 + 1 + after)

    def begin(total: Sequence[selection.Wide], size: int) -> Any:
        counts, *many = total
        return follow([selection.locate(counts, start, r) for r in ranks(size, *many)], first - 16)

    def follow(found: list[Found], shift: int) -> Fold:
        def go_on(counts: Sequence[selection.Wide], size: int) -> Any:
            new = [selection.locate(c, *f) for c, f in zip(counts, found, strict=True)]
            return follow(new, shift - 16) if shift else then(new, size)

        return counted([prefix for prefix, _ in found], shift, go_on)

    return counted([start], first, begin)


def _add(a: Sequence[selection.Wide], b: Sequence[selection.Wide]) -> tuple[selection.Wide, ...]:
    return tuple(map(selection.add, a, b))


@functools.cache
def _count_digits(shift: int, nonzero: bool) -> Kernel:
    def summary(
        prefixes: Sequence[Array], keys: Kernel, place: Place, delta: Array, weight: Array
    ) -> tuple[selection.Wide, ...]:
        values, inside = keys(place, delta, weight), place.inside(delta.shape[1:])
        counts = tuple(selection.histogram(values, prefix, shift, inside) for prefix in prefixes)
        if not nonzero:
            return counts
        here = values != 0 if inside is None else (values != 0) & inside
        return *counts, selection.occurrences(here, range(1, values.ndim))

    return summary


def placed(
    keys: Kernel,
    found: Sequence[Found],
    then: Callable[[Mapping[Piece, tuple[selection.Cut, ...]]], Any],
    grain: Grain = "entry",
) -> Fold:
    """Where, piece by piece, the keys equal to each of `found` are cut that belong to its rank:
    those first in (path, index) do. The rule or count goes on as `then(cuts)`."""

    def cuts(counts: Mapping[Piece, Sequence[Array]], size: int) -> Any:
        left, cut = [rank for _, rank in found], {}
        for piece in sorted(counts):
            cut[piece], left = zip(*map(selection.cut, counts[piece], left), strict=True)
        return then(cut)

    return Fold(Partial(_equal, tuple(t for t, _ in found), keys), cuts, None, grain)


def _equal(
    thresholds: Sequence[Array], keys: Kernel, place: Place, delta: Array, weight: Array
) -> tuple[Array, ...]:
    values, inside = keys(place, delta, weight), place.inside(delta.shape[1:])
    return tuple(selection.equal(values, threshold, inside) for threshold in thresholds)


def magnitudes(place: Place, delta: Array, weight: Array) -> UInt[Array, "task ..."]:
    """The kernel of the keys |delta|; those who abstain are worth 0."""
    return selection.magnitude(delta, weight)
