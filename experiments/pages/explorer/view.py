"""The explorer's page: native controls in HTML, pictures by Bokeh, formulas by `javascript`."""

import html
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2
import numpy as np
from bokeh.core.types import ID
from bokeh.embed import json_item
from bokeh.models import (
    ColorBar,
    ColumnDataSource,
    FixedTicker,
    Image,
    LinearColorMapper,
    NumeralTickFormatter,
)
from bokeh.plotting import figure
from bokeh.resources import Resources

from experiments.pages.explorer import formulas
from experiments.pages.explorer.javascript import PRELUDE, javascript
from experiments.pages.explorer.panels import PANELS, Control, Panel
from experiments.pages.explorer.simulated import AXES, Grid
from sail_jax.drawing import style
from theory.claims import all_claims

GENERATOR = "sail-jax explore"
ANGLES = 92  # rows of the map from 0 to 180 degrees, so other multiples of 30 fall between rows
# Okabe and Ito's colours and two more, by strategy. Their lightness differs, too.
_COLORS = (
    "#56B4E9", "#E69F00", "#F0E442", "#009E73", "#0072B2", "#CC79A7", "#D55E00", "#882255",
    "#DDDDDD",
)  # fmt: skip
COLORS = dict(zip(formulas.WAYS, _COLORS, strict=True))


DASHES = ("solid", [7, 5], [2, 4], [12, 4, 2, 4])  # of the lines of a panel; page.js has them, too


TRANSFER = (
    Control("n", "target samples n", 75, 1, 2000, 1),
    Control("theta", "angle θ between the tasks, degrees", 45, 0, 180, 0.5),
    Control("sigma", "noise σ of the labels", 0.5, 0, 2),
    Control("d", "dimension d", 200, 2, 1000, 1),
    Control("source", "source samples n_s/d", None, 0.1, 10, 0, "∞: population", "math.inf", 2),
    Control(
        "ridge", "penalty λ of ridge transfer", None, 0.001, 10, 0, "best at each point", other=0.1
    ),
    Control("time", "training time t, for depth 1", None, 0.1, 1000, 0, "∞: to the end", other=10),
)
DEPTHS = (*range(1, 11), math.inf)
PRETRAINING = (
    Control("gamma", "noise γ on the weights", 0.2, 0, 0.5, 0.005),
    Control("decay", "decay of the spectrum", 1, 0, 2),
    Control("tau", "initial scale: τ, of e^−τ", 6, 2, 12, 0.1),
    Control("ratio", "new task over old, σ_ft/σ_pre", 3, 0.5, 6),
    Control("anchor", "anchor λ of fine-tuning", 0, 0, 4),
    Control("duration", "time of fine-tuning", 0.6, 0, 3),
)


def render(grid: Grid, estimates: Mapping[str, np.ndarray], about: Mapping[str, str]) -> str:
    """Draws the page.

    Args:
      grid: The settings of the simulated estimators.
      estimates: Their means and standard errors.
      about: Names and values for the foot of the page.

    Returns:
      The whole HTML document. It requires no other file and no network.
    """
    data = {
        "items": {name: json_item(plot, ID(name)) for name, plot in _plots().items()},
        "grid": {key: _plain(values) for key, values in grid._asdict().items()},
        "axes": {way: axes.split() for way, axes in AXES.items()},
        "estimates": {
            name: [float(f"{v:.4g}") for v in np.ravel(values)]
            for name, values in estimates.items()
        },
        "ways": formulas.WAYS, "colors": COLORS, "diverging": _diverging(), "angles": ANGLES,
        "notes": {
            "transfer": _notes(formulas.TRANSFER_ROWS),
            "pretraining": _notes(formulas.PRETRAINING_ROWS),
        },
        "width": formulas.WIDTH, "panels": [_declared(panel) for panel in PANELS],
    }  # fmt: skip
    maps = {
        way: f"gain of {way}" for way in ("fine-tuning", *formulas.WAYS[1:3], *formulas.WAYS[4:])
    }
    maps |= {"all": "best strategy", "paper": "best strategy, of the paper's four"}
    page = jinja2.Environment(
        autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    ).from_string(_file("page.html"))
    return page.render(
        generator=GENERATOR,
        style=_raw(_file("page.css")),
        bokeh=_raw(Resources(mode="inline", components=["bokeh"]).render_js()),
        data=_raw(json.dumps(data, allow_nan=False).replace("</", "<\\/")),
        formulas=_raw(PRELUDE + _formulas()),
        script=_raw(_file("page.js")),
        about="; ".join(f"{name} {value}" for name, value in about.items()),
        maps=maps,
        transfer=TRANSFER,
        pretraining=PRETRAINING,
        panels=[(panel, [c for _, c in _controls(panel)]) for panel in PANELS],
        width=formulas.WIDTH,
        largest=formulas.LARGEST,
        depths=["∞" if math.isinf(depth) else depth for depth in DEPTHS],
    )


