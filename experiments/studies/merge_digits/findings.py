"""Tests which merge is better on a finished run of `merge_digits`, and summarises the run."""

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, judged, stated

PRINTED = "yes on average, for CLIP's ViT-B/32 on eight data sets"
CLAIMS = (  # better, worse, source of the claim
    ("task arithmetic", "base", "task arithmetic (Ilharco et al. 2023)"),
    ("TIES", "soup", "TIES (Yadav et al. 2023)"),
    ("TIES", "task arithmetic", "TIES (Yadav et al. 2023)"),
)


def own_accuracy(dataset: xr.Dataset) -> xr.DataArray:
    """Computes the accuracy of the experts, each on its own task.

    Args:
      dataset: The dataset of `run`.

    Returns:
      The mean over experts, `[replicate]`.
    """
    experts = dataset["accuracy"][:, 1 : 1 + dataset.sizes["task"]]
    return xr.DataArray(np.diagonal(experts, axis1=1, axis2=2).mean(-1), dims="replicate")


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Tests which merge is more accurate, and whether cross-task linearity predicts accuracies.

    Accuracies are measured on the test images, which are not used to choose the scales.

    It returns a finding for each comparison in `CLAIMS`, and one for the line between two experts.
    """
    mean = dataset["accuracy"].mean("task")
    declared = []
    for better, worse, where in CLAIMS:
        ahead = mean.sel(model=better) - mean.sel(model=worse)
        claim = f"{better} is more accurate than {worse}, averaged over the tasks"
        declared.append(judged(where, claim, PRINTED, f"by {stated(ahead, 3)}", ahead.values))
    wrong = [
        ((dataset[f"line_{how}"] - dataset["line_accuracy"]) ** 2).mean(("weight", "end")) ** 0.5
        for how in ("chord", "predicted")
    ]
    chord, outputs = (stated(error, 3, sign=False) for error in wrong)
    return [
        *declared,
        judged(
            "cross-task linearity, Sec. 3",
            "along the line between two experts, adding their outputs predicts the accuracy of "
            "adding their weights better than interpolating their accuracies does",
            "features nearly equal, without figures of accuracy",
            f"r.m.s. error {outputs} against {chord}",
            (wrong[0] - wrong[1]).values,
        ),
    ]


def _pm(values: xr.DataArray) -> str:
    """Formats mean and standard deviation over splits."""
    return f"{float(values.mean()):.3f} ± {float(values.std(ddof=1)):.3f}"


def summary(dataset: xr.Dataset) -> str:
    """Describes the accuracy of every merge, and the retained part of the experts' gain."""
    mean = dataset["accuracy"].mean("task")
    own, base = own_accuracy(dataset), mean.sel(model="base")
    merges = ["soup", *map(str, dataset["merge"].values)]
    best = max(merges, key=lambda m: float(mean.sel(model=m).mean()))
    gained, retained = float((own - base).mean()), float((mean.sel(model=best) - base).mean())
    share = f" and keeps {retained / gained:.0%} of the experts' gain" if gained > 0 else ""
    listed = ", ".join(f"{m} {_pm(mean.sel(model=m))}" for m in merges)
    return (
        f"Test accuracy, mean over {dataset.sizes['task']} tasks (± s.d. over "
        f"{dataset.sizes['replicate']} splits): base {_pm(base)}, {listed}, an expert on its own "
        f"task {_pm(own)}. {best[:1].upper()}{best[1:]} has the highest mean{share}."
    )
