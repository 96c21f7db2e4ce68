"""The panels of Fig. 4 of features-are-fate, and the answer in words, from the stored dataset."""

from typing import TYPE_CHECKING

import numpy as np

from theory import student_teacher as st

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _measured(dataset: "xr.Dataset") -> np.ndarray:
    """Per mu, where the mean gain turns negative."""
    return np.array([st.crossing(dataset.n.values, row) for row in dataset.gain.values])


def _kernel_distance(dataset: "xr.Dataset", name: str) -> float:
    source = dataset.kernel_source.values
    return float(np.linalg.norm(dataset[name].values - source) / np.linalg.norm(source))


def plot(dataset: "xr.Dataset") -> "dict[str, Figure]":
    """The panels of Fig. 4: kernels, scratch law and projection, phase diagram."""
    from sail_jax.drawing import style

    if "outside" not in dataset:
        figure, ((ax,),) = style.figure(1, 1, width=4.6, height=3.8)
        _draw_law(ax, dataset)
        return {"law": figure}
    figure, ((left, right),) = style.figure(1, 2, width=4.6, height=3.8)
    _draw_law(left, dataset)
    _draw_projections(right, dataset)
    return {"kernels": _draw_kernels(dataset), "laws": figure, "phase": _draw_phase(dataset)}


def _draw_kernels(dataset: "xr.Dataset") -> "Figure":
    from sail_jax.drawing import style

    figure, (axes,) = style.figure(1, 3, width=3.9, height=3.4)
    top = float(dataset.kernel_source.max())
    for ax, name, title in zip(
        axes,
        ("kernel_initial", "kernel_pretrained", "kernel_source"),
        ("untrained student", "pretrained student", "source teacher"),
        strict=True,
    ):
        if name != "kernel_source":
            title += f" ({_kernel_distance(dataset, name):.0%} off)"
        style.heatmap(ax, dataset[name].values, vmin=0, vmax=top, label="$k(x, x')$")
        ax.set(xlabel="input", ylabel="input", title=title)
        ax.set_aspect("equal")
        ax.set_xticks(range(0, dataset.sizes["x"], 5))
        ax.set_yticks(range(0, dataset.sizes["x"], 5))
        ax.invert_yaxis()
    return figure


def _draw_law(left: "Axes", dataset: "xr.Dataset") -> None:
    from sail_jax.drawing import style

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
    left.legend(frameon=False, fontsize=8)


def _draw_projections(right: "Axes", dataset: "xr.Dataset") -> None:
    from sail_jax.drawing import style

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
    right.legend(frameon=False, fontsize=8)


def _draw_phase(dataset: "xr.Dataset") -> "Figure":
    from sail_jax.drawing import style

    figure, ((ax,),) = style.figure(1, 1, width=5.8, height=4.4)
    n, mu = dataset.n.values, dataset.mu.values
    gain = dataset.gain.values
    # One bad sample near n = m can be far off the scale: the colours are for the bulk.
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
        fmt="o",
        ms=6,
        color=style.INK,
        mfc="white",
        lw=1,
        label="predicted, $A n^{-ν} = |P_⊥ f_t|^2$",
        clip_on=True,
    )
    ax.plot(mu, np.log10(_measured(dataset)), "x", color=style.INK, ms=7, mew=2, label="measured")
    ax.set(
        xlabel="missing features $μ$",
        ylabel="target samples $n$",
        title="Linear transfer against training from scratch",
        ylim=(low, high),
    )
    ax.set_yticks(np.log10(n), [str(k) for k in n])
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def summary(dataset: "xr.Dataset") -> str:
    """The exponent, how straight the law is, and how far the predicted boundary is off."""
    nu, low, high = dataset.exponent.values
    bend = dataset.curvature.values
    straight = "straight" if bend[1] < 0 < bend[2] else f"bent (curvature {bend[0]:+.2f})"
    sentence = (
        f"The scratch risk falls as n^-ν with ν = {nu:.2f} (95 % interval {low:.2f} to {high:.2f} "
        f"over {dataset.sizes['teacher']} teachers; in log-log it is {straight})"
    )
    if "outside" not in dataset:
        return f"{sentence}."
    measured, predicted = _measured(dataset), dataset.boundary.sel(limit="mean").values
    both = np.isfinite(measured)
    sign = np.sign(dataset.gain.values)
    sure = np.abs(dataset.gain.values) > 2 * dataset.gain_stderr.values
    told = np.where(dataset.n.values < predicted[:, None], 1, -1)
    agree = f"{np.mean((sign == told)[sure]):.0%}" if sure.any() else "none"
    sentence += (
        f". The predicted boundary tells the sign of the transferability in {agree} of the "
        f"{int(sure.sum())} points (μ, n) where it exceeds 2 standard errors"
    )
    if both.any():
        ratio = (measured / predicted)[both]
        first, last = dataset.mu.values[both][[0, -1]]
        sentence += (
            f"; the measured boundary lies at {ratio[0]:.2f} times the predicted n for "
            f"μ = {first:g} and at {ratio[-1]:.2f} times for μ = {last:g}"
        )
    worse = (dataset.outside > dataset.outside_untrained).mean("teacher").values > 0.5
    sentence += (
        f". Pretrained features express less of the target than untrained ones for "
        f"{int(worse.sum())} of the {len(worse)} μ"
    )
    return (
        f"{sentence}. Pretraining brings the kernel from "
        f"{_kernel_distance(dataset, 'kernel_initial'):.0%} to "
        f"{_kernel_distance(dataset, 'kernel_pretrained'):.0%} off the source teacher's "
        f"(μ = {dataset.attrs['kernel_mu']:g})."
    )
