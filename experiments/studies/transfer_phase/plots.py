"""The figures of phase diagrams of transfer, for `transfer_phase` and `transfer_factors`."""

from math import pi
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.lab.findings import mean_and_error
from experiments.studies.transfer_phase.compared import gains, parts
from sail_jax.drawing import style

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


NAMES = {"linear": "Linear transfer", "fine_tune": "Fine-tuning"}
NEAR = 0.1  # |gamma - 1| below which means are ruled by rare draws, and quantiles are shown


def plot(dataset: "xr.Dataset") -> "dict[str, Figure]":
    """Draws the figures of `transfer_phase`.

    Args:
      dataset: The study's dataset.

    Returns:
      The figures by name: for each way of transfer, one at the most and one at the least noise; one
      with all depths of fine-tuning, where there are several; for each way, one with all levels of
      noise, where there are more than two; and those of trained networks, where there are any.
    """
    noisy, calm = float(dataset.sigma.max()), float(dataset.sigma.min())
    depth = 2 if 2 in dataset.depth else float(dataset.depth[-1])
    modes = [mode for mode in NAMES if f"{mode}_theory" in dataset]
    figures = {}
    for sigma in sorted({noisy, calm}, reverse=True):
        suffix = "" if sigma == noisy else "_noiseless" if sigma == 0 else f"_sigma{sigma:g}"
        for mode in modes:
            at = dataset.sel(sigma=sigma)
            at = at.sel(depth=depth) if mode == "fine_tune" else at
            name = {"linear": "linear_transfer", "fine_tune": "fine_tuning"}[mode]
            figures[f"{name}{suffix}"] = _diagram(at, mode)
    if "fine_tune" in modes and dataset.sizes["depth"] > 1:
        figures["fine_tuning_depth"] = _family(dataset.sel(sigma=noisy), "fine_tune", "depth")
    if dataset.sizes["sigma"] > 2:
        for mode in modes:
            at = dataset.sel(depth=depth) if mode == "fine_tune" else dataset
            figures[f"{mode}_noise"] = _family(at, mode, "sigma")
    if "risk" in dataset:
        for sigma in sorted({noisy, calm}, reverse=True):
            suffix = "" if sigma == noisy else "_noiseless" if sigma == 0 else f"_sigma{sigma:g}"
            for mode in dataset.mode.values:
                name = {"linear": "linear_transfer", "fine_tune": "fine_tuning"}[mode]
                figures[f"{name}_trained{suffix}"] = _networks(dataset.sel(sigma=sigma), mode)
    return figures


def layers(depth: float) -> str:
    """Spells a number of layers.

    Args:
      depth: The number; inf is allowed.

    Returns:
      The number and the word, such as "2 layers".

    >>> layers(1), layers(float("inf"))
    ('1 layer', '∞ layers')
    """
    return "∞ layers" if np.isinf(depth) else f"{depth:g} layer{'s' if depth > 1 else ''}"


def _title(at: "xr.Dataset", mode: str) -> str:
    return NAMES[mode] if mode == "linear" else f"Fine-tuning {layers(float(at.depth))}"


