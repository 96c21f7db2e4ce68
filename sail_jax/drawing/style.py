"""The common style of all figures, with a palette that is safe for colour blindness."""

import contextlib
import io
import math
import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib import rc_context, rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.mathtext import MathTextParser
from matplotlib.text import Text
from matplotlib.ticker import LogLocator

from sail_jax.checks import escaped, shortened

# Okabe and Ito's palette, darkest first: distinguishable with every common colour blindness.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK, FAINT, GRID = "#222222", "#8C8C8C", "#E4E4E4"
# Cells without a value: neutral grey, because the middle of `DIVERGING` is white.
NOTHING = "#C4C4C4"

# Perceptually uniform maps: for magnitudes, and for values with a meaningful zero (set vmin =
# -vmax).
SEQUENTIAL, DIVERGING = "cividis", "PuOr_r"

# Fonts in PDF and PostScript that journals accept.
TRUETYPE: dict[Any, Any] = {"pdf.fonttype": 42, "ps.fonttype": 42}

DPI = 150
# The largest number of pixels of a figure: along one side (Agg's limit is 65,535), and in total.
SIDE, AREA = 50_000, 100_000_000


def figure(
    rows: int = 1, columns: int = 1, *, width: float = 4.2, height: float = 3.4, **subplots
) -> tuple[Figure, np.ndarray]:
    """Makes a figure of styled axes, without touching global state (pyplot, rcParams).

    Args:
      rows: The number of rows of axes.
      columns: The number of columns of axes.
      width: The width of each axes, in inches.
      height: The height of each axes, in inches.
      subplots: Further arguments of `Figure.subplots` (`sharex=`, `width_ratios=`, ...).

    Returns:
      The figure, and its axes as an array `[rows, columns]`, always two-dimensional.
    """
    size = (width * columns, height * rows)
    fig = Drawing(figsize=size, layout="constrained", facecolor="white")
    FigureCanvasAgg(fig)
    kind = {"axes_class": Panel}
    axes = fig.subplots(rows, columns, squeeze=False, subplot_kw=kind, **subplots)
    for ax in axes.flat:
        dress(ax)
    return fig, axes


