"""Tests on a finished run which predictors rank merges, and sums up which rank them best."""

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, judged, stated
from experiments.studies.merge_prediction import plots as figures
from experiments.studies.merge_prediction import probes, ranking

CTL, UNIFIED = "cross-task linearity", "unified merging"
WHERE = {  # who has it; the others are probes of ours
    **dict.fromkeys(("ctl_cosine", "ctl_gap", "ctl_output", "ensemble"), CTL),
    **dict.fromkeys(("members", "lemma", "main_term"), f"{CTL}, Lemma 1 and Theorem 1"),
    **dict.fromkeys(("gradients", "bound", "bound_corrected"), f"{UNIFIED}, Theorem 3"),
    "sign_conflict": "TIES (Yadav et al. 2023)",
    "task_cosine": "task arithmetic (Ilharco et al. 2023)",
}
PROBES = "sail_jax.probe and sail_jax.distances"
# The fewest merges of which an order says something.
FEWEST = 3


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Tests for each predictor whether it ranks the merges of one base model.

    A predictor's margins are its rank correlations with the loss that averaging adds, one for each
    base model with at least `FEWEST` merges. Only experts tuned from one pre-trained model are
    compared, if there are enough of them.
    """
    within = dataset["within"].sel(scope=_ordinary(dataset)).values
    x, y = dataset["value"].values, dataset["result"].sel(outcome="averaging").values[:, None]
    clusters = dataset["cluster"].values
    groups = [within & (clusters == base) for base in np.unique(clusters)]
    rho = [ranking.spearman(x[group], y[group])[0] for group in groups if group.sum() >= FEWEST]
    columns = np.reshape(rho, (-1, dataset.sizes["predictor"])).T
    declared = []
    for name, margins in zip(dataset["predictor"].values.astype(str), columns, strict=True):
        ours = stated(xr.DataArray(margins, dims="base")) if margins.size else "undefined"
        declared.append(
            judged(
                WHERE.get(name, PROBES),
                f"{probes.PREDICTORS[name].label}: the more of it, the more loss averaging adds, "
                "among merges of one base model",
                "not a claim about ranks",
                f"Spearman's correlation {ours}, over {margins.size} base models",
                margins,
            )
        )
    return declared


def _ordinary(dataset: xr.Dataset) -> str:
    """The scope of experts tuned from one pre-trained model, or "all" if such merges are few."""
    tuned = dataset["within"].sel(scope="all, tuned")
    return "all, tuned" if int(tuned.sum()) >= FEWEST else "all"


def summary(dataset: xr.Dataset) -> str:
    """Describes which predictors rank the outcomes of averaging best.

    It returns sentences that name the four best predictors in each family, in all merges, and in
    merges of experts tuned from one pre-trained model, with 95 % intervals; and, for comparison,
    how well the merge itself on few examples does.
    """
    n, families = dataset.sizes["merge"], dataset["learned"].values
    lines = []
    for scope in dict.fromkeys([*families, "all", _ordinary(dataset)]):
        scores = dataset.sel(scope=scope, outcome="averaging")
        order = [p for p in figures.order(scores) if p != "sample"]
        said = [_said(scores, p) for p in order[:4]]
        lines.append(f"{scope} ({int(scores['within'].sum())} merges): {', '.join(said)}")
    sample = dataset.sel(scope=_ordinary(dataset), outcome="averaging", predictor="sample")
    return (
        f"{n} merges; Spearman's correlation with the loss that averaging adds to the experts' "
        f"own, 95 % intervals over base models. Best of {', then of '.join(lines)}. "
        f"To run the merge itself on {probes.PROBED} examples of each task gives "
        f"{float(sample['rho']):.2f} [{float(sample['low']):.2f}, {float(sample['high']):.2f}]."
    )


def _said(scores: xr.Dataset, predictor: str) -> str:
    """A predictor's correlation and interval, in words."""
    at = scores.sel(predictor=predictor)
    label = probes.PREDICTORS[predictor].label
    return f"{label} {float(at['rho']):.2f} [{float(at['low']):.2f}, {float(at['high']):.2f}]"