def _formulas() -> str:
    """Translates the page's functions; `transfer` has one translation for each choice of None."""
    number, angles = (), (ANGLES,)
    transfer = (number, number, angles, number, number, number)

    def stopped(n, d, theta, sigma, source, time):
        return formulas.transfer(n, d, theta, sigma, 1, source, None, time)

    def without_ridge(*x):  # used by most maps: this quadrature is most of the work
        found = formulas.transfer(*x).items()
        return {name: value for name, value in found if not name.endswith("ridge transfer")}

    translated = {
        "without_ridge": javascript(without_ridge, *transfer),
        "transfer": javascript(lambda *x: formulas.transfer(*x), *transfer),
        "with_ridge": javascript(lambda *x: formulas.transfer(*x), *transfer, number),
        "stopped": javascript(stopped, *transfer),
        "pretraining": javascript(formulas.pretraining, *[number] * len(PRETRAINING)),
        **{p.name: javascript(p.function, *[number] * len(p.controls)) for p in PANELS},
    }
    entries = ",\n".join(f"{name}: {code}" for name, code in translated.items())
    return f"const formulas = {{\n{entries}\n}}\n"


def _controls(panel: Panel) -> list[tuple[str, Control]]:
    """Returns the arguments of a panel's function, and their controls by names unique on the
    page."""
    return [(c.key, c._replace(key=f"{panel.name}.{c.key}")) for c in panel.controls]


def _declared(panel: Panel) -> dict[str, Any]:
    """Returns a panel's data for the script."""
    return {
        "name": panel.name, "x": panel.x, "lines": panel.lines, "numbers": [*panel.numbers.items()],
        "keys": [
            {"key": control.key, "argument": argument, "angle": argument.endswith("theta")}
            for argument, control in _controls(panel)
        ],
        "notes": _notes([(line, "", row) for line, row in panel.rows]),
    }  # fmt: skip


