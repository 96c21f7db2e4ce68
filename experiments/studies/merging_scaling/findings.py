"""Tests the laws of unified merging on a finished run of `merging_scaling`, and summarises it."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.lab.findings import Finding, judged, mean_and_error, stated
from experiments.studies.merging_scaling.config import TABLE_2

if TYPE_CHECKING:
    import xarray as xr

SYMBOLS = {"steps": "K", "batch": "b", "rate": "η", "samples": "n", "tasks": "N"}
NAMES = {
    "steps": "steps K",
    "batch": "batch size b",
    "rate": "rate η",
    "samples": "samples per task n",
    "tasks": "merged tasks N",
    "ratio": "data ratio α",
}
CONSTANTS = {"smoothness": "L", "pl": "C", "variance": "σ²", "heterogeneity": "ζ²"}
# The paper's direction of the excess (Section V-B), from the first value to the last. With steps,
# the excess may increase, decrease, or decrease and then increase.
SAYS = {"steps": 0, "batch": -1, "rate": 1, "samples": -1, "tasks": 1, "ratio": -1}
RESNETS = ("resnet-18", "resnet-50", "resnet-152")  # in the order of Table II
CLOSE = 0.1  # the allowed difference of two exact exponents


def exponent(values: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Fits the exponent of a power law: the least-squares slope of log y in log value.

    >>> x = np.array([1.0, 2.0, 8.0])
    >>> round(float(exponent(x, 3 * x**-2)), 6)
    -2.0
    """
    x = np.log(values) - np.log(values).mean()
    return np.tensordot(x, np.log(y), 1) / (x @ x)


