"""Tests on a finished run whether each growth method saves training steps, and tabulates the
results.

`PRINTED` holds the results in each method's paper, for comparison.
"""

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, judged, mean_and_error, stated
from experiments.studies.shared import growth_ways as ways

# By method: its paper, and the printed savings of compute or steps.
PRINTED = {
    "net2net": ("Net2Net, arXiv 1511.05641", "faster, as curves"),
    "fpi": ("bert2BERT, arXiv 2110.07143", "30.4 % (BERT)"),
    "aki": ("bert2BERT, arXiv 2110.07143", "38.4 % (BERT)"),
    "lemon": ("LEMON, arXiv 2310.07999", "56.7 % (ViT), 33.2 % (BERT)"),
    "ligo": ("LiGO, arXiv 2303.00980", "44.7 % (BERT)"),
    "g_stack": ("G_stack, arXiv 2405.15319", "54.6 % (7B parameters)"),
    "hypercloning": ("HyperCloning, arXiv 2409.12903", "not compared"),
    "hypercloning_noise": ("HyperCloning, arXiv 2409.12903", "not compared"),
    "msg": ("masked structural growth, arXiv 2305.02869", "not compared"),
    "transport": ("transport of activations, arXiv 2602.05495", "not compared"),
    **dict.fromkeys(("sail", "sail_svd", "sail_random"), ("SAIL", "faster, as curves")),
}
OTHERS = ("a method of sail_jax.growth", "not compared")


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Tests for each method whether it saves training steps.

    Steps are counted up to the lowest held-out loss that both the method and training from scratch
    reach.

    Returns one finding for each growth method.
    """
    declared = []
    for way in dataset["way"].values.astype(str):
        if way == ways.SCRATCH:
            continue
        where, paper = PRINTED.get(way, OTHERS)
        saved, beside = (dataset[name].sel(way=way) for name in ("saved", "scratch_steps"))
        ours = f"{stated(saved, 0)} of {stated(beside, 0, sign=False)}"
        claim = f"{way} saves training steps to the lowest held-out loss that scratch also reaches"
        declared.append(judged(where, claim, paper, ours, saved.values))
    return declared


def table(dataset: xr.Dataset) -> list[tuple[str, ...]]:
    """Tabulates the methods, most steps saved first.

    Returns a row of column names and a row for each method. The columns are the method; its loss
    right after growth minus the small network's; steps saved (mean and standard error); the number
    of seeds in which it reached the lowest loss from scratch; the fraction of compute saved,
    including the small network's training; and its lowest held-out loss.
    """
    mean, error = mean_and_error(dataset["saved"])
    excess = dataset["step0_excess"].mean("seed").values
    share = 100 * dataset["compute_saved_with_source"].mean("seed").values
    lowest, spread = mean_and_error(dataset["loss"].min("step"))
    rows = [("method", "step 0 - source", "steps saved", "reached", "compute", "lowest loss")]
    for i in np.argsort(-mean):
        reached = dataset["reached"].values[i]
        cells = (
            f"{excess[i]:+.2g}",
            f"{mean[i]:.0f} ± {error[i]:.0f}",
            f"{reached.sum()}/{reached.size}",
            f"{share[i]:+.0f} %",
            f"{lowest[i]:.3f} ± {spread[i]:.3f}",
        )
        rows.append((str(dataset["way"].values[i]), *cells))
    return rows


def summary(dataset: xr.Dataset) -> str:
    """Describes the loss from scratch, and how well growth preserved the loss.

    Returns one or two sentences; the second one only with function-preserving methods.
    """
    name = dataset["way"].values.astype(str)
    exact = dataset["exact"].values & (name != ways.SCRATCH)
    excess = np.abs(dataset["step0_excess"].values[exact])
    preserved = (
        f" Function-preserving growth changed the loss by at most {excess.max(initial=0):.1g}."
    )
    level = dataset["level"].sel(way=ways.SCRATCH)
    return (
        f"From scratch the held-out loss falls to {stated(level, 3, sign=False)} nats in "
        f"{dataset.attrs['steps']} steps (mean ± s.e. over {level.size} seeds)."
        f"{preserved if exact.any() else ''}"
    )
