"""The figures of `transfer_phase`."""

from fractions import Fraction
from math import pi
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.lab.bands import legend
from experiments.lab.findings import mean_and_error
from experiments.studies.shared import transfer_regions as regions
from experiments.studies.shared.transfer_plots import (
    CLOSED,
    DOTS,
    MEASURED,
    NAMES,
    NEAR,
    heat,
    layers,
    limits,
    points,
)
from experiments.studies.transfer_phase.compared import gains, parts
from sail_jax.drawing import style


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws the figures of `transfer_phase`.

    Returns the figures by name. For each mode of transfer there is one figure at the largest and
    one at the smallest noise. For fine-tuning at the largest noise, one has the printed formula
    next to the corrected one. With several depths, one has all depths of fine-tuning. With more
    than two levels of noise, one for each mode has all levels. Trained networks have their own
    figures.
    """
    noisy, calm = float(dataset.sigma.max()), float(dataset.sigma.min())
    depth = 2 if 2 in dataset.depth else float(dataset.depth[-1])
    modes = [mode for mode in NAMES if f"{mode}_theory" in dataset]
    figures = {}
    for sigma in sorted({noisy, calm}, reverse=True):
        suffix = _suffix(sigma, noisy)
        for mode in modes:
            at = dataset.sel(sigma=sigma)
            at = at.sel(depth=depth) if mode == "fine_tuning" else at
            name = {"linear": "linear_transfer", "fine_tuning": "fine_tuning"}[mode]
            figures[f"{name}{suffix}"] = _diagram(at, mode)
    if "fine_tuning_printed" in dataset:
        figures["fine_tuning_printed"] = _printed(dataset.sel(sigma=noisy, depth=depth))
    if "fine_tuning" in modes and dataset.sizes["depth"] > 1:
        figures["fine_tuning_depth"] = _family(dataset.sel(sigma=noisy), "fine_tuning", "depth")
    if dataset.sizes["sigma"] > 2:
        for mode in modes:
            at = dataset.sel(depth=depth) if mode == "fine_tuning" else dataset
            figures[f"{mode}_noise"] = _family(at, mode, "sigma")
    if "risk" in dataset:
        for sigma in sorted({noisy, calm}, reverse=True):
            suffix = _suffix(sigma, noisy)
            for mode in dataset.mode.values:
                name = {"linear": "linear_transfer", "fine_tuning": "fine_tuning"}[mode]
                figures[f"{name}_trained{suffix}"] = _networks(dataset.sel(sigma=sigma), mode)
    return figures


def _suffix(sigma: float, noisy: float) -> str:
    """Returns the ending of a figure's name, which must not contain dots."""
    if sigma == noisy:
        return ""
    return "_noiseless" if sigma == 0 else f"_sigma{sigma:g}".replace(".", "_").replace("+", "")


def _title(at: xr.Dataset, mode: str) -> str:
    return NAMES[mode] if mode == "linear" else f"Fine-tuning {layers(float(at.depth))}"