def _plots() -> dict[str, Any]:
    gain = _figure(
        "map",
        "load n/d (samples per dimension)",
        "angle θ between tasks (degrees)",
        x_range=(0, 2),
        y_range=(0, 180),
    )
    gain.grid.visible = False
    gain.yaxis.ticker = FixedTicker(ticks=[*range(0, 181, 30)])
    mapper = LinearColorMapper(palette=_diverging(), low=-1, high=1, nan_color="#999999")
    mapper.name = "mapper"
    cells = _source("cells", image=[np.zeros((1, 1))], x=[0], y=[0], dw=[2], dh=[180])
    image = Image(image="image", x="x", y="y", dw="dw", dh="dh", color_mapper=mapper)
    gain.add_glyph(cells, image, level="image")
    line = {"line_color": "#000000", "line_width": 2.5}
    gain.multi_line("xs", "ys", source=_source("zeros", xs=[], ys=[]), line_dash=[7, 5], **line)
    printed = gain.multi_line("xs", "ys", source=_source("printed", xs=[], ys=[]))
    printed.glyph.update(line_color="#0072B2", line_width=3)
    marks = _source("estimated", x=[], y=[], value=[])
    gain.scatter("x", "y", source=marks, size=14, line_color=None, fill_color="#ffffff")
    gain.scatter(
        "x", "y", source=marks, size=11, line_width=1.5, line_color="#000000",
        fill_color={"field": "value", "transform": mapper},
    )  # fmt: skip
    point = _source("point", x=[], y=[])
    gain.scatter(
        "x", "y", source=point, size=20, line_color="#ffffff", line_width=5, fill_color=None
    )
    gain.scatter(
        "x", "y", source=point, size=20, line_color="#000000", line_width=2, fill_color=None
    )
    bar = ColorBar(
        color_mapper=mapper, name="bar", height=12, padding=4, background_fill_color=None,
        major_label_text_font_size="13px",
    )  # fmt: skip
    gain.add_layout(bar, "below")
    plots = {"map": gain}
    for name, curves in (
        ("noise", ("perturbed", "not perturbed")),
        ("tuning", ("old task", "new task")),
    ):
        plot = _figure(
            name, "pre-training time t (gradient flow)", "loss (squared Frobenius norm)",
            x_axis_type="log",
        )  # fmt: skip
        source = _source(f"{name} curves", time=[1, 10], **{curve: [0, 1] for curve in curves})
        for curve, dash in zip(curves, ("solid", [7, 5]), strict=True):
            plot.line("time", curve, source=source, line_width=3, line_dash=dash, name=curve)
        turn = _source(f"{name} turn", x=[], y=[])
        plot.scatter(
            "x", "y", source=turn, marker="inverted_triangle", size=16, name=f"{name} mark"
        )
        plot.xaxis.formatter = NumeralTickFormatter(format="0.[00]")
        plot.y_range.update(start=0)
        plots[name] = plot
    return plots | {panel.name: _lines(panel) for panel in PANELS}


def _lines(panel: Panel) -> figure:
    """Draws the lines of a panel. Dashes differ, and the script sets the colours."""
    scale = {"x_axis_type": "log"} if panel.logarithmic else {}
    plot = _figure(panel.name, panel.x_label, panel.y_label, **scale)
    columns = {name: [0, 1] for name in panel.lines} | {panel.x: [1, 10]}
    source = _source(f"{panel.name} curves", **columns)
    for name, dash in zip(panel.lines, DASHES, strict=False):
        plot.line(
            panel.x, name, source=source, line_width=3, line_dash=dash, name=f"{panel.name}: {name}"
        )
    if panel.logarithmic:
        plot.xaxis.formatter = NumeralTickFormatter(format="0.[00]")
    plot.y_range.update(start=0)
    return plot


def _source(name: str, **columns: Sequence) -> ColumnDataSource:
    return ColumnDataSource(data=columns, name=name)


def _figure(name: str, x: str, y: str, **options: Any) -> figure:
    """Creates a figure without tools, so that touch gestures scroll the page."""
    plot = figure(
        name=name, x_axis_label=x, y_axis_label=y, tools="", toolbar_location=None,
        sizing_mode="stretch_both", background_fill_color=None, border_fill_color=None, **options,
    )  # fmt: skip
    plot.outline_line_color = None
    for axis in plot.axis:
        axis.update(
            axis_label_text_font_size="14px", major_label_text_font_size="13px",
            axis_label_text_font_style="normal", minor_tick_line_color=None,
        )  # fmt: skip
    return plot


def _plain(values: Any) -> Any:
    """Converts numbers to JSON. Infinity, which is not JSON, becomes null, the special value."""
    if isinstance(values, tuple):
        return [_plain(v) for v in values]
    return None if values is None or math.isinf(values) else values


def _notes(rows: Sequence[tuple[str, str, str]]) -> list[list[str]]:
    """Returns claims of the ledger with their statements, as HTML."""
    known = {claim.id: claim.statement for claim in all_claims()}
    return [[*row, html.escape(known[row[-1]])] for row in rows]


def _diverging() -> list[str]:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(color) for color in colormaps[style.DIVERGING](np.linspace(0, 1, 101))]


def _file(name: str) -> str:
    return resources.files("experiments.pages.explorer").joinpath(name).read_text("utf-8")


def _raw(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)
