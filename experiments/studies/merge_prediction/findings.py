"""Tests on a finished run which predictors rank merges, and summarises the best ones."""

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, judged, stated
from experiments.studies.merge_prediction import plots as figures
from experiments.studies.merge_prediction import probes, ranking

CTL, UNIFIED = "cross-task linearity", "unified merging"
WHERE = {  # the source of a predictor; the others are probes of this package
    **dict.fromkeys(("ctl_cosine", "ctl_gap", "ctl_output", "ensemble"), CTL),
    **dict.fromkeys(("members", "lemma", "main_term"), f"{CTL}, Lemma 1 and Theorem 1"),
    **dict.fromkeys(("gradients", "bound", "bound_corrected"), f"{UNIFIED}, Theorem 3"),
    "sign_conflict": "TIES (Yadav et al. 2023)",
    "task_cosine": "task arithmetic (Ilharco et al. 2023)",
}
PROBES = "sail_jax.probe and sail_jax.distances"
# The smallest number of merges whose order is meaningful.
FEWEST = 3


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Tests for each predictor whether it ranks the merges of one base model.

    A predictor's margins are its rank correlations with the loss that averaging adds, one for each
    base model with at least `FEWEST` merges. If there are enough of them, only experts fine-tuned
    from one pre-trained model are compared.
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
                f"{probes.PREDICTORS[name].label}: a larger value means that averaging adds more "
                "loss, among merges of one base model",
                "not a claim about ranks",
                f"Spearman's correlation {ours}, over {margins.size} base models",
                margins,
            )
        )
    return declared


def _ordinary(dataset: xr.Dataset) -> str:
    """Returns the scope of experts fine-tuned from one pre-trained model, or "all" if few."""
    tuned = dataset["within"].sel(scope="all, tuned")
    return "all, tuned" if int(tuned.sum()) >= FEWEST else "all"


def summary(dataset: xr.Dataset) -> str:
    """Describes which predictors rank the results of averaging best.

    It returns sentences with the four best predictors and 95 % intervals, for each family, in all
    merges, and in merges of experts fine-tuned from one pre-trained model. For comparison it also
    has the correlation of the merge itself on few examples.
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
        f"{n} merges were made. Numbers are Spearman's correlations with the loss that averaging "
        f"adds to the experts' own, with 95 % intervals over base models. Best predictors for "
        f"{', then for '.join(lines)}. "
        f"Running the merge itself on {probes.PROBED} examples of each task gives "
        f"{float(sample['rho']):.2f} [{float(sample['low']):.2f}, {float(sample['high']):.2f}]."
    )


def _said(scores: xr.Dataset, predictor: str) -> str:
    """Formats a predictor's correlation and interval."""
    at = scores.sel(predictor=predictor)
    label = probes.PREDICTORS[predictor].label
    return f"{label} {float(at['rho']):.2f} [{float(at['low']):.2f}, {float(at['high']):.2f}]"
