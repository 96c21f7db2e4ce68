"""One look for every figure: a colour-blind-safe palette, and axes without global state."""

import io

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's palette, darkest first: told apart by every common form of colour blindness.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK, FAINT = "#222222", "#8C8C8C"

# Perceptually even maps: magnitudes, and values with a meaningful zero (give vmin = -vmax).
SEQUENTIAL, DIVERGING = "cividis", "PuOr_r"

DPI = 150


def figure(
    rows: int = 1, columns: int = 1, *, width: float = 4.2, height: float = 3.4, **subplots
) -> tuple[Figure, np.ndarray]:
    """A figure of `rows x columns` styled axes, each `width x height` inches.

    Returns the figure and its axes as an array of shape `[rows, columns]`, always two-dimensional.
    `subplots` goes to `Figure.subplots` (`sharex=`, `sharey=`, `width_ratios=`, ...). Nothing
    global is touched: no pyplot, no rcParams.
    """
    fig = Figure(figsize=(width * columns, height * rows), layout="constrained", facecolor="white")
    FigureCanvasAgg(fig)
    kind = {"axes_class": Panel}
    axes = fig.subplots(rows, columns, squeeze=False, subplot_kw=kind, **subplots)
    for ax in axes.flat:
        dress(ax)
    return fig, axes


class Panel(Axes):
    """Axes whose titles are of the house's size: `set_title` would reset it to a global one."""

    def set_title(self, label, fontdict=None, loc=None, pad=None, **options):
        return super().set_title(label, fontdict, loc, pad, **{"fontsize": 10, **options})


def dress(ax: Axes) -> Axes:
    """The house style on one axes: palette, faint grid, open frame, sizes."""
    ax.set_prop_cycle(color=PALETTE)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FAINT)
    ax.tick_params(labelsize=9, color=FAINT)
    ax.grid(color="#E4E4E4", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.xaxis.label.set_fontsize(10)
    ax.yaxis.label.set_fontsize(10)
    return ax


def heatmap(ax: Axes, values: np.ndarray, *, label: str = "", **options):
    """A map of `values [y, x]` with its colour bar named `label`; options as for `pcolormesh`.

    `x=`, `y=` are the coordinates of the columns and rows (default: their indices).
    """
    x = options.pop("x", np.arange(values.shape[1]))
    y = options.pop("y", np.arange(values.shape[0]))
    options.setdefault("cmap", SEQUENTIAL)
    mesh = ax.pcolormesh(x, y, values, shading="nearest", rasterized=True, **options)
    ax.grid(visible=False)
    bar = ax.figure.colorbar(mesh, ax=ax, label=label)
    bar.ax.tick_params(labelsize=9)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return mesh


def png(fig: Figure) -> bytes:
    """The figure as PNG bytes, without a date: equal figures give equal bytes."""
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def describe(fig: Figure) -> str:
    """What the figure shows, in words, from its own titles and axis labels: an alternative text."""
    panels = []
    for ax in fig.axes:
        axes = [f"{n}: {t}" for n, t in (("x", ax.get_xlabel()), ("y", ax.get_ylabel())) if t]
        words = ", ".join([ax.get_title() or ax.get_title(loc="left"), *axes]).strip(", ")
        panels.append(words)
    plain = (" ".join(words.replace("$", "").split()) for words in panels if words)
    return "; ".join(dict.fromkeys(plain))
