"""The findings of `relu_transfer`, computed from the stored dataset alone."""

import numpy as np
import xarray as xr
from xarray import DataArray

from experiments.lab.findings import Finding, judged, stated
from theory import student_teacher as st


def measured_boundary(dataset: xr.Dataset, gain: str = "gain") -> np.ndarray:
    """Finds for each mu the number of samples from which training from scratch is better."""
    return np.array([st.crossing(dataset.n.values, row) for row in dataset[gain].values])


def boundary_error(dataset: xr.Dataset, risk: str = "linear_risk") -> np.ndarray:
    """Computes the standard error of the logarithm of `measured_boundary`, over teachers.

    The error is the jackknife's: sqrt((k - 1) / k sum (b_i - mean b)^2), b_i without teacher i.

    Args:
      dataset: The study's dataset.
      risk: The risk of transfer, "linear_risk" or "descended_risk".

    Returns:
      The errors `(mu,)`; NaN if there is no boundary without one of the teachers.
    """
    gain = ((dataset.scratch_risk - dataset[risk]) / dataset.variance).mean("draw")
    count = gain.sizes["teacher"]
    left_out = (gain.sum("teacher") - gain) / (count - 1)
    rows = left_out.transpose("teacher", "mu", "n").values
    edges = np.log([[st.crossing(dataset.n.values, row) for row in one] for one in rows])
    return np.sqrt((count - 1) * edges.var(0))


def kernel_distance(dataset: xr.Dataset, name: str) -> float:
    """Computes the relative distance of a kernel matrix from the source teacher's.

    |K - K_source| / |K_source|  (Frobenius norms)
    """
    source = dataset.kernel_source.values
    return float(np.linalg.norm(dataset[name].values - source) / np.linalg.norm(source))


FIG_4 = "features are fate, Fig. 4"


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Judges the paper's claims about Figure 4.

    The claims are about how fast the risk of training from scratch decreases, the part of the
    target that frozen features cannot express, and the side of the predicted boundary on which they
    are better. Repetitions are teachers.

    Returns the findings; without pretrained networks, only the first.
    """
    scratch = dataset.scratch_risk
    law = st.fit_power_law(dataset.n.values, scratch.mean("draw").values)
    exponents = DataArray(law.exponents, dims="teacher")
    declared = [
        judged(
            f"{FIG_4} (c)",
            "the risk of training from scratch falls faster than 1/n",
            "n^-1.18",
            f"n^-ν with ν = {stated(exponents, sign=False)}",
            exponents.values - 1,
        )
    ]
    if "outside" not in dataset:
        return declared
    outside = np.log(dataset.outside / dataset.norm)
    grown = outside.isel(mu=-1) - outside.isel(mu=0)
    first, last = dataset.mu.values[[0, -1]]
    declared.append(
        judged(
            f"{FIG_4} (d)",
            "the part of the target that frozen features cannot express grows with the fraction "
            "that the source lacks",
            "a curve that rises from 0 to 0.04, without other figures",
            f"its logarithm by {stated(grown)} from μ = {first:g} to {last:g}",
            grown.values,
        )
    )
    lead = (np.log(scratch) - np.log(dataset.linear_risk)).mean("draw")
    below = _below(dataset, law)
    for side, sign, words in ((below, 1, "better"), (~below, -1, "worse")):
        ahead = sign * lead.where(side).mean(("mu", "n"))
        declared.append(
            judged(
                f"{FIG_4} (e)",
                f"frozen features are {words} than training from scratch with "
                f"{'fewer' if sign > 0 else 'more'} samples than the boundary, on average "
                "(boundary from the other teachers)",
                "a boundary that improves as n grows, without figures",
                f"the lower risk's logarithm by {stated(ahead)}",
                ahead.values,
            )
        )
    return declared


def _below(dataset: xr.Dataset, law: st.PowerLaw) -> xr.DataArray:
    """Returns whether n is below the boundary that the other teachers predict, for each teacher.

    A teacher is not used for its own prediction, which can therefore be evaluated on it.
    """
    edges = dataset.outside.copy(data=np.log(st.boundary(law, dataset.outside.values.T)).T)
    return np.log(dataset.n) < (edges.sum("teacher") - edges) / (edges.sizes["teacher"] - 1)


def summary(dataset: xr.Dataset) -> str:
    """Summarises the dataset in a few sentences.

    Returns the exponent of the scratch risk and whether the law is straight. With pretrained
    networks it also returns the error of the predicted boundary, and the effect of pretraining on
    the features.
    """
    nu, low, high = dataset.exponent.values
    bend = dataset.curvature.values
    straight = "straight" if bend[1] < 0 < bend[2] else f"bent (curvature {bend[0]:+.2f})"
    sentence = (
        f"The scratch risk falls as n^-ν with ν = {nu:.2f} (95 % interval {low:.2f} to {high:.2f} "
        f"over {dataset.sizes['teacher']} teachers; in log-log it is {straight})"
    )
    if "outside" not in dataset:
        return f"{sentence}."
    measured, predicted = measured_boundary(dataset), dataset.boundary.sel(limit="mean").values
    finite = np.isfinite(measured)
    if finite.any():
        ratio = (measured / predicted)[finite]
        first, last = dataset.mu.values[finite][[0, -1]]
        sentence += (
            f". The measured boundary is {ratio[0]:.2f} times the predicted n for "
            f"μ = {first:g}, and {ratio[-1]:.2f} times for μ = {last:g}"
        )
    if "descended_risk" in dataset:
        ratio = np.log(dataset.descended_risk / dataset.linear_risk).mean(("mu", "draw", "n"))
        sentence += (
            f". If descent fits the output layer, the logarithm of its risk is greater by "
            f"{stated(ratio)}"
        )
    worse = (dataset.outside > dataset.outside_untrained).mean("teacher").values > 0.5
    sentence += (
        f". Pretrained features express less of the target than untrained ones for "
        f"{int(worse.sum())} of the {len(worse)} μ"
    )
    return (
        f"{sentence}. Pretraining brings the kernel from "
        f"{kernel_distance(dataset, 'kernel_initial'):.0%} to "
        f"{kernel_distance(dataset, 'kernel_pretrained'):.0%} distance from the source teacher's "
        f"(μ = {dataset.attrs['kernel_mu']:g})."
    )
