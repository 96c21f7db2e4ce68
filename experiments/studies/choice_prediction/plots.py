"""The figure of `choice_prediction`: hit rates, calibration, and the loss of wrong choices."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.bands import legend
from experiments.studies.choice_prediction.scores import Case, cases, interval, weights
from sail_jax.drawing import style

LABELS = {
    "numbers": "transfer: n, d, noise, angle",
    "kernels": "transfer: tangent features",
    "spread": "merges: spread of task vectors",
}
CHOOSERS = {"theory": "o", "majority": "s", "always": "D"}


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws the scores of theories and rules, with 95 % bootstrap intervals over settings."""
    figure, (left, right, below) = style.panels(3, 2, wide=True, width=4.8, height=3.4)
    scored, about = cases(dataset), (dataset.attrs["draws"], dataset.attrs["seed"])
    _rates(left, {k: case.hits() for k, case in scored.items()}, about)
    left.set(xlabel="share of settings", title="(a) the choice is the winner", xlim=(-0.02, 1.02))
    left.set_yticks(range(len(scored)), [LABELS[name] for name in scored])
    _rates(right, {k: case.regrets() for k, case in scored.items()}, about)
    right.set(xlabel="test loss above the winner's", title="(b) cost of the choice")
    right.set_yticks(range(len(scored)), [""] * len(scored))
    for i, (name, case) in enumerate(scored.items()):
        _calibration(below, case, about, i, LABELS[name])
    below.plot([0, 1], [0, 1], "--", lw=1.2, color=style.FAINT, label="calibrated")
    below.set(
        xlabel="probability that theory states", ylabel="share of winners", title="(c) calibration"
    )
    legend(figure, left, below, ncols=3)
    return {"forecasts": figure}


def _rates(ax: Axes, scored: dict[str, dict[str, np.ndarray]], about: tuple[int, int]) -> None:
    """Draws a mean over settings for each theory and rule."""
    for k, (chooser, marker) in enumerate(CHOOSERS.items()):
        at = np.array([interval(values[chooser], *about) for values in scored.values()]).T
        mean, low, high = at
        label = {"majority": "majority rule", "always": "always fine-tune, or average"}
        ax.errorbar(
            mean, np.arange(len(mean)) + 0.2 * (k - 1), xerr=[mean - low, high - mean], fmt=marker,
            ms=5, lw=1.2, color=(style.INK, style.PALETTE[4], style.PALETTE[5])[k],
            label=label.get(chooser, chooser),
        )  # fmt: skip
    ax.set_ylim(len(scored) - 0.5, -0.5)


def _calibration(ax: Axes, case: Case, about: tuple[int, int], i: int, label: str) -> None:
    """Draws how often choices won against their probability, in bins."""
    count = len(case.loss)
    predicted, observed = case.calibration(np.ones(count))
    drawn = np.array([case.calibration(w)[1] for w in weights(count, *about)])
    some = np.isfinite(observed)
    low, high = np.nanpercentile(drawn[:, some], [2.5, 97.5], axis=0)
    ax.errorbar(
        predicted[some], observed[some],
        yerr=np.abs([observed[some] - low, high - observed[some]]), fmt="sDo"[i % 3] + "-", ms=4,
        lw=1.1, color=style.PALETTE[i], label=label,
    )  # fmt: skip