def _diagram(at: xr.Dataset, mode: str) -> Figure:
    """Draws theory and measurement over (load, theta), and slices of both.

    With gradient flows of fine-tuned networks, their map is the third.
    """
    title, sigma, d = _title(at, mode), float(at.sigma), at.attrs["d"]
    flows = mode == "fine_tuning" and "flow_gain" in at and _is_of(at, at.attrs["flow_sigma"])
    figure, axes = style.panels(4 if flows else 3, 2, wide=True, width=4.8, height=3.8)
    left, middle, right = axes[0], axes[1], axes[-1]
    theory, mean = at[f"{mode}_theory"].values, at[f"{mode}_mean"].values
    error = at[f"{mode}_std"].values / np.sqrt(at.attrs["draws"])
    reach = limits(at, theory, mean)
    draws = f"{at.attrs['draws']} data sets, $d$ = {d}"
    x, y = at["load"].values, at.theta.values
    for ax, values, name in (
        (left, theory, CLOSED[mode]),
        (middle, mean, f"{MEASURED[mode]} ({draws})"),
    ):
        heat(ax, x, y, values.T, reach)
        _draw_boundary(ax, at[f"{mode}_zero"], y)
        _dress_map(ax, x, y, f"{title}, $σ$ = {sigma:g}\n{name}")
    _draw_measured(middle, x, y, mean, error, np.abs(at.n.values - d) >= regions.FAR)
    if flows:
        _draw_flows(axes[2], at, reach, title)
    _legend(figure, mode)
    for i, angle in enumerate(at.slice.values):
        color = style.PALETTE[i]
        curve = at[f"{mode}_curve"].isel(slice=i).values
        # The curve excludes n = d, where the mean is infinite; NaN breaks the line there.
        gap = np.where(np.diff(at.curve.values) > 1.5 * np.diff(at.curve.values)[0])[0] + 1
        right.plot(
            np.insert(at.curve.values, gap, np.nan), np.insert(curve, gap, np.nan), color=color
        )
        at_angle = at.sel(theta=angle, method="nearest")
        points(right, at_angle, mode, "load", color=color, label=_as_pi(angle), quantiles=sigma > 0)
    right.axhline(0, color=style.INK, lw=0.8)
    # The axis is chosen for values away from n = d; means close to it would make all others appear
    # flat.
    shown = at.sel(theta=at.slice, method="nearest")
    calm = np.abs(at["load"].values - 1) > NEAR
    reach = 1.15 * np.abs(shown[f"{mode}_mean"].values[calm]).max()
    if sigma > 0:
        reach = max(reach, 1.1 * float(shown[f"{mode}_high"].max()))
    low, high = (-1.05, max(1.05, min(reach, 2.5))) if mode == "linear" else (-reach, reach)
    right.set(
        xlabel="load $n/d$",
        ylabel="transferability $T$",
        ylim=(low, high),
        title=f"slices: {CLOSED[mode]} (lines); shared data:\n{DOTS[mode]} (± 1 s.e."
        + ("; open: median, 68 %)" if sigma > 0 else ")"),
    )
    right.legend(title="angle $θ$", frameon=False, fontsize=style.points(9), ncols=3)
    return figure


def _printed(at: xr.Dataset) -> Figure:
    """Draws fine-tuning over (load, theta) as printed in the paper, and corrected, in one scale."""
    figure, ((left, right),) = style.figure(1, 2, width=4.8, height=4.1)
    maps = at.fine_tuning_printed.values, at.fine_tuning_theory.values
    reach = limits(at, *maps)
    x, y, sigma = at["load"].values, at.theta.values, float(at.sigma)
    looks: dict[str, Any] = {"color": style.INK, "lw": 1.6, "ls": "--"}
    left.plot([0, 1], [pi / 3, pi / 3], **looks)  # the printed formula's own line T = 0
    left.axvline(1, color=style.INK, lw=0.8, ls=":")
    _draw_boundary(right, at.fine_tuning_zero, y)
    heading = f"{_title(at, 'fine_tuning')}, $σ$ = {sigma:g}"
    for ax, values, name in (
        (left, maps[0], "as printed: eq. (17), for every $σ$ and depth"),
        (right, maps[1], "corrected"),
    ):
        heat(ax, x, y, values.T, reach)
        _dress_map(ax, x, y, f"{heading}\n{name}")
    printed = {"$T = 0$ by the formula (limit $n, d → ∞$)": left.lines[0]}
    legend(figure, also=printed, where="lower left")
    return figure


