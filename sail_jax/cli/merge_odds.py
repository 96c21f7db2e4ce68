"""Statistics of earlier merges, with which `sail-jax inspect A B` compares a new one.

The merges come from the study `merge_prediction`. They are grouped in bands of 1 - the mean cosine
of the models' weights. The study measures several predictors without running a network. This one
was within its error of the best, and it requires no base. The networks are small. There are two
kinds of tasks, which are counted separately because they differ more than the bands do.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import xarray as xr

KEPT = 0.9  # of the experts' accuracy
EDGES = (1e-3, 1e-2, 1e-1)
UNRELATED = 0.1  # models with a smaller cosine of weights share no ancestor in the same basis


class Band(NamedTuple):
    """Counts of merges in one band of 1 - mean cosine of weights.

    A band begins where the previous one ends. Every count is given for each family of tasks.

    Attributes:
      below: The upper edge of the band.
      merges: The number of merges.
      averaging: The number of merges by averaging that kept 90 % of the experts' accuracy.
      task_arithmetic: The same for task arithmetic.
      ties: The same for TIES.
    """

    below: float
    merges: tuple[int, ...]
    averaging: tuple[int, ...]
    task_arithmetic: tuple[int, ...]
    ties: tuple[int, ...]


# `measured` on a run of `sail-jax run merge_prediction` (seed 0; 336 merges; jax 0.10, x86-64).
# Below: Spearman's correlations with the added loss, with 95 % intervals.
FAMILIES = ("digits", "text")
TABLE = (
    Band(1e-3, (18, 44), (9, 44), (8, 44), (10, 44)),
    Band(1e-2, (37, 28), (10, 28), (9, 18), (10, 28)),
    Band(1e-1, (61, 67), (15, 41), (7, 47), (8, 32)),
    Band(2.0, (52, 29), (0, 2), (0, 6), (1, 2)),
)
WEIGHTS, SIGNS, SAMPLE = (0.73, 0.65, 0.79), (0.23, 0.13, 0.34), (0.99, 0.99, 1.00)


def measured(dataset: "xr.Dataset") -> tuple[Band, ...]:
    """Counts the merges of a finished run of `merge_prediction`, in the form of `TABLE`.

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
    """Describes the expected result of merging some models.

    Args:
      record: The record of a comparison from `sail_jax.cli.compare.described`, with "data" if the
        models were run on examples.

    Returns:
      One or two sentences per fact.
    """
    lines = []
    names = record["models"]
    for pair in record["pairs"]:
        if pair["equal"]:
            first, second = (names[i] for i in pair["models"])
            lines.append(
                f"{first} and {second} hold the same values: merging them changes nothing."
            )
    cosine = record["weights"]["cosine"]
    band = next((b for b in TABLE if 1 - cosine < b.below), TABLE[-1])
    of, kept = sum(band.merges), sum(band.averaging)
    counts = ", ".join(
        f"{k} of {n} on {name}"
        for name, n, k in zip(FAMILIES, band.merges, band.averaging, strict=True)
    )
    lines.append(
        f"The mean cosine of the models' weights is {cosine:.4f}. {of} earlier merges of small "
        f"networks were in the same range. Averaging kept {KEPT:.0%} of the experts' accuracy in "
        f"{kept} of them ({counts}), task arithmetic (0.7 of the sum) in "
        f"{sum(band.task_arithmetic)}, TIES (density 0.2) in {sum(band.ties)}."
    )
    if record["differences"]:
        lines.append(
            "These models also differ in more than their weights (see above), unlike those merges. "
            "This alone can make a merge fail."
        )
    if cosine < UNRELATED:
        lines.append(
            "The weights have almost nothing in common. Models trained separately look like this, "
            "and so does one model with permuted units: run `sail-jax align`, then inspect "
            "again."
        )
    elif band.below > EDGES[1]:
        lines.append(
            "To try: a smaller scale of the task vectors, fewer models, or experts fine-tuned for "
            "fewer steps. Which of them helps was not measured. On other networks, held-out "
            "examples decide."
        )
    trust = [f"cosine of weights {_interval(WEIGHTS)}"]
    if "tasks" in record:
        trust.append(f"sign conflict {_interval(SIGNS)} (a weak predictor)")
    lines.append(
        f"Reliability of these predictors (rank correlation with the added loss): "
        f"{', '.join(trust)}."
    )
    data = record.get("data", {})
    if "losses" in data:
        mean = sum(data["losses"]) / len(data["losses"])
        more = data["average"] - mean
        margins = more, data["average"] - max(data["losses"])
        side, worst = ("above" if x > 0 else "below" for x in margins)
        lines.append(
            f"Your examples predict more ({_interval(SAMPLE)} with 32 per task): the average's "
            "loss there is "
            f"{abs(more):.4f} {side} the models' mean and {worst} the worst model's."
        )
    else:
        lines.append("--data predicts better than this: it runs the merge on a few examples.")
    return lines


def _interval(x: tuple[float, float, float]) -> str:
    return "{:.2f} [{:.2f}, {:.2f}]".format(*x)
