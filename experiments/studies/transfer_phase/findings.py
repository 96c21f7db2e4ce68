"""The findings of `transfer_phase`, computed from the stored dataset alone."""

from collections.abc import Iterator

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, judged, mean_and_error
from experiments.studies.shared import transfer_regions as regions
from experiments.studies.shared.transfer_plots import layers
from experiments.studies.shared.transfer_regions import ROUNDING, judged_regions
from experiments.studies.transfer_phase.compared import gains, parts

WHERE = {
    "linear": ("features are fate, eq. 13, Figs. 1 and 6", "the limit n, d → ∞, and slices"),
    "fine_tuning": ("features are fate, eq. 17, Fig. 3", "it helps up to 60 degrees, for every σ"),
}
# Both are averages over random data. The estimator of fine-tuning uses the closed form's c.
SOURCE = {"linear": "simulation", "fine_tuning": "estimator, averaged over data,"}


def _shown(dataset: xr.Dataset) -> Iterator[tuple[str, str, xr.Dataset]]:
    """Yields the modes that were run, their names, and the dataset at the largest noise.

    Fine-tuning is shown at two layers if they are among the depths, else at the last depth.
    """
    at = dataset.sel(sigma=dataset.sigma.max())
    depth = 2 if 2 in dataset.depth else float(dataset.depth[-1])
    if "linear_theory" in dataset:
        yield "linear", "linear transfer", at
    if "fine_tuning_theory" in dataset:
        name = f"fine-tuning ({layers(depth)}; estimator, averaged over data)"
        yield "fine_tuning", name, at.sel(depth=depth)


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Judges whether transfer hurts and helps where and as much as theory predicts.

    It uses the largest noise. It also judges trained networks, if there are any.

    Returns the findings. Datasets of an older version contain no values of single draws, and give
    no findings.
    """
    # Runs of earlier versions did not store single data sets.
    if "region" not in dataset:
        return []
    judgements = [
        finding
        for mode, name, at in _shown(dataset)
        for finding in judged_regions(
            f"{name} at σ = {float(at.sigma):g}",
            *WHERE[mode],
            at[f"{mode}_region"],
            at[f"{mode}_region_theory"],
        )
    ]
    judgements += _of_flows(dataset)
    judgements += [f for at in _trained(dataset) for f in _of_networks(*at)]
    return judgements + list(_of_starts(dataset))


def _by_region(gain: np.ndarray, theory: np.ndarray) -> tuple[xr.DataArray, xr.DataArray]:
    """Averages gains [draw, row, column] and theory [row, column] over each region."""
    split = regions.split(theory, np.array(True))
    named = {"region": list(regions.REGIONS)}
    return (
        xr.DataArray(regions.means(gain, split), named, ("region", "draw")),
        xr.DataArray(regions.means(theory[None], split)[:, 0], named, ("region",)),
    )


def _of_flows(dataset: xr.Dataset) -> Iterator[Finding]:
    """Judges whether gradient flow of fine-tuned networks agrees with theory."""
    if "flow_gain" not in dataset:
        return
    at = dataset.attrs
    yield from judged_regions(
        f"fine-tuning by gradient flow ({layers(at['flow_depth'])}, d = {at['flow_d']}, "
        f"t = {at['flow_time']:g}) at σ = {at['flow_sigma']:g}",
        *WHERE["fine_tuning"],
        *_by_region(dataset.flow_gain.values, dataset.flow_theory.values),
    )


def _trained(
    dataset: xr.Dataset,
) -> Iterator[tuple[str, str, xr.DataArray, xr.DataArray]]:
    """Yields the data to judge trained networks, for each mode, at the largest noise.

    These are the mode, its name, the transferability `[network, kind, cell_load, cell_theta]`, and
    its closed form.
    """
    if "risk" not in dataset:
        return
    sigma, depth = dataset.sigma.max(), dataset.attrs["trained_layers"]
    shown = gains(dataset).sel(sigma=sigma)
    theory = dataset.cell_theory.sel(sigma=sigma, cell_load=shown.cell_load)
    for mode in dataset.mode.values:
        word = {"linear": "linear transfer", "fine_tuning": "fine-tuning"}[mode]
        name = f"{word} of trained networks ({layers(depth)}) at σ = {float(sigma):g}"
        yield mode, name, shown.sel(mode=mode), theory.sel(mode=mode)


def _of_networks(
    mode: str, name: str, gain: xr.DataArray, theory: xr.DataArray
) -> Iterator[Finding]:
    """Judges whether trained networks agree with theory.

    It also judges two explanations of the difference: that stopping matters less than the choice of
    the data set, and that the gradient flow, stopped at the same time, is closer to the network.
    """
    where, paper = f"{WHERE[mode][0]}, App. D.1", WHERE[mode][1]
    network = gain.sel(kind="network")
    yield from judged_regions(name, where, paper, *_by_region(network.values, theory.values))
    cells = ("cell_load", "cell_theta")
    estimator, flow = gain.sel(kind="estimator"), gain.sel(kind="flow")
    trained = abs(network - estimator).mean(cells)
    drawn = abs(estimator - estimator.mean("network")).mean(cells)
    yield judged(
        where,
        f"{name}: stopping changes T less than another data set does, |network - "
        "estimator| against |estimator - its mean over data sets|, averaged over points",
        "α → 0, t → ∞; trained with α = 1e-5, 1e5 steps of 1e-3",
        f"{_spelt(trained)} against {_spelt(drawn)}",
        (drawn - trained).values,
    )
    claim = (
        f"{name}: its gradient flow as α → 0, stopped at the same time, is closer to it than "
        "the end of training"
    )
    stopped = abs(network - flow).mean(cells)
    if not np.isfinite(stopped).all():
        why = "for more than two small layers, no flow from scratch is known"
        yield Finding(where, claim, paper, why, "not tested")
        return
    yield judged(
        where,
        claim,
        "nothing is printed",
        f"{_spelt(stopped)} against {_spelt(trained)}",
        (trained - stopped).values,
    )


def _of_starts(dataset: xr.Dataset) -> Iterator[Finding]:
    """Judges whether violating the assumption on initial weights, as normal weights do, matters."""
    if "orthogonal_risk" not in dataset:
        return
    where = "features are fate, eq. 22 and App. D.1"
    invariant = dataset.invariant.sel(start="normal")
    yield judged(
        where,
        "normal initial weights break the assumption (22): the least eigenvalue of "
        "W_lᵀW_l - W_{l+1}W_{l+1}ᵀ is below 0",
        "assumed by Lemma 3.3 and Theorems 3.4 to 3.9; App. D.1 trains from normal weights",
        f"{_spelt(invariant)} α² (orthogonal: {_spelt(dataset.invariant.sel(start='orthogonal'))} "
        "α²)",
        -invariant.values,
    )
    other = gains(dataset, of="orthogonal_risk").sel(sigma=dataset.sigma.max())
    for mode, name, gain, _ in _trained(dataset):
        network, estimator = gain.sel(kind="network"), gain.sel(kind="estimator")
        cells = ("cell_load", "cell_theta")
        apart = abs(network - other.sel(mode=mode)).mean(cells)
        drawn = abs(estimator - estimator.mean("network")).mean(cells)
        yield judged(
            where,
            f"{name}: normal weights instead of orthogonal ones, which satisfy (22), change T "
            "less than another data set does, averaged over points",
            "theory from (22), experiments from normal weights, and both agree",
            f"{_spelt(apart)} against {_spelt(drawn)}",
            (drawn - apart).values,
        )


def summary(dataset: xr.Dataset) -> str:
    """Summarises the dataset in a few sentences.

    Returns in how much of the plane transfer hurts, and how far measurements are from theory. With
    trained networks it also returns how far they are from theory, and why.
    """
    sentences = []
    for mode, name, at in _shown(dataset):
        theory, mean = at[f"{mode}_theory"].values, at[f"{mode}_mean"].values
        stderr = at[f"{mode}_std"].values / np.sqrt(at.attrs["draws"])
        # For n >= d fine-tuning equals scratch training, so there is no sign, up to rounding.
        decided = np.abs(theory) > 4 * np.maximum(stderr, ROUNDING)
        agree = np.mean(np.sign(theory[decided]) == np.sign(mean[decided]))
        z = (mean - theory)[stderr > ROUNDING] / stderr[stderr > ROUNDING]
        sentences.append(
            f"{name[:1].upper()}{name[1:]} hurts in {np.mean(theory < -ROUNDING):.0%} of the "
            f"(n/d, θ) plane at σ = {float(at.sigma):g}. Where |T| exceeds 4 standard errors, "
            f"closed form and {SOURCE[mode]} have the same sign in {agree:.1%} of the points. "
            f"The median |z| over all points is {np.median(np.abs(z)):.2f}."
        )
    sentences.extend(_distances(name, gain, at) for _, name, gain, at in _trained(dataset))
    if "risk" in dataset:
        sentences.append(
            "Stopping leaves slow parts unlearned: small weights take long to leave 0, and "
            "directions with small eigenvalues of XᵀX/n, most of them near n = d, take long to "
            "be fitted. Descent differs from its flow by terms of first order in the rate. Weights "
            "that the data do not move keep size α."
        )
    return " ".join(sentences)


def _spelt(values: xr.DataArray) -> str:
    """Formats mean ± standard error of distances, which may differ by orders of magnitude."""
    mean, error = (float(v) for v in mean_and_error(values, str(values.dims[0])))
    return f"{mean:.2g} ± {error:.1g}"


def _distances(name: str, gain: xr.DataArray, theory: xr.DataArray) -> str:
    """Describes the distances between closed form, estimator and network, and their causes."""
    closed, cells = theory.expand_dims(network=gain.sizes["network"]), ("cell_load", "cell_theta")
    estimator, network = gain.sel(kind="estimator"), gain.sel(kind="network")
    pairs = {
        "closed form and estimator": closed - estimator,
        "closed form and network": closed - network,
        "estimator and network": estimator - network,
    }
    told = []
    for pair, difference in pairs.items():
        apart = abs(difference.mean("network")).stack(point=cells)
        error = difference.std("network", ddof=1) / np.sqrt(gain.sizes["network"])
        # A normal variable is sqrt(2 / pi) standard deviations away from its mean on average.
        by_chance = float(np.sqrt(2 / np.pi) * error.mean())
        told.append(
            f"{pair} {_spelt(apart)} (largest {float(apart.max()):.2g}; by chance of the draws "
            f"{by_chance:.2g})"
        )
    sentence = (
        f"{name[:1].upper()}{name[1:]}: distances of T, mean over {apart.size} points ± standard "
        f"error, between {'; '.join(told)}."
    )
    by_load = {k: abs(v.mean("network")).mean("cell_theta") for k, v in parts(gain).items()}
    sizes = {cause: float(values.mean()) for cause, values in by_load.items()}
    if not np.isfinite(list(sizes.values())).all():
        return sentence
    causes = ", ".join(f"{cause} {size:.2g}" for cause, size in sizes.items())
    largest = max(sizes, key=lambda cause: sizes[cause])
    load = float(gain.cell_load[int(by_load[largest].values.argmax())])
    return (
        f"{sentence} Causes of the difference between estimator and network: {causes}. The "
        f"largest is {largest}, above all at n/d = {load:.2f}."
    )