def _diagram(at: "xr.Dataset", mode: str) -> "Figure":
    """Draws closed form and simulation over (gamma, theta), and slices of both at three angles."""
    title, sigma = _title(at, mode), float(at.sigma)
    figure, ((left, middle, right),) = style.figure(1, 3, width=4.8, height=3.9)
    for ax, kind, name in (
        (left, "theory", "closed form" if mode == "linear" else "closed form (limit)"),
        (middle, "mean", f"simulation ({at.attrs['draws']} draws, d = {at.attrs['d']})"),
    ):
        heat(ax, at.gamma.values, at.theta.values, at[f"{mode}_{kind}"].values.T)
        _draw_boundary(ax, at, mode)
        ax.set(xlabel="load $γ = n/d$", ylabel="angle $θ$ (rad)", title=f"{title}: {name}")
        _angle_axis(ax)
        ax.set_xlim(at.gamma.values[[0, -1]])
    for i, angle in enumerate(at.slice.values):
        color = style.PALETTE[i]
        curve = at[f"{mode}_curve"].isel(slice=i).values
        # The curve leaves out n = d, where the mean is infinite: NaN breaks the line there.
        gap = np.where(np.diff(at.curve.values) > 1.5 * np.diff(at.curve.values)[0])[0] + 1
        right.plot(
            np.insert(at.curve.values, gap, np.nan), np.insert(curve, gap, np.nan), color=color
        )
        at_angle = at.sel(theta=angle, method="nearest")
        points(
            right, at_angle, mode, "gamma", color=color, label=_as_pi(angle), quantiles=sigma > 0
        )
    right.axhline(0, color=style.INK, lw=0.8)
    # The axis is for values away from n = d; means near it would make all others look flat.
    shown = at.sel(theta=at.slice, method="nearest")
    calm = np.abs(at.gamma.values - 1) > NEAR
    reach = 1.15 * np.abs(shown[f"{mode}_mean"].values[calm]).max()
    if sigma > 0:
        reach = max(reach, 1.1 * float(shown[f"{mode}_high"].max()))
    low, high = (-1.05, max(1.05, min(reach, 2.5))) if mode == "linear" else (-reach, reach)
    right.set(
        xlabel="load $γ = n/d$",
        ylabel="transferability $T$",
        ylim=(low, high),
        title=f"slices at $σ$ = {sigma:g} (± 1 s.e."
        + ("; open: median, 68 %)" if sigma > 0 else ")"),
    )
    right.legend(title="angle $θ$", frameon=False, fontsize=9, loc="best")
    return figure


def _networks(at: "xr.Dataset", mode: str) -> "Figure":
    """Draws closed form, estimator and trained networks at the same points.

    A last panel shows what lies between the last two, by cause.
    """
    depth = at.attrs["trained_layers"]
    at = at.sel(depth=depth) if mode == "fine_tune" else at
    mean = gains(at, near=True).sel(mode=mode).mean("network")
    draws = f"{at.sizes['network']} draws, d = {at.attrs['trained_d']}"
    maps = {
        "closed form" if mode == "linear" else "closed form (limit)": at.cell_theory.sel(mode=mode),
        f"estimator ({draws})": mean.sel(kind="estimator"),
        f"trained ({layers(depth)}, $α$ = {at.attrs['trained_alpha']:g})": mean.sel(kind="network"),
    }
    half = np.diff(at.cell_gamma.values[:2]) / 2
    reach = at.cell_gamma.values[[0, -1]] + [-half[0], half[0]]
    figure, ((*axes, last),) = style.figure(1, 4, width=4.6, height=3.9)
    for ax, (name, values) in zip(axes, maps.items(), strict=True):
        heat(ax, at.cell_gamma.values, at.cell_theta.values, values.values.T)
        _draw_boundary(ax, at, mode)
        ax.set(xlabel="load $γ = n/d$", ylabel="angle $θ$ (rad)", title=f"{NAMES[mode]}: {name}")
        ax.set_xlim(reach)
        _angle_axis(ax)
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
        last.errorbar(far.cell_gamma.values, apart, error, label=cause, lw=1.2, **look)
    time = at.attrs["trained_rate"] * at.attrs["trained_steps"]
    last.set(
        xlabel="load $γ = n/d$",
        ylabel="mean over angles and draws",
        yscale="log",
        title=f"|$T$(trained) - $T$(estimator)|, $σ$ = {float(at.sigma):g}, $t$ ≤ {time:g}",
    )
    handles, labels = last.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        title="due to",
        loc="outside lower right",
        ncols=len(labels),
        frameon=False,
        fontsize=9,
    )
    return figure