def _networks(at: xr.Dataset, mode: str) -> Figure:
    """Draws closed form, estimator and trained networks at the same points.

    A last panel shows the difference between the last two, by cause.
    """
    depth = at.attrs["trained_layers"]
    at = at.sel(depth=depth) if mode == "fine_tuning" else at
    every = gains(at, near=True).sel(mode=mode)
    mean, error = every.mean("network"), every.std("network", ddof=1) / at.sizes["network"] ** 0.5
    draws = f"{at.sizes['network']} draws, d = {at.attrs['trained_d']}"
    maps = {
        CLOSED[mode]: (None, at.cell_theory.sel(mode=mode)),
        f"estimator, averaged over data ({draws})": ("estimator", mean.sel(kind="estimator")),
        f"trained ({layers(depth)}, $α$ = {at.attrs['trained_alpha']:g})": (
            "network",
            mean.sel(kind="network"),
        ),
    }
    shared = limits(at, *(values.values for _, values in maps.values()))
    x, y, d = at.cell_load.values, at.cell_theta.values, at.attrs["trained_d"]
    zero = at.cell_linear_zero if mode == "linear" else at.fine_tuning_zero
    half = np.diff(at.cell_load.values[:2]) / 2
    reach = at.cell_load.values[[0, -1]] + [-half[0], half[0]]
    figure, ((*axes, last),) = style.figure(1, 4, width=4.6, height=4.1)
    for ax, (name, (kind, values)) in zip(axes, maps.items(), strict=True):
        heat(ax, x, y, values.values.T, shared)
        _draw_boundary(ax, zero, y)
        _dress_map(ax, reach, y, f"{NAMES[mode]}\n{name}")
        if kind:
            far = np.abs(at.cell_n.values - d) >= regions.FAR
            _draw_measured(ax, x, y, values.values, error.sel(kind=kind).values, far)
    far = gains(at).sel(mode=mode)
    whole = far.sel(kind="network") - far.sel(kind="estimator")
    looks: list[dict[str, Any]] = [
        {"fmt": "s", "ms": 8, "mfc": "none", "color": style.INK},
        *({"fmt": "o-", "ms": 4, "color": color} for color in style.PALETTE),
    ]
    causes = {"all": whole, **parts(far)}
    if "orthogonal_risk" in at:
        other = gains(at, of="orthogonal_risk").sel(mode=mode)
        causes["start, normal or orthogonal"] = far.sel(kind="network") - other
    for (cause, part), look in zip(causes.items(), looks, strict=False):
        apart, error = mean_and_error(abs(part).mean("cell_theta"), "network")
        last.errorbar(far.cell_load.values, apart, error, label=cause, lw=1.2, **look)
    time = at.attrs["trained_rate"] * at.attrs["trained_steps"]
    last.set(
        xlabel="load $n/d$",
        ylabel="mean over angles and draws",
        yscale="log",
        title=f"|$T$(trained) - $T$(estimator)|, $σ$ = {float(at.sigma):g}, $t$ ≤ {time:g}",
    )
    causes = len(last.get_legend_handles_labels()[1])
    legend(figure, last, title="due to", ncols=causes, where="lower right")
    _legend(figure, mode)
    return figure


def _is_of(at: xr.Dataset, sigma: float) -> bool:
    """Returns whether the flows have the noise and the depth of the figure."""
    return bool(float(at.sigma) == sigma and float(at.depth) == at.attrs["flow_depth"])


def _draw_flows(ax: Axes, at: xr.Dataset, reach: float, title: str) -> None:
    """Draws the transferability of fine-tuned networks from gradient flow."""
    x, y, d = at.flow_load.values, at.flow_theta.values, at.attrs["flow_d"]
    mean, error = mean_and_error(at.flow_gain, "flow_draw")
    half = float(np.diff(x[:2])[0]) / 2
    ends = x[[0, -1]] + [-half, half]
    heat(ax, x, y, mean.T, reach)
    _draw_boundary(ax, at.fine_tuning_zero, y)  # a limit, for all dimensions
    _draw_measured(ax, x, y, mean, error, np.abs(x * d - d) > regions.FAR - 0.5)
    name = f"gradient flow, solved numerically ({at.sizes['flow_draw']} data sets, $d$ = {d})"
    _dress_map(ax, ends, y, f"{title}, $σ$ = {float(at.sigma):g}\n{name}")


