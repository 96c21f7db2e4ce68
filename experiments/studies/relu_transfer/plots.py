"""The figures of `relu_transfer`: the panels of Fig. 4 of Features are fate."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.bands import legend
from experiments.studies.relu_transfer.findings import (
    boundary_error,
    kernel_distance,
    measured_boundary,
)
from sail_jax.drawing import style
from theory import student_teacher as st


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws the figures of the study.

    Returns the figures by name: "kernels", "laws" (the scratch law, and the part of the target that
    frozen features cannot express), "phase" and, if the output layer was also fitted by descent,
    "phase_descent". Without pretrained networks, only "law", the scratch law.
    """
    if "outside" not in dataset:
        figure, ((ax,),) = style.figure(1, 1, width=4.6, height=3.8)
        _draw_law(ax, dataset)
        return {"law": figure}
    figure, ((left, right),) = style.figure(1, 2, width=4.6, height=3.8)
    _draw_law(left, dataset)
    _draw_projections(right, dataset)
    figures = {"kernels": _draw_kernels(dataset), "laws": figure}
    figures["phase"] = _draw_phase(dataset, "gain", "output layer solved exactly")
    if "descended_gain" in dataset:
        how = "output layer trained by descent"
        figures["phase_descent"] = _draw_phase(dataset, "descended_gain", how)
    return figures


def _draw_kernels(dataset: xr.Dataset) -> Figure:
    """Draws the kernel matrices of a student before and after pretraining, and of its source."""
    figure, (axes,) = style.figure(1, 3, width=3.9, height=3.4)
    top = float(dataset.kernel_source.max())
    for ax, name, title in zip(
        axes,
        ("kernel_initial", "kernel_pretrained", "kernel_source"),
        ("untrained student", "pretrained student", "source teacher"),
        strict=True,
    ):
        if name != "kernel_source":
            title += f" (distance {kernel_distance(dataset, name):.0%})"
        style.heatmap(ax, dataset[name].values, vmin=0, vmax=top, label="$k(x, x')$")
        ax.set(xlabel="input", ylabel="input", title=title)
        ax.set_aspect("equal")
        ax.set_xticks(range(0, dataset.sizes["x"], 5))
        ax.set_yticks(range(0, dataset.sizes["x"], 5))
        ax.invert_yaxis()
    return figure


def _draw_law(left: Axes, dataset: xr.Dataset) -> None:
    """Draws the risk of training from scratch against n, and the power law through it."""
    teachers = dataset.sizes["teacher"]
    logs = np.log(dataset.scratch_risk.mean("draw").values)
    centre = st.interval(logs)
    mean, low, high = (np.exp(part) for part in centre)
    nu, nu_low, nu_high = dataset.exponent.values
    n = dataset.n.values
    left.errorbar(
        n,
        mean,
        (mean - low, high - mean),
        fmt="o",
        ms=4,
        color=style.PALETTE[0],
        label=f"scratch, {teachers} teachers (95 % interval)",
    )
    left.plot(
        n,
        dataset.law,
        color=style.PALETTE[1],
        label=f"$A n^{{-ν}}$, $ν$ = {nu:.2f} [{nu_low:.2f}, {nu_high:.2f}]",
    )
    level = float(dataset.variance.mean())
    left.axhline(level, color=style.FAINT, ls="--", label="variance of the target")
    left.set(xscale="log", yscale="log", xlabel="target samples $n$", ylabel="risk $R_{sc}$")
    left.set_xticks(n, [str(k) for k in n])
    left.set_xticks([], minor=True)
    left.set_title(f"Training from scratch, d = {dataset.attrs['d']}")
    left.legend(frameon=False, fontsize=style.points(8))


def _draw_projections(right: Axes, dataset: xr.Dataset) -> None:
    """Draws the fraction of the target that frozen features cannot express, against mu."""
    for name, label, marker, color in (
        ("outside_ideal", "source teacher's features", "s", style.PALETTE[2]),
        ("outside", f"pretrained (cut-off {dataset.attrs['cutoff']:g})", "o", style.PALETTE[0]),
        ("outside_span", "pretrained (cut-off 1e-10)", "^", style.PALETTE[5]),
    ):
        share = (dataset[name] / dataset.norm).transpose("teacher", "mu").values
        around = st.interval(share)
        right.errorbar(
            dataset.mu,
            around.mean,
            (around.mean - around.low, around.high - around.mean),
            fmt=f"{marker}-",
            ms=4,
            lw=1,
            color=color,
            label=label,
        )
    untrained = float((dataset.outside_untrained / dataset.norm).mean())
    right.axhline(untrained, color=style.FAINT, ls="--", label="untrained student's features")
    right.set(
        yscale="log",
        xlabel="missing features $μ$",
        ylabel="$|P_⊥ f_t|^2 / |f_t|^2$",
        title="What frozen features cannot express",
    )
    right.legend(frameon=False, fontsize=style.points(8))


def _draw_phase(dataset: xr.Dataset, name: str, how: str) -> Figure:
    """Draws a gain of transfer over mu and n, with predicted and measured boundaries (Fig. 4e)."""
    figure, ((ax,),) = style.figure(1, 1, width=5.8, height=4.4)
    n, mu = dataset.n.values, dataset.mu.values
    gain = dataset[name].values
    # Rare samples near n = m can be far outside the scale: the colours are chosen for the majority.
    reach = float(np.quantile(np.abs(gain), 0.9))
    style.heatmap(
        ax,
        gain.T,
        x=mu,
        y=np.log10(n),
        cmap=style.DIVERGING,
        vmin=-reach,
        vmax=reach,
        label="transferability $(R_{sc} - R_{lt}) / \\mathrm{Var}\\, f_t$",
    )
    low, high = ax.get_ylim()
    edge, bottom, top = np.log10(dataset.boundary.values)
    ax.errorbar(
        mu,
        edge,
        (edge - bottom, top - edge),
        fmt="o--",
        ms=6,
        color=style.INK,
        mfc="white",
        lw=1,
        label="predicted (95 %), $A n^{-ν} = |P_⊥ f_t|^2$",
        clip_on=True,
    )
    risk = "linear_risk" if name == "gain" else "descended_risk"
    ax.errorbar(
        mu,
        np.log10(measured_boundary(dataset, name)),
        boundary_error(dataset, risk) / np.log(10),
        fmt="x-",
        color=style.INK,
        ms=7,
        mew=2,
        lw=1.4,
        label="measured (± 1 s.e. over teachers)",
    )
    ax.set(
        xlabel="missing features $μ$",
        ylabel="target samples $n$",
        title=f"Linear transfer against training from scratch\n({how})",
        ylim=(low, high),
    )
    ax.set_yticks(np.log10(n), [str(k) for k in n])
    legend(figure, ncols=2)
    return figure
