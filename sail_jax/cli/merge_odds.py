"""Knows how earlier merges turned out: what `sail-jax inspect A B` compares a new one with.

The merges are those of the study `merge_prediction`, in bands of 1 - the mean cosine of the models'
weights. Of all predictors that the study measures without running a network, this one was within
its error of the best, and it needs no base. The networks are small and the tasks of two kinds,
counted apart since they differ more than the bands do.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import xarray as xr

KEPT = 0.9  # of the experts' accuracy
EDGES = (1e-3, 1e-2, 1e-1)
UNRELATED = 0.1  # a cosine of weights below which models share no ancestor in the same basis


class Band(NamedTuple):
    """Counts of merges whose 1 - mean cosine of weights lies in one band.

    A band begins where the one before it ends. Every count is given for each family of tasks.

    Attributes:
      below: The upper edge of the band.
      merges: How many merges there were.
      averaging: How many of them kept 90 % of the experts' accuracy when averaged.
      task_arithmetic: The same for task arithmetic.
      ties: The same for TIES.
    """

    below: float
    merges: tuple[int, ...]
    averaging: tuple[int, ...]
    task_arithmetic: tuple[int, ...]
    ties: tuple[int, ...]


# `measured` of a run of `sail-jax run merge_prediction` (seed 0; 336 merges; jax 0.10, x86-64), and
# Spearman's correlations with the loss added, with 95 % intervals.
FAMILIES = ("digits", "text")
TABLE = (
    Band(1e-3, (18, 44), (9, 44), (8, 44), (10, 44)),
    Band(1e-2, (37, 28), (10, 28), (9, 18), (10, 28)),
    Band(1e-1, (61, 67), (15, 41), (7, 47), (8, 32)),
    Band(2.0, (52, 29), (0, 2), (0, 6), (1, 2)),
)
WEIGHTS, SIGNS, SAMPLE = (0.73, 0.65, 0.79), (0.23, 0.13, 0.34), (0.99, 0.99, 1.00)


def measured(dataset: "xr.Dataset") -> tuple[Band, ...]:
    """Counts the merges of a finished run of `merge_prediction`, as `TABLE` has them.

    Args:
      dataset: The labelled dataset of the run.

    Returns:
      The bands, from the most similar models to the least.
    """
    apart = dataset["value"].sel(predictor="weight_cosine").values
    kept, family = dataset["kept"].values >= KEPT, dataset["family"].values
    bands, low = [], -1.0
    for high in (*EDGES, 2.0):
        masks = [
            (apart >= low) & (apart < high) & (family == f) for f in range(dataset.sizes["learned"])
        ]
        rules = [tuple(int(kept[s, r].sum()) for s in masks) for r in range(kept.shape[1])]
        bands.append(Band(high, tuple(int(s.sum()) for s in masks), *rules))
        low = high
    return tuple(bands)


def verdict(record: Mapping[str, Any]) -> list[str]:
    """Says what to expect of merging models, in words.

    Args:
      record: The record of a comparison, as `sail_jax.cli.compare.described` makes it, with "data"
        if the models were run on examples.

    Returns:
      A sentence or two for each thing worth knowing.
    """
    lines = []
    names = record["models"]
    for pair in record["pairs"]:
        if pair["equal"]:
            first, second = (names[i] for i in pair["models"])
            lines.append(
                f"{first} and {second} hold the same values: to merge them changes nothing."
            )
    cosine = record["weights"]["cosine"]
    band = next((b for b in TABLE if 1 - cosine < b.below), TABLE[-1])
    of, kept = sum(band.merges), sum(band.averaging)
    counts = ", ".join(
        f"{k} of {n} on {name}"
        for name, n, k in zip(FAMILIES, band.merges, band.averaging, strict=True)
    )
    lines.append(
        f"Of {of} merges of small networks whose weights were as near as these (mean cosine "
        f"{cosine:.4f}), averaging kept {KEPT:.0%} of the experts' accuracy in {kept} ({counts}), "
        f"task arithmetic (0.7 of the sum) in {sum(band.task_arithmetic)}, TIES (density 0.2) in "
        f"{sum(band.ties)}."
    )
    if record["differences"]:
        lines.append(
            "The models differ in more than their weights (above): those merges did not, and a "
            "merge may fail for that alone."
        )
    if cosine < UNRELATED:
        lines.append(
            "Their weights have next to nothing in common, as those of models trained apart, or of "
            "one model in another order of its units: run `sail-jax align` first, then inspect "
            "again."
        )
    elif band.below > EDGES[1]:
        lines.append(
            "To try: a smaller scale of the task vectors, a merge of fewer models, or experts "
            "tuned for fewer steps; which of them helps was not measured. On other networks, held-"
            "out examples decide."
        )
    told = [f"cosine of weights {_interval(WEIGHTS)}"]
    if "tasks" in record:
        told.append(f"sign conflict {_interval(SIGNS)}, which says little")
    lines.append(
        f"How far to trust this: rank correlation with the loss added was for the "
        f"{' and for the '.join(told)}."
    )
    data = record.get("data", {})
    if "losses" in data:
        mean = sum(data["losses"]) / len(data["losses"])
        more = data["average"] - mean
        margins = more, data["average"] - max(data["losses"])
        side, worst = ("above" if x > 0 else "below" for x in margins)
        lines.append(
            f"Your examples tell more ({_interval(SAMPLE)} for 32 of each "
            "task): the average's loss is "
            f"{abs(more):.4f} {side} the models' mean there, {worst} the worst."
        )
    else:
        lines.append("To run the merge on a few examples tells more than any of this: --data.")
    return lines


def _interval(x: tuple[float, float, float]) -> str:
    return "{:.2f} [{:.2f}, {:.2f}]".format(*x)