def by_factor(dataset: "xr.Dataset") -> "Figure":
    """Draws transferability over the load and one more factor, for both ways of transfer.

    Args:
      dataset: The dataset of `transfer_factors`.

    Returns:
      The figure: theory, simulation, and curves of both.
    """
    factor, values = dataset.attrs["factor"], dataset.value.values
    figure, axes = style.figure(2, 3, width=4.8, height=3.8)
    rows = np.arange(values.size)
    for (left, middle, right), mode in zip(axes, NAMES, strict=True):
        name = NAMES[mode]
        if mode == "fine_tune":
            name += f" {layers(dataset.attrs['depth'])}"
        draws = f"{dataset.attrs['draws']} draws, d = {dataset.attrs['d']}"
        for ax, kind, title in (
            (left, "theory", "theory"),
            (middle, "mean", f"simulation ({draws})"),
        ):
            heat(ax, dataset.gamma.values, rows, dataset[f"{mode}_{kind}"].values)
            ax.set_yticks(rows, [_value(v) for v in values])
            ax.set(xlabel="load $γ = n/d$", ylabel=FACTORS[factor], title=f"{name}: {title}")
        for i, value in enumerate(values):
            color = style.PALETTE[i % len(style.PALETTE)]
            at = dataset.isel(value=i)
            _broken(right, at.gamma.values, at[f"{mode}_theory"].values, color)
            points(right, at, mode, "gamma", color=color, label=_value(value))
        right.axhline(0, color=style.INK, lw=0.8)
        far = np.abs(dataset.gamma.values - 1) > NEAR
        reach = 1.3 * np.abs(dataset[f"{mode}_mean"].values[:, far]).max()
        right.set(
            xlabel="load $γ = n/d$",
            ylabel="transferability $T$",
            ylim=(-reach, reach),
            title="theory, simulation ± 1 s.e. (open: median)",
        )
    handles, labels = axes[0, 2].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        title=FACTORS[factor],
        loc="outside lower center",
        ncols=len(labels),
        frameon=False,
        fontsize=9,
    )
    return figure


FACTORS = {
    "spectrum": "decay exponent of the input spectrum",
    "time": "training time $t$",
    "source": "source load $n_s/d$",
}


def stopped(dataset: "xr.Dataset") -> "Figure":
    """Draws the risk of fine-tuning against the load, one colour for each training time.

    Lines are theory, where there is one. Points are means of the draws; near n = d, where risks
    have heavy tails, they are open.

    Args:
      dataset: The dataset of `transfer_factors`, where training time varies.

    Returns:
      The figure.
    """
    figure, ((ax,),) = style.figure(1, 1, width=6.4, height=4.4)
    at = dataset.sel(way="fine_tune")
    near = np.abs(at.gamma.values - 1) < NEAR
    for i, time in enumerate(at.value.values):
        color = style.PALETTE[i % len(style.PALETTE)]
        at_time = at.isel(value=i)
        mean, spread = (
            at_time.risk_mean.values,
            at_time.risk_std.values / np.sqrt(at.attrs["draws"]),
        )
        _broken(ax, at_time.gamma.values, at_time.risk_theory.values, color)
        look: dict[str, Any] = {"fmt": "o", "ms": 4, "lw": 1, "color": color}
        ax.errorbar(
            at_time.gamma.values[~near], mean[~near], spread[~near], label=_value(time), **look
        )
        ax.errorbar(at_time.gamma.values[near], mean[near], spread[near], mfc="white", **look)
    theta, sigma = np.degrees(at.attrs["theta"]), at.attrs["sigma"]
    ax.set(
        xlabel="load $γ = n/d$",
        ylabel="risk after fine-tuning",
        yscale="log",
        title=f"Fine-tuning {layers(at.attrs['depth'])}, stopped at $t$; $θ$ = {theta:g}°, "
        f"$σ$ = {sigma:g}\n(lines: theory; points: mean ± 1 s.e. of {at.attrs['draws']} draws, "
        "open near $γ$ = 1: heavy tails)",
    )
    ax.legend(title="training time $t$", frameon=False, fontsize=9, loc="best")
    return figure


