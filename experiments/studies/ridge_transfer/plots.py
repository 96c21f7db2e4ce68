"""The figure of `ridge_transfer`."""

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from experiments.lab.bands import legend
from sail_jax.drawing import style


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws risk against ridge strength, one panel for each case.

    Returns the figure "ridge", with the exact risk, its limit, simulated means, and the best ridge.
    """
    figure, ((left, right),) = style.figure(1, 2, width=4.6, height=3.8)
    for i, ax in enumerate((left, right)):
        case = dataset.isel(case=i)
        stderr = case["std"] / np.sqrt(dataset.attrs["draws"])
        ax.plot(case.ridge, case.exact, color=style.PALETTE[0], label="exact")
        ax.plot(case.ridge, case.limit, color=style.FAINT, ls="--", label="limit $n → ∞$ (eq. 15)")
        ax.errorbar(
            case.ridge,
            case["mean"],
            stderr,
            fmt="o",
            ms=3.5,
            lw=1,
            color=style.PALETTE[1],
            label=f"simulated, {dataset.attrs['draws']} draws shared along the line (± 1 s.e.)",
        )
        ax.plot(
            case.best_ridge,
            case.best_risk,
            "*",
            ms=13,
            mfc="none",
            color=style.PALETTE[2],
            label="best ridge, $(σ² + \\sin² θ)/(n \\cos² θ)$",
        )
        ax.set(
            xlabel="ridge strength $λ$",
            ylabel="risk of linear transfer",
            title=f"$n$ = {int(case.n)}, $θ$ = {np.degrees(float(case.theta)):.1f}°, "
            f"$σ$ = {dataset.attrs['sigma']:g}",
        )
    legend(figure, left, ncols=2)
    return {"ridge": figure}
