"""Figures for print: file formats, widths of a journal's columns, and Matplotlib's styles."""

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from matplotlib import style as styles
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.offsetbox import HPacker
from matplotlib.text import Text

from sail_jax.checks import argument, described, nearest, one_of
from sail_jax.drawing import style

FORMATS = ("png", "svg", "pdf")
COLUMNS = {"single": 3.5, "double": 7.2}
"""The widths of a journal's page, in inches: of one column, and of the page."""
# The smallest scale of text: journals print no text below 6 points, and ticks have 9.
_LEAST = 2 / 3
# Pixels per inch of heat maps in SVG and PDF.
_RASTER = 300


class Looks(NamedTuple):
    """How figures are drawn and written.

    Attributes:
      formats: The formats of their files, of `FORMATS`.
      width: "single" or "double" for the width of a journal's column, in `COLUMNS`; None for the
        width that the figure was designed with.
      style: A style of Matplotlib: a name, the path of a file, or a mapping of `rcParams`. None for
        the current `rcParams`.

    >>> from sail_jax.drawing import style
    >>> looks = Looks(("pdf",), width="single", style={"font.size": 8})
    >>> figures = looks.draw(lambda: {"empty": style.figure()[0]})
    >>> float(figures["empty"].get_size_inches()[0])
    3.5
    >>> {name: data[:4] for name, data in looks.files(figures).items()}
    {'empty.pdf': b'%PDF'}
    """

    formats: tuple[str, ...] = ("png",)
    width: str | None = None
    style: str | Path | Mapping[str, Any] | None = None

    def checked(self) -> "Looks":
        """Checks the values.

        Returns:
          The same looks.

        Raises:
          ValueError: For an unknown format, width or style. The message contains the closest name.
          TypeError: If the style is something else.
        """
        for name in self.formats:
            one_of(argument("formats"), name, FORMATS)
        if self.width is not None:
            one_of(argument("width"), self.width, COLUMNS)
        with self._context():
            return self

    def draw(self, plot: Callable[..., Mapping[str, Figure]], *args: Any) -> dict[str, Figure]:
        """Draws figures in this style and width.

        Args:
          plot: Draws the figures.
          args: The arguments of `plot`.

        Returns:
          The figures by name.
        """
        with self._context():
            figures = dict(plot(*args))
        if self.width is not None:
            for figure in figures.values():
                fit(figure, COLUMNS[self.width])
        return figures

    def files(self, figures: Mapping[str, Figure]) -> dict[str, bytes]:
        """Renders figures in each format.

        Args:
          figures: The figures by name.

        Returns:
          The content of each file by its name, such as "risk.pdf".
        """
        return {
            f"{name}.{format}": rendered(figure, format)
            for name, figure in figures.items()
            for format in self.formats
        }

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        """Sets the style's `rcParams` in a `with` statement."""
        name = argument("style")
        match self.style:
            case None:
                yield
                return
            case Mapping():
                wanted: Any = dict(self.style)
            case str() | Path():
                wanted, names = str(self.style), [*styles.available, "default"]
                # Matplotlib would also download a style from an address.
                if wanted not in names and not Path(wanted).is_file():
                    raise ValueError(
                        f"{name}: neither a file nor a style of Matplotlib: '{wanted}'"
                        f"{nearest(wanted, names)}"
                    )
            case _:
                raise TypeError(
                    f"{name}: expected a name, a path or a mapping; got {described(self.style)}"
                )
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(styles.context(wanted))
            except (KeyError, ValueError, OSError) as error:
                raise ValueError(f"{name}: {' '.join(str(error.args[0]).split())}") from error
            yield


def fit(figure: Figure, inches: float) -> None:
    """Gives a figure another width.

    A narrower figure gets smaller text, but not below 2/3, and a height that leaves room for it.
    Legends of the figure get fewer columns if they are wider.

    Args:
      figure: The figure, which is modified.
      inches: The width in inches.
    """
    wide, tall = figure.get_size_inches()
    ratio = inches / wide
    scale = max(min(ratio, 1.0), _LEAST)
    figure.set_size_inches(inches, tall * max(ratio, scale))
    axes = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    ticks = [(axis, label.get_fontsize()) for axis in axes for label in axis.get_ticklabels()[:1]]
    for text in figure.findobj(Text):
        cast(Text, text).set_fontsize(scale * cast(Text, text).get_fontsize())
    for axis, size in ticks:
        # Ticks that are made while drawing have this size.
        axis.set_tick_params(labelsize=scale * size)
    for legend in figure.legends:
        _fold(figure, legend)


def _fold(figure: Figure, legend: Legend) -> None:
    """Removes columns of a legend until it is no wider than the figure, or one is left."""
    # The box of all columns comes after the boxes inside it.
    columns = cast(HPacker, legend.findobj(HPacker)[-1]).get_children()
    entries = [entry for column in columns for entry in column.get_children()]
    figure.draw_without_rendering()
    while len(columns) > 1 and legend.get_window_extent().width > figure.bbox.width:
        columns.pop()
        parts = np.array_split(np.arange(len(entries)), len(columns))
        for column, part in zip(columns, parts, strict=True):
            column.get_children()[:] = [entries[i] for i in part]
        figure.draw_without_rendering()


def rendered(figure: Figure, format: str) -> bytes:
    """Renders a figure as a file.

    Args:
      figure: The figure.
      format: One of `FORMATS`.

    Returns:
      The bytes of the file, without a date or version: equal figures give equal bytes. Fonts in a
      PDF are TrueType (Type 42), and text in an SVG is drawn as outlines.
    """
    if format == "png":
        return style.png(figure)
    keys = ("Date", "Creator", "Format", "Type") if format == "svg" else ("Creator", "Producer")
    metadata = dict.fromkeys((*keys, "CreationDate") if format == "pdf" else keys)
    buffer = io.BytesIO()
    with style.rendering(figure):
        figure.savefig(buffer, format=format, dpi=_RASTER, metadata=metadata)
    return buffer.getvalue()