def _broken(ax: "Axes", x: np.ndarray, y: np.ndarray, color: str) -> None:
    """Draws a curve in two pieces, so that it does not run through the divergence at gamma = 1."""
    for side in (x < 1, x > 1):
        ax.plot(x[side], y[side], color=color, lw=1.4)


def _value(value: float) -> str:
    """Spells a value of a factor."""
    return "∞" if np.isinf(value) else f"{value:g}"


def heat(ax: "Axes", x: np.ndarray, y: np.ndarray, values: np.ndarray, reach: float = 1.0):
    """Draws transferability as colours: orange where transfer helps, violet where it hurts.

    Args:
      ax: The axes.
      x: The columns' coordinates.
      y: The rows' coordinates.
      values: Transferability `(row, column)`.
      reach: The value of the strongest colours; 0 is white.

    Returns:
      The mesh that was drawn.
    """
    limits: dict[str, Any] = {"cmap": style.DIVERGING, "vmin": -reach, "vmax": reach}
    return style.heatmap(ax, values, x=x, y=y, label="$T$", **limits)


def points(
    ax: "Axes",
    at: "xr.Dataset",
    mode: str,
    x: str,
    *,
    color: str,
    label: str | None = None,
    quantiles: bool = True,
) -> None:
    """Draws simulated means with standard errors.

    Near gamma = 1, where the variance is infinite, open markers show the median and the central 68
    % of the draws in their place.

    Args:
      ax: The axes.
      at: The dataset at one value of all but the dimension that is drawn.
      mode: "linear" or "fine_tune".
      x: The name of the horizontal coordinate.
      color: The colour of markers and bars.
      label: The entry in the legend; None for none.
      quantiles: Whether medians are shown near gamma = 1. If not, means are shown everywhere.
    """
    near = quantiles & (np.abs(at.gamma.values - 1) < NEAR) & np.ones(at[x].size, bool)
    stderr = at[f"{mode}_std"].values / np.sqrt(at.attrs["draws"])
    look: dict[str, Any] = {"fmt": "o", "ms": 3.5, "lw": 1, "color": color}
    mean = at[f"{mode}_mean"].values
    ax.errorbar(at[x].values[~near], mean[~near], stderr[~near], label=label, **look)
    low, middle, high = (at[f"{mode}_{name}"].values[near] for name in ("low", "median", "high"))
    if near.any():
        ax.errorbar(at[x].values[near], middle, (middle - low, high - middle), mfc="white", **look)


def _draw_boundary(ax: "Axes", at: "xr.Dataset", mode: str, color: str = style.INK, **look) -> None:
    """Draws the line on which transfer neither helps nor hurts, in the limit n, d -> inf."""
    lines = {"color": color, "lw": 1.6, **look}
    if mode == "fine_tune":
        ax.plot(at.below, at.fine_tune_edge, **lines)
        ax.axvline(1, color=style.INK, lw=0.8, ls=":")
    else:
        # Below the angle at which a region begins the two are equal, in older results but for
        # rounding.
        exists = (at.linear_upper - at.linear_lower > 1e-9).values
        theta = at.edge.values
        # Without noise the two regions touch at gamma = 1: no change of sign there.
        apart = (at.linear_over - at.linear_upper > 1e-9).values & (theta > 0)
        below, above = exists, (exists & apart)[::-1]
        # One line: back along the upper edge, from the largest angle on, then along the lower one.
        ax.plot(
            np.concatenate([at.linear_upper.values[::-1][above], at.linear_lower.values[below]]),
            np.concatenate([theta[::-1][above], theta[below]]),
            **lines,
        )
        ax.plot(at.linear_over.values[apart], theta[apart], **{**lines, "label": None})