def exponent_and_error(values: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Fits the exponent of a mean over repetitions, with its jackknife standard error.

    - `values`: positive values, of shape (point,).
    - `y`: quantities at these values, of shape (point, repetition).

    It returns the exponent and its standard error, which are not finite if a mean is 0.
    """
    left_out = (y.sum(1, keepdims=True) - y) / (y.shape[1] - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        jackknifed = exponent(values, left_out)
        estimate = float(exponent(values, y.mean(1)))
        error = np.sqrt((y.shape[1] - 1) * np.mean((jackknifed - jackknifed.mean()) ** 2))
    return estimate, float(error)


def measured(dataset: "xr.Dataset") -> list[dict[str, Any]]:
    """Summarises how stability, loss and accuracy change along each law.

    Changes run from the first value to the last. For the excess and for losses they are changes of
    the logarithm; for accuracy they are differences. "Network" means networks merged by averaging.

    It returns for each law, by name: the exponents of stability (`testbed_bound`, `testbed_exact`,
    `network_bound`, and `network` with `network_error`); the changes of excess and loss
    (`testbed_change`, `network_change`) and of accuracy (`accuracy_change`); `least`, the values
    with the lowest excess of the testbed and loss of the networks; and `network_rise`, the change
    of the loss from there on.
    """
    rows = []
    for law in dataset["law"].values.astype(str):
        at = dataset.sel(law=law)
        x = at["value"].values
        bound = float(exponent(x, at["network_bound_stability"].values))
        slope, error = exponent_and_error(x, at["stability"].values.astype(float))
        loss = np.log(at["loss"].sel(merge="average").values)  # [point, replicate]
        exact = np.log(at["testbed_exact_excess"].values)
        bottom = [int(e.argmin()) for e in (exact, loss.mean(1))]
        accuracy = at["accuracy"].sel(merge="average").values
        rows.append(
            {
                "law": law,
                "testbed_bound": float(exponent(x, at["testbed_bound_stability"].values)),
                "testbed_exact": float(exponent(x, at["testbed_exact_stability"].values)),
                "network_bound": bound,
                "network": slope,
                "network_error": error,
                "testbed_change": float(exact[-1] - exact[0]),
                "network_change": float((loss[-1] - loss[0]).mean()),
                "network_rise": float((loss[-1] - loss[bottom[1]]).mean()),
                "accuracy_change": float((accuracy[-1] - accuracy[0]).mean()),
                "least": [float(x[i]) for i in bottom],
            }
        )
    return rows


def _power(symbol: str, exponent: float) -> str:
    """Formats a symbol with an exponent."""
    return f"{symbol}^{round(exponent, 2) + 0.0:.2f}"  # + 0.0: no -0.00


def _stability(row: dict[str, Any]) -> str:
    """Formats a law's exponents of stability."""
    power = partial(_power, SYMBOLS[row["law"]])
    text = (
        f"stability: bound {power(row['testbed_bound'])}, exact {power(row['testbed_exact'])} in "
        "the testbed"
    )
    if not np.isfinite(row["network_error"]):
        return f"{text}; networks: the replaced sample was drawn too rarely for an estimate"
    return (
        f"{text}; networks: bound {power(row['network_bound'])}, measured {power(row['network'])}"
        f" ± {row['network_error']:.2f}"
    )


def _excess(row: dict[str, Any], first: float, last: float) -> str:
    """Describes how a law changes the excess."""
    s = SYMBOLS[row["law"]]
    factors = np.exp([row["testbed_change"], row["network_change"]])
    text = (
        f"from {s} = {first:g} to {last:g} the excess is multiplied by {factors[0]:.2g} in the "
        f"testbed, the test loss of averaged networks by {factors[1]:.2g} and their accuracy "
        f"changes by {row['accuracy_change']:+.2f}; least at {s} = {row['least'][0]:g} and at "
        f"{row['least'][1]:g}"
    )
    if row["least"][1] != last:
        text += f", after which networks' loss rises by {np.expm1(row['network_rise']):.0%}"
        text += " (a minimum chosen after the fact)"
    if SAYS[row["law"]]:
        return text
    turns = [first < least < last for least in row["least"]]
    bed, net = ("falls, then rises" if turn else "does not turn" for turn in turns)
    return f"{text}; it {bed} in the testbed, {net} in networks, and the bound allows both"


def findings(dataset: "xr.Dataset") -> list[Finding]:
    """Tests the laws of unified merging.

    For each law it tests whether stability follows the bound of Theorem 1 in quadratics. If the
    paper gives a direction, it also tests whether the excess follows it in quadratics, and the test
    loss in networks. Findings on quadratics are exact and have no p value.
    """
    if "network" in dataset.attrs:
        return list(_of_experts(dataset))
    return [finding for row in measured(dataset) for finding in _of_law(dataset, row)]


def ends(dataset: "xr.Dataset", law: str, merge: str) -> tuple[float, float, np.ndarray]:
    """Compares the first and the last value of a law for pre-trained networks.

    It returns the values, and the change of the logarithm of the test loss for each group. For the
    law of tasks it compares different groups.
    """
    at = dataset.sel(law=law, merge=merge)
    x = at["value"].values
    last = int(np.isfinite(x).sum()) - 1
    loss = np.log(at["loss"].values)
    change = loss[last] - loss[0]
    return float(x[0]), float(x[last]), change[np.isfinite(change)]


def _of_experts(dataset: "xr.Dataset") -> Iterator[Finding]:
    """Yields the findings on pre-trained networks."""
    for law in dataset["law"].values.astype(str):
        first, last, change = ends(dataset, law, "average")
        if not (says := SAYS[law]):
            continue
        yield judged(
            "unified merging, Sec. V-B",
            f"the test loss of averaged networks {'grows' if says > 0 else 'falls'} with "
            f"{NAMES[law]}, {dataset.attrs['network']}",
            "stated for networks, Figs. 2 and 3",
            f"from {first:g} to {last:g} its logarithm changes by {_pm(change)} over groups",
            says * change,
        )


def _pm(values: np.ndarray) -> str:
    """Formats mean ± standard error."""
    if values.size < 2:
        return f"{values.mean():+.2g} (one)" if values.size else "undefined"
    return f"{values.mean():+.2g} ± {values.std(ddof=1) / values.size**0.5:.1g}"


def table(dataset: "xr.Dataset") -> list[tuple[str, ...]] | None:
    """Tabulates the accuracy of pre-trained networks' experts, with the paper's Table II.

    It returns a row of column names and a row for each task, or None without pre-trained networks.
    """
    if "network" not in dataset.attrs:
        return None
    network = dataset.attrs["network"]
    rows = [("task", f"{network}, here", "Table II")]
    for task, value in zip(
        dataset["task"].values.astype(str), dataset["expert_accuracy"].values, strict=True
    ):
        known = network in RESNETS and task in TABLE_2
        printed = f"{TABLE_2[task][RESNETS.index(network)]:.4f}" if known else "none"
        rows.append((task, f"{value:.4f}", printed))
    return rows


def _summary_of_experts(dataset: "xr.Dataset") -> str:
    """Returns a line for each law, and one on the experts."""
    lines = []
    for law in dataset["law"].values.astype(str):
        told = []
        for merge in dataset["merge"].values.astype(str):
            first, last, change = ends(dataset, law, merge)
            told.append(f"{merge} {_pm(change)}")
        accuracy, _ = mean_and_error(dataset["accuracy"].sel(law=law), "replicate")
        shown = ", ".join(f"{v:.3f}" for v in accuracy[np.isfinite(accuracy[:, 0]), 0])
        lines.append(
            f"{NAMES[law][:1].upper()}{NAMES[law][1:]}, from {first:g} to {last:g}: the logarithm "
            f"of the test loss changes by {', '.join(told)} (± s.e. over groups); accuracy of the "
            f"average {shown}."
        )
    mean = float(dataset["expert_accuracy"].mean())
    lines.append(f"Experts alone, {dataset.attrs['network']}: mean accuracy {mean:.3f}.")
    return "\n".join(lines)


def _of_law(dataset: "xr.Dataset", row: dict[str, Any]) -> Iterator[Finding]:
    """Yields the findings for one law."""
    law, says = row["law"], SAYS[row["law"]]
    at, name, power = dataset.sel(law=law), NAMES[law], partial(_power, SYMBOLS[law])
    if says:
        goes = {1: "grows", -1: "falls"}[says]
        loss = np.log(at["loss"].sel(merge="average").values)
        change = loss[-1] - loss[0]
        where, paper = "unified merging, Sec. V-B", "stated for the bound of Theorem 3"
        yield Finding(
            where,
            f"the excess {goes} with {name}, in quadratics",
            paper,
            f"multiplied by {np.exp(row['testbed_change']):.2g}, exactly",
            "holds" if np.sign(row["testbed_change"]) == says else "fails",
        )
        yield judged(
            where,
            f"the test loss of averaged networks {goes} with {name}",
            paper,
            f"its logarithm changes by {_pm(change)}",
            says * change,
        )
    near = abs(row["testbed_exact"] - row["testbed_bound"]) < CLOSE
    yield Finding(
        "unified merging, Theorem 1",
        f"stability of quadratics depends on {name} as its bound does, up to {CLOSE:g} in the "
        "exponent",
        power(row["testbed_bound"]),
        f"{power(row['testbed_exact'])}, exactly",
        "holds" if near else "fails",
    )


def summary(dataset: "xr.Dataset") -> str:
    """Describes every law in the testbed and in networks.

    It returns a line for each law, one on how loose the bounds are, and one with the accuracy of
    each merge.
    """
    if "network" in dataset.attrs:
        return _summary_of_experts(dataset)
    lines = []
    for row in measured(dataset):
        x = dataset["value"].sel(law=row["law"]).values
        name = NAMES[row["law"]]
        lines.append(
            f"{name[:1].upper()}{name[1:]}. {_stability(row)}; {_excess(row, x[0], x[-1])}."
        )
    loss = dataset["loss"].sel(merge="average").mean("replicate")
    orders = {
        "the excess": (
            np.log10(dataset["testbed_bound_excess"] / dataset["testbed_exact_excess"]),
            np.log10(dataset["network_bound_excess"] / loss),
        ),
        "stability": (
            np.log10(dataset["testbed_bound_stability"] / dataset["testbed_exact_stability"]),
            np.log10(dataset["network_bound_stability"] / dataset["stability"].mean("replicate")),
        ),
    }
    loose = "; ".join(
        f"of {name} it is 10^{float(bed.min()):.1f} to 10^{float(bed.max()):.1f} times too large "
        f"in the testbed, 10^{float(net.min()):.1f} to 10^{float(net.max()):.1f} in networks"
        for name, (bed, net) in orders.items()
    )
    a = dataset.attrs
    constants = ", ".join(f"{symbol} = {a[name]:.3g}" for name, symbol in CONSTANTS.items())
    lines.append(f"Theorems 3 and 1, with constants measured at the centre ({constants}): {loose}.")
    accuracy = dataset["accuracy"].sel(law="tasks")
    last = accuracy.isel(point=-1)
    named = dataset["merge"].values.astype(str)
    listed = ", ".join(f"{m} {stated(last.sel(merge=m), 3, sign=False)}" for m in named)
    n = int(dataset["value"].sel(law="tasks").values[-1])
    lines.append(f"Test accuracy of {n} merged (± s.e.): {listed}.")
    return "\n".join(lines)