def panels(
    count: int, columns: int, *, wide: bool = False, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Makes a figure of styled axes in rows, of which the last may have fewer.

    Args:
      count: The number of axes.
      columns: The largest number of axes in a row.
      wide: Whether the last axes take the rest of their row, which is empty otherwise.
      options: Options of `figure`.

    Returns:
      The figure, and its axes in reading order.
    """
    columns = min(count, columns)
    fig, grid = figure(-(-count // columns), columns, **options)
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.remove()
    if wide:
        rest = axes[count - 1].get_gridspec()[-1, (count - 1) % columns :]
        axes[count - 1].set_subplotspec(rest)
    return fig, axes[:count]


def points(size: float) -> float:
    """Scales a font size with `rcParams["font.size"]`, which is 10 by default.

    Args:
      size: The size in points at the default.

    Returns:
      The size in points.
    """
    return size * rcParams["font.size"] / 10


class Drawing(Figure):
    """A figure that notebooks show without pyplot, and whose PDF has TrueType fonts (Type 42)."""

    def _repr_png_(self) -> bytes:
        return png(self)

    def savefig(self, fname, **options):
        """Writes the figure to a file, as `Figure.savefig`. Journals refuse its usual fonts."""
        with rc_context(TRUETYPE):
            super().savefig(fname, **options)


class Panel(Axes):
    """Axes whose titles have the size of their labels, and that notebooks show as their figure."""

    def set_title(self, label, fontdict=None, loc=None, pad=None, **options):
        """Sets the title, in size 10 unless another `fontsize` is given."""
        return super().set_title(label, fontdict, loc, pad, **{"fontsize": points(10), **options})

    def _repr_png_(self) -> bytes | None:
        figure = self.get_figure(root=True)
        return None if figure is None else png(figure)


def dress(ax: Axes) -> Axes:
    """Gives axes the common style: palette, faint grid, open frame, font sizes.

    Args:
      ax: The axes, which are modified.

    Returns:
      The same axes.
    """
    ax.set_prop_cycle(color=PALETTE)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FAINT)
    ax.tick_params(labelsize=points(9), color=FAINT)
    ax.grid(color=GRID, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.xaxis.label.set_fontsize(points(10))
    ax.yaxis.label.set_fontsize(points(10))
    return ax


def logarithmic(ax: Axes, *which: str) -> None:
    """Makes axes logarithmic, with plain numbers at 1, 2 and 5 times powers of ten.

    Matplotlib's own labels overlap if an axis spans little more than a decade.

    Args:
      ax: The axes, which are modified.
      which: "x", "y" or both.
    """
    for name in which:
        ax.set(**{f"{name}scale": "log"})
        axis = ax.xaxis if name == "x" else ax.yaxis
        axis.set_major_locator(LogLocator(10, (1, 2, 5), numticks=8))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")


def heatmap(ax: Axes, values: np.ndarray, *, label: str | None = "", **options):
    """Draws a matrix as a heat map, with a colour bar.

    The bar has a pointed end if there are values beyond it, which have the colour of that end.

    Args:
      ax: The axes to draw on.
      values: An array of shape `[y, x]`.
      label: The name of the colour bar. None draws no bar, for maps that share another map's bar.
      options: `x=` and `y=` are the coordinates of columns and rows, their indices by default.
        `also=` contains the values of other maps that share the bar. Other options are passed to
        `pcolormesh`; `cmap` is `SEQUENTIAL` by default.

    Returns:
      The mesh from `pcolormesh`.
    """
    x = options.pop("x", np.arange(values.shape[1]))
    y = options.pop("y", np.arange(values.shape[0]))
    also = options.pop("also", values)
    options.setdefault("cmap", SEQUENTIAL)
    mesh = ax.pcolormesh(x, y, values, shading="nearest", rasterized=True, **options)
    ax.grid(visible=False)
    if label is not None:
        shown = np.concatenate([np.ravel(values), np.ravel(also)])
        low, high = (bool((side > 0).any()) for side in _beyond(shown, mesh.norm))
        extend = {(False, False): "neither", (True, False): "min", (False, True): "max"}
        bar = ax.figure.colorbar(mesh, ax=ax, label=label, extend=extend.get((low, high), "both"))
        bar.ax.tick_params(labelsize=points(9))
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return mesh


def _beyond(values: np.ndarray, norm) -> tuple[np.ndarray, np.ndarray]:
    """Returns how far values lie below and above the range of a norm, ignoring rounding."""
    finite = values[np.isfinite(values)]
    slack = 1e-6 * (norm.vmax - norm.vmin)
    return norm.vmin - finite - slack, finite - norm.vmax - slack


def literal(text: str, longest: int = 60) -> str:
    r"""Prepares text from users, such as names in files, for figures.

    Matplotlib reads text between two dollar signs as mathematics.

    Args:
      text: Any text.
      longest: The largest number of characters; longer text is shortened in its middle.

    Returns:
      One line, with unprintable characters and dollar signs escaped.

    >>> literal("a$x$")
    'a\\$x\\$'
    """
    return shortened(escaped(text), longest).replace("$", r"\$")


@contextlib.contextmanager
def rendering(fig: Figure) -> Iterator[None]:
    """Prepares a figure for a `with` statement in which it is rendered.

    Text that is not valid mathematics is drawn literally. Equal figures give equal bytes. A box
    replaces each character that is missing in the font, because names may use any script.

    Args:
      fig: The figure.

    Yields:
      Nothing.
    """
    _read_mathematics(fig)
    settings: dict[Any, Any] = TRUETYPE | {"svg.hashsalt": "sail-jax"}
    with warnings.catch_warnings(), rc_context(settings):
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def png(fig: Figure) -> bytes:
    """Renders a figure as PNG.

    Args:
      fig: The figure.

    Returns:
      The file's bytes, without a date or version: equal figures give equal bytes. A figure with
      more than `SIDE` or `AREA` pixels is drawn smaller.
    """
    buffer = io.BytesIO()
    width, height = (float(inches) * DPI for inches in fig.get_size_inches())
    fits = min(1.0, SIDE / max(width, height), math.sqrt(AREA / (width * height)))
    # `savefig` would draw twice, the first time for the layout. This drawing already gives it.
    fig.set_dpi(fits * DPI)
    with rendering(fig):
        FigureCanvasAgg(fig).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


# Colours that follow the page's theme, by their name in the SVG: a placeholder that Matplotlib
# draws, the colour on a light page, and the colour on a dark page.
_THEME = {"ink": ("#222221", INK, "#E6E9EE"), "grid": ("#E4E4E3", GRID, "#323A45")}


def svg(fig: Figure) -> bytes:
    """Renders a figure as SVG without a background, for pages with a light and a dark theme.

    Text, and lines in black or `INK`, become light on a dark page. A heat map keeps its colours,
    and so do lines and text on it.

    Args:
      fig: The figure. Its colours are changed.

    Returns:
      The file's bytes. Text is drawn as outlines. Equal figures give equal bytes.
    """
    _follow_theme(fig)
    buffer = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with rendering(fig):
        FigureCanvasSVG(fig).print_svg(buffer, metadata=metadata)
    text = buffer.getvalue()
    for name, (drawn, _, _) in _THEME.items():
        text = text.replace(drawn.lower(), f"var(--{name})")
    light, dark = (
        "".join(f"--{name}: {colours[k]};" for name, colours in _THEME.items()) for k in (1, 2)
    )
    rules = f":root {{{light}}} @media (prefers-color-scheme: dark) {{ :root {{{dark}}} }}"
    return text.replace("<defs>", f"<defs><style>{rules}</style>", 1).encode()


def _follow_theme(fig: Figure) -> None:
    """Sets the placeholders of `_THEME`, and removes white backgrounds."""
    fig.patch.set_facecolor("none")
    _inked([*fig.texts, *(part for legend in fig.legends for part in legend.findobj())])
    for ax in fig.axes:
        if to_hex(ax.get_facecolor()) == "#ffffff":
            ax.set_facecolor("none")
        ax.tick_params(which="both", labelcolor=_THEME["ink"][0], grid_color=_THEME["grid"][0])
        if any(isinstance(part, QuadMesh | AxesImage) for part in ax.get_children()):
            _inked([ax.title, ax.xaxis.label, ax.yaxis.label])
        else:
            _inked([part for part in ax.findobj() if part is not ax.patch])


def _inked(artists: list[Artist]) -> None:
    """Replaces black and `INK` by the placeholder of the theme's ink."""
    for artist in artists:
        colour = getattr(artist, "get_color", lambda: "white")()
        # Collections have a list of colours, [item, channel].
        rows = [colour] if isinstance(colour, str) or np.ndim(colour) == 1 else list(colour)
        if len(rows) == 1 and to_hex(rows[0]).upper() in {"#000000", INK}:
            artist.set(color=_THEME["ink"][0])


def _read_mathematics(fig: Figure) -> None:
    """Disables mathematics in text that Matplotlib cannot parse."""
    for text in fig.findobj(Text):
        if isinstance(text, Text) and not _is_mathematics(text.get_text()):
            text.set_parse_math(False)


def _is_mathematics(text: str) -> bool:
    """Checks whether Matplotlib can draw a text, if any part of it is read as mathematics."""
    if text.count("$") - text.count(r"\$") < 2:
        return True
    try:
        for line in text.splitlines():
            MathTextParser("path").parse(line)
    except ValueError:
        return False
    return True


def describe(fig: Figure) -> str:
    """Makes an alternative text for a figure from its titles and axis labels.

    Args:
      fig: The figure.

    Returns:
      The title and axes of each panel, without repetitions.
    """
    panels = []
    for ax in fig.axes:
        axes = [f"{n}: {t}" for n, t in (("x", ax.get_xlabel()), ("y", ax.get_ylabel())) if t]
        words = ", ".join([ax.get_title() or ax.get_title(loc="left"), *axes]).strip(", ")
        panels.append(words)
    plain = (re.sub(r"\\?\$", _dollar, " ".join(words.split())) for words in panels if words)
    return "; ".join(dict.fromkeys(plain))


def _dollar(found: re.Match[str]) -> str:
    """Renders a dollar sign as Matplotlib does: with a backslash it is shown, without it is not."""
    return "$" if len(found[0]) > 1 else ""