def _dress_map(ax: Axes, x: np.ndarray, y: np.ndarray, title: str) -> None:
    """Labels a map over load and angle, and clips lines at its edge."""
    half = float(np.diff(y[-2:])[0]) / 2
    ax.set(xlabel="load $n/d$", ylabel="angle $θ$ (rad)", title=title)
    ax.set(xlim=(x[0], x[-1]), ylim=(float(y[0]) - half, float(y[-1]) + half))
    _angle_axis(ax, float(y[-1]))


def _legend(figure: Figure, mode: str) -> None:
    """Explains which line is theory's and which is measured."""
    where = "at this $n$ and $d$" if mode == "linear" else "limit $n, d → ∞$"
    band = Patch(color=BAND, alpha=0.6, lw=0), Line2D([], [], color=style.INK, lw=1.4)
    looks = {
        f"$T = 0$ in closed form, {where}": Line2D([], [], color=style.INK, lw=1.6, ls="--"),
        "$T = 0$ as measured (band: ± 1 s.e. of $T$, shared data)": band,  # a pair is one entry
    }
    legend(figure, also=looks, ncols=2, where="lower left")


BAND = style.PALETTE[2]  # the uncertainty of a measured line: differs from the maps' colours


def _draw_measured(
    ax: Axes, x: np.ndarray, y: np.ndarray, mean: np.ndarray, error: np.ndarray, far: np.ndarray
) -> None:
    """Draws the line where measured means change sign, and where they are within 1 s.e. of 0.

    `mean` and `error` are [x, y]. Columns that are not `far` from n = d have no mean, and values
    that are 0 up to rounding have no sign. No line crosses either.
    """
    signed = far[:, None] & (np.abs(mean) > regions.ROUNDING)
    if not ((mean[signed] < 0).any() and (mean[signed] > 0).any()):
        return
    # On a finer grid, because the error may change much from one column to the next.
    x, y, mean, error = _finer(x, y, np.where(signed, mean, np.nan), error)
    z = np.ma.masked_invalid(mean / np.maximum(error, regions.ROUNDING)).T
    ax.contourf(x, y, z, [-1, 1], colors=[BAND], alpha=0.6)
    ax.contour(x, y, z, [0], colors=style.INK, linewidths=1.4, linestyles="solid")


def _finer(x: np.ndarray, y: np.ndarray, *maps: np.ndarray) -> tuple[np.ndarray, ...]:
    """Interpolates maps [x, y] linearly between their points, eight times as fine."""
    from scipy.interpolate import RegularGridInterpolator

    fine = [np.interp(np.linspace(0, k.size - 1, 8 * k.size - 7), range(k.size), k) for k in (x, y)]
    points = np.stack(np.meshgrid(*fine, indexing="ij"), axis=-1)
    return (*fine, *(RegularGridInterpolator((x, y), values)(points) for values in maps))


def _draw_boundary(
    ax: Axes, zero: xr.DataArray, angles: np.ndarray, *, color: str = style.INK, **look
) -> None:
    """Draws theory's line of no gain and no loss, dashed: angles by load."""
    load, angle = zero[zero.dims[0]].values, zero.values
    lines = {"color": color, "lw": 1.6, "ls": "--", **look}
    ax.plot(load, angle, **lines)
    if zero.name == "fine_tuning_zero":
        ax.axvline(1, color=style.INK, lw=0.8, ls=":")
    elif angles[-1] > pi / 2 + regions.ROUNDING:
        # A refitted weight may be negative, so the opposite source is equally good.
        ax.plot(load, pi - angle, **{**lines, "label": None})