def _family(dataset: "xr.Dataset", mode: str, along: str) -> "Figure":
    """Draws the closed-form diagram at every value of `along`, "depth" or "sigma".

    Dots on the boundaries are simulated changes of sign. The last panel has all boundaries.
    """
    values = dataset[along].values
    columns = 3
    rows = -(-(values.size + 1) // columns)
    figure, axes = style.figure(rows, columns, width=4.6, height=3.7)
    last = axes.flat[values.size]
    for i, (ax, value) in enumerate(zip(axes.flat, values, strict=False)):
        at = dataset.sel({along: value})
        name = layers(value) if along == "depth" else f"$σ$ = {value:g}"
        heat(ax, at.gamma.values, at.theta.values, at[f"{mode}_theory"].values.T)
        _draw_boundary(ax, at, mode)
        color = style.PALETTE[i % len(style.PALETTE)]
        _draw_boundary(last, at, mode, color, label=name)
        for panel, ink in ((ax, style.INK), (last, color)):
            _draw_crossings(panel, at, mode, ink)
        ax.set(title=f"{NAMES[mode]}, {name}: closed form", ylabel="angle $θ$ (rad)")
    if mode == "fine_tune":
        last.axhline(pi / 3, color=style.FAINT, ls="--", label="$π/3$, as printed")
    last.set(title="where $T$ = 0 (dots: simulation, ± 1 s.e.)", ylabel="angle $θ$ (rad)")
    figure.legend(
        *last.get_legend_handles_labels(),
        title="boundaries",
        loc="outside lower center",
        ncols=6,
        frameon=False,
        fontsize=9,
    )
    for ax in axes.flat[: values.size + 1]:
        ax.set(xlabel="load $γ = n/d$", xlim=dataset.gamma.values[[0, -1]], ylim=(0, pi / 2))
        _angle_axis(ax)
    for ax in axes.flat[values.size + 1 :]:
        ax.set_axis_off()
    return figure


def _draw_crossings(ax: "Axes", at: "xr.Dataset", mode: str, color: str) -> None:
    """Draws the angles at which the simulated T changes sign, for every load."""
    mean = at[f"{mode}_mean"].values
    stderr = at[f"{mode}_std"].values / np.sqrt(at.attrs["draws"])
    crossings = np.array(
        [_crossing(at.theta.values, m, s) for m, s in zip(mean, stderr, strict=True)]
    )
    # From n = d on fine-tuning equals scratch training; near it the mean is ruled by rare draws.
    keep = at.gamma.values < 1 if mode == "fine_tune" else np.abs(at.gamma.values - 1) > NEAR / 2
    crossings[~keep] = np.nan
    ax.errorbar(at.gamma.values, crossings[:, 0], crossings[:, 1], fmt="o", ms=3, lw=1, color=color)


def _crossing(theta: np.ndarray, gain: np.ndarray, bar: np.ndarray) -> tuple[float, float]:
    """Returns where `gain` first turns negative, by linear interpolation, and its standard error.

    The error is that of the gain, divided by its slope.
    """
    turned = np.flatnonzero(gain < 0)
    if turned.size == 0 or turned[0] == 0:
        return np.nan, np.nan
    i = turned[0]
    slope = (gain[i] - gain[i - 1]) / (theta[i] - theta[i - 1])
    return float(theta[i] - gain[i] / slope), float(abs(bar[i] / slope))


def _angle_axis(ax: "Axes", top: float = pi / 2) -> None:
    ticks = [k * pi / 8 for k in range(5) if k * pi / 8 <= top]
    ax.set_yticks(ticks, [_as_pi(t) for t in ticks])


def _as_pi(angle: float) -> str:
    """Spells an angle as a multiple of pi/8."""
    eighths = round(angle / pi * 8)
    return {0: "0", 1: "$π/8$", 2: "$π/4$", 3: "$3π/8$", 4: "$π/2$"}[eighths]