def _family(dataset: xr.Dataset, mode: str, along: str) -> Figure:
    """Draws the closed-form diagram at every value of `along`, "depth" or "sigma".

    Dots on the boundaries are measured changes of sign. The last panel has all boundaries.
    """
    values = dataset[along].values
    columns = 2 if values.size == 3 else 3
    figure, (*axes, last) = style.panels(values.size + 1, columns, width=4.6, height=3.7)
    x, y = dataset["load"].values, dataset.theta.values
    reach = limits(dataset, dataset[f"{mode}_theory"].values)
    for i, (ax, value) in enumerate(zip(axes, values, strict=True)):
        at = dataset.sel({along: value})
        name = layers(value) if along == "depth" else f"$σ$ = {value:g}"
        heat(ax, x, y, at[f"{mode}_theory"].values.T, reach)
        _draw_boundary(ax, at[f"{mode}_zero"], y)
        color = style.PALETTE[i % len(style.PALETTE)]
        _draw_boundary(last, at[f"{mode}_zero"], y, color=color, label=name)
        for panel, ink in ((ax, style.INK), (last, color)):
            _draw_crossings(panel, at, mode, ink)
        _dress_map(ax, x, y, f"{NAMES[mode]}, {name}: {CLOSED[mode]}")
    if mode == "fine_tuning":
        last.axhline(pi / 3, color=style.FAINT, ls="--", label="$π/3$, as printed")
    _dress_map(
        last,
        x,
        y,
        f"$T$ = 0: closed form (dashed); shared data,\ndots: {MEASURED[mode]} (± 1 s.e.)",
    )
    legend(figure, last, title="boundaries", ncols=6)
    return figure


def _draw_crossings(ax: Axes, at: xr.Dataset, mode: str, color: str) -> None:
    """Draws the angles at which the measured T changes sign, for every load."""
    mean = at[f"{mode}_mean"].values
    stderr = at[f"{mode}_std"].values / np.sqrt(at.attrs["draws"])
    # For n >= d fine-tuning equals scratch training. Near n = d, rare draws dominate the mean.
    keep = (
        at["load"].values < 1 if mode == "fine_tuning" else np.abs(at["load"].values - 1) > NEAR / 2
    )
    found = [
        (load, *crossing)
        for load, m, s in zip(at["load"].values[keep], mean[keep], stderr[keep], strict=True)
        for crossing in _crossings(at.theta.values, m, s)
    ]
    if found:
        load, angle, error = np.array(found).T
        ax.errorbar(load, angle, error, fmt="o", ms=3, lw=1, color=color)


def _crossings(theta: np.ndarray, gain: np.ndarray, bar: np.ndarray) -> list[tuple[float, float]]:
    """Returns where `gain` changes sign, by linear interpolation, with standard errors.

    An error is the gain's error divided by its slope.
    """
    found = []
    for i in np.flatnonzero(gain[:-1] * gain[1:] < 0) + 1:
        slope = (gain[i] - gain[i - 1]) / (theta[i] - theta[i - 1])
        found.append((float(theta[i] - gain[i] / slope), float(abs(bar[i] / slope))))
    return found


def _angle_axis(ax: Axes, top: float = pi / 2) -> None:
    step = 1 if top <= 0.6 * pi else 2
    ticks = [k * pi / 8 for k in range(0, 9, step) if k * pi / 8 <= top + 1e-9]
    ax.set_yticks(ticks, [_as_pi(t) for t in ticks])


def _as_pi(angle: float) -> str:
    """Formats an angle as a multiple of pi/8, or else of pi."""
    eighths = angle / pi * 8
    if abs(eighths - round(eighths)) > 1e-3:
        return f"{angle / pi:.3g} $π$"
    whole = Fraction(round(eighths), 8)
    if whole == 0:
        return "0"
    over = "" if whole.denominator == 1 else f"/{whole.denominator}"
    return f"${'' if whole.numerator == 1 else whole.numerator}π{over}$"
