"""The explorer's page, drawn by Bokeh from tables: every number on it was computed in Python."""

import html
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.events import DocumentReady, Tap
from bokeh.models import (
    CategoricalSlider,
    ColorBar,
    Column,
    ColumnDataSource,
    CustomJS,
    Div,
    Image,
    InlineStyleSheet,
    LinearColorMapper,
    RadioButtonGroup,
    Row,
    Select,
    Slider,
    TabPanel,
    Tabs,
    Title,
)
from bokeh.plotting import figure
from bokeh.resources import INLINE

from experiments.pages.explorer import pretraining, transfer
from experiments.pages.explorer.tables import Table
from sail_jax.drawing import style
from theory.deep_linear import beyond_claims
from theory.deep_linear import claims as transfer_claims
from theory.two_layer import claims as two_layer_claims

__all__ = ["GENERATOR", "render"]

GENERATOR = "sail-jax explore"
ROOM = (6, 22, 12, 22)  # around a slider: its handle reaches beyond its ends
TITLE = "When does transfer help, and when does more pre-training hurt?"
# Okabe and Ito's, by way: their lightness differs, too
COLORS = dict(zip(transfer.WAYS, ("#56B4E9", "#E69F00", "#009E73", "#CC79A7"), strict=True))

Painted = list[tuple[Any, str, str]]  # what the theme colours: (model, property, kind of colour)
Tab = tuple[Column, CustomJS]  # and what fills it with numbers

TEMPLATE = """
{% block preamble %}
<meta name="generator" content="{{ generator }}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data: blob:;
 script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; base-uri 'none'">
{% endblock %}
{% block postamble %}<style>{{ style }}</style>{% endblock %}
{% block contents %}
<h1>{{ title }}</h1>
{{ super() }}
<footer>{{ about | e }}</footer>
{% endblock %}
"""


def render(
    first: tuple[transfer.Grid, Mapping[str, Table]],
    second: tuple[pretraining.Grid, Mapping[str, Table]],
    about: Mapping[str, str],
) -> str:
    """Draws the page.

    Args:
      first: The first tab's grid and its tables.
      second: The second tab's.
      about: Names and values that the foot of the page shows.

    Returns:
      The whole HTML document. It needs no other file and no network.
    """
    painted: Painted = []
    transferring, first_update = _transfer(*first, painted)
    pretrained, second_update = _pretraining(*second, painted)
    tabs = Tabs(
        tabs=[
            TabPanel(title="Transfer", child=transferring),
            TabPanel(title="Pre-training", child=pretrained),
        ],
        **_look(),
    )
    document = Document(title=f"sail-jax: {TITLE}")
    document.add_root(tabs)
    theme = CustomJS(args={"painted": [list(entry) for entry in painted]}, code=_file("theme.js"))
    document.js_on_event(DocumentReady, theme, first_update, second_update)
    return file_html(
        document,
        INLINE,
        template=TEMPLATE,
        template_variables={
            "generator": GENERATOR,
            "style": _file("page.css"),
            "about": "; ".join(f"{name} {value}" for name, value in about.items()),
        },
    )


def _file(name: str) -> str:
    return resources.files("experiments.pages.explorer").joinpath(name).read_text("utf-8")


def _look() -> dict[str, Any]:
    """Options of a model that is as wide as there is room, in the page's style."""
    return {
        "sizing_mode": "stretch_width",
        "stylesheets": [InlineStyleSheet(css=_file("models.css"))],
    }


def _transfer(grid: transfer.Grid, tables: Mapping[str, Table], painted: Painted) -> Tab:
    """Controls, map and details of the first tab."""
    load, angle = grid.load(), np.degrees(grid.theta())
    step, turn = float(load[1] - load[0]), float(angle[1] - angle[0])
    thin = transfer.EVERY
    # A point that is simulated, too.
    start, upper = len(load) // (4 * thin) * thin + thin // 2, len(angle) // thin // 2 * thin
    controls = {
        "sigma": _choice("noise σ of the labels", grid.sigmas, 2),
        "depth": _choice("depth: layers of the network", grid.depths, 1),
        "ridge": _choice("penalty λ of ridge transfer", ("best", *grid.ridges)),
        "source": _choice("source samples n_s/d", grid.sources),
        "time": _choice("training time t (depth 1)", (*grid.times, np.inf), len(grid.times)),
        "load": _slider("point: load n/d", load[0], load[-1], step, load[start], "0.000"),
        "theta": _slider("point: angle θ in degrees", 0, 90, turn, angle[upper]),
    }
    shown: list[Any] = [("which way wins", "which way wins")]
    shown += [(way, f"gain of {way}") for way in transfer.WAYS[1:]]
    layer = Select(title="map", value=shown[0][0], options=shown, name="layer", **_look())
    mode = RadioButtonGroup(labels=["closed form", "simulation"], active=0, name="mode", **_look())
    plot = _figure(
        "Which way of using a source has the least risk",
        "load n/d (samples per dimension, no unit)",
        "angle θ between tasks (degrees)",
        painted,
        x_range=(0, 2),
        y_range=(-turn / 2, 90 + turn / 2),
    )
    wins = LinearColorMapper(palette=[*COLORS.values()], low=-0.5, high=3.5)
    gain = LinearColorMapper(palette=_diverging(), low=-1, high=1)
    sources, renderers = {}, {}
    for name, rows, columns, height in (
        ("fine", grid.angles, grid.loads, turn),
        ("coarse", len(angle[::thin]), len(load[thin // 2 :: thin]), turn * thin),
    ):
        image = {"image": [np.zeros((rows, columns), np.float32)]}
        sources[name] = ColumnDataSource(data=image, name=name)
        place: dict[str, Any] = {"x": 0, "y": -height / 2, "dw": 2, "dh": rows * height}
        for kind, mapper in (("wins", wins), ("gain", gain)):
            glyph = Image(image="image", color_mapper=mapper, **place)
            renderers[f"{name} {kind}"] = plot.add_glyph(sources[name], glyph, visible=False)
    boundary, unclear, point = (ColumnDataSource(data={"x": [], "y": []}) for _ in range(3))
    plot.line("x", "y", source=boundary, color="#000000", line_width=2.5)
    plot.scatter("x", "y", source=unclear, marker="x", size=11, color="#000000", line_width=2)
    ring: dict[str, Any] = {"source": point, "fill_color": None}
    plot.scatter("x", "y", size=18, line_color="#ffffff", line_width=5, **ring)
    plot.scatter("x", "y", size=18, line_color="#000000", line_width=2.5, **ring)
    bar = ColorBar(
        color_mapper=gain, title="gain (orange: the way helps; violet: it hurts)",
        height=14, visible=False, background_fill_color=None, padding=6, bar_line_color=None,
        title_text_font_size="13px", title_text_font_style="normal",
        major_label_text_font_size="13px",
    )  # fmt: skip
    plot.add_layout(bar, "below")
    painted += [(bar, "title_text_color", "ink"), (bar, "major_label_text_color", "ink")]
    details, legend = _text("details"), _text("", _legend())
    risks = {way: tables[way] for way in transfer.WAYS}
    update = CustomJS(
        args={
            "controls": controls, "layer": layer, "mode": mode, "details": details, "bar": bar,
            "renderers": renderers, "boundary": boundary, "unclear": unclear, "point": point,
            "legend": legend, "squares": legend.text, "plot": plot, **sources,
            "risks": _tables(risks),
            "simulated": _tables({way: tables[f"simulated {way}"] for way in risks}),
            "errors": {
                way: _tables({"risk": tables[f"error of {way}"]}
                | ({"gain": tables[f"error of gain, {way}"]} if way != "scratch" else {}))
                for way in risks
            },
            "penalised": _tables({way: tables[way] for way in transfer.PENALISED}),
            "edges": _tables({
                "linear_load": tables["boundary load"], "linear_theta": tables["boundary theta"],
                "tuned_load": tables["tuned load"], "tuned_theta": tables["tuned theta"],
            }),
            "loads": load.tolist(), "angles": angle.tolist(), "samples": grid.samples().tolist(),
            "times": [*grid.times, "inf"], "depths": [str(depth) for depth in grid.depths],
            "d": grid.d, "draws": grid.draws, "every": thin, "colors": [*COLORS.values()],
            "notes": _notes(transfer.ROWS),
        },
        code=_file("tables.js") + _file("transfer.js"),
    )  # fmt: skip
    for control in (*_named(controls), layer):
        control.js_on_change("value", update)
    mode.js_on_change("active", update)
    plot.js_on_event(Tap, CustomJS(args={"controls": controls}, code=_file("tap.js")))
    tab = _tab(
        "Two linear tasks differ by an angle; a network trained on the first is used to learn the "
        "second from n samples in d dimensions. The map shows when that beats starting from "
        "scratch. Tap it, or move the point with its two sliders.",
        [layer, mode, *controls.values()],
        [legend, plot],
        [details],
    )
    return tab, update


def _pretraining(grid: pretraining.Grid, tables: Mapping[str, Table], painted: Painted) -> Tab:
    """Controls, curves and details of the second tab."""
    controls = {
        "gamma": _choice("perturbation γ", grid.gammas, len(grid.gammas) // 2),
        "decay": _choice("decay of the spectrum", grid.decays, 1),
        "tau": _choice("size of the start: τ, of e^−τ", grid.taus, 1),
        "ratio": _choice("new task over old: σ_ft/σ_pre", grid.ratios, len(grid.ratios) // 2),
        "anchor": _choice("fine-tuning: anchor λ", grid.anchors),
        "duration": _choice("fine-tuning: time", grid.durations, len(grid.durations) // 2),
    }
    time, loss = "pre-training time t (gradient flow)", "loss (squared Frobenius norm)"
    drawn = {}
    for name, title, curves in (
        (
            "perturbed", "Loss after noise of size γ on the weights",
            (("noisy", "perturbed", "blue", "solid"), ("calm", "not perturbed", "red", "dashed")),
        ),
        (
            "tuned", "Loss after fine-tuning on the new task",
            (("old", "pre-training task", "blue", "solid"), ("fresh", "new task", "red", "dashed")),
        ),
    ):  # fmt: skip
        plot = _figure(title, time, loss, painted, height=340, x_axis_type="log")
        columns = {"time": [1.0, 10.0], **{column: [0.0, 1.0] for column, *_ in curves}}
        source = ColumnDataSource(data=columns, name=name)
        turn = ColumnDataSource(data={"x": [], "y": []}, name=f"turn of {name}")
        for column, label, color, dash in curves:
            line = plot.line(
                "time", column, source=source, line_width=3, line_dash=dash, legend_label=label
            )
            painted.append((line.glyph, "line_color", color))
        mark = plot.scatter(
            "x", "y", source=turn, marker="inverted_triangle", size=16,
            legend_label="more hurts from here",
        )  # fmt: skip
        painted += [(mark.glyph, "line_color", "ink"), (mark.glyph, "fill_color", "ink")]
        legend = plot.legend[0]
        plot.add_layout(legend, "above")
        legend.update(
            orientation="horizontal", background_fill_color=None, border_line_color=None,
            label_text_font_size="13px", padding=0, ncols=2, nrows="auto",
        )  # fmt: skip
        painted.append((legend, "label_text_color", "ink"))
        plot.y_range.update(start=0)
        drawn[name] = plot, source, turn
    details = _text("details of pre-training")
    update = CustomJS(
        args={
            "controls": controls, "details": details, "tables": _tables(tables), "d": grid.d,
            "scale": grid.scale, "notes": _notes(pretraining.ROWS),
            "perturbed": drawn["perturbed"][1], "perturbed_turn": drawn["perturbed"][2],
            "tuned": drawn["tuned"][1], "tuned_turn": drawn["tuned"][2],
        },
        code=_file("tables.js") + _file("pretraining.js"),
    )  # fmt: skip
    for control in _named(controls):
        control.js_on_change("value", update)
    tab = _tab(
        "A network learns the parts of its task one by one, the largest first. Trained for longer "
        "it knows more, and has more to lose when it is perturbed or fine-tuned: past the marked "
        "time, more pre-training hurts.",
        [*controls.values()],
        [drawn["perturbed"][0], drawn["tuned"][0]],
        [details],
    )
    return tab, update


def _tab(sentence: str, controls: Sequence, plots: Sequence, details: Sequence) -> Column:
    """One sentence, and three columns that stand below one another where the screen is narrow."""

    def part(children: Sequence, flex: str) -> Column:
        return Column(
            children=[*children], sizing_mode="stretch_width", spacing=4,
            styles={"flex": flex, "min-width": "0"},
        )  # fmt: skip

    parts = Row(
        children=[
            part(controls, "1 1 250px"), part(plots, "3 1 340px"), part(details, "2 1 340px"),
        ],
        sizing_mode="stretch_width",
        stylesheets=[InlineStyleSheet(css=":host { flex-wrap: wrap !important; gap: 1rem; }")],
    )  # fmt: skip
    return Column(children=[_text("", f"<p>{sentence}</p>"), parts], sizing_mode="stretch_width")


def _named(controls: Mapping[str, Any]) -> list[Any]:
    """The controls, each by its name."""
    for name, control in controls.items():
        control.name = name
    return [*controls.values()]


def _choice(title: str, values: Sequence[Any], start: int = 0) -> CategoricalSlider:
    """A slider over a few values."""
    labels = [v if isinstance(v, str) else "∞" if np.isinf(v) else f"{v:g}" for v in values]
    value = labels[min(start, len(labels) - 1)]
    return CategoricalSlider(title=title, categories=labels, value=value, **_look(), margin=ROOM)


def _slider(
    title: str, start: float, end: float, step: float, value: float, form: str = "0[.]0"
) -> Slider:
    return Slider(
        title=title, start=start, end=end, step=step, value=value, format=form, **_look(),
        margin=ROOM,
    )  # fmt: skip


def _figure(title: str, x: str, y: str, painted: Painted, height: int = 430, **options: Any):
    """A figure without tools, so that a finger scrolls the page; the theme colours its texts."""
    heading = Title(text=title, text_font_size="15px")
    plot = figure(
        title=heading, x_axis_label=x, y_axis_label=y, height=height, tools="",
        toolbar_location=None, sizing_mode="stretch_width", background_fill_color=None,
        border_fill_color=None, **options,
    )  # fmt: skip
    plot.outline_line_color = None
    painted.append((heading, "text_color", "ink"))
    for axis in plot.axis:
        axis.update(
            axis_label_text_font_size="14px", major_label_text_font_size="13px",
            axis_label_text_font_style="normal",
        )  # fmt: skip
        for name in ("axis_label_text", "major_label_text", "axis_line", "major_tick_line"):
            painted.append((axis, f"{name}_color", "ink"))
        painted.append((axis, "minor_tick_line_color", "line"))
    painted.extend((grid, "grid_line_color", "line") for grid in plot.grid)
    return plot


def _text(name: str, text: str = "") -> Div:
    return Div(text=text, name=name or None, **_look())


def _legend() -> str:
    squares = (f'<span><i style="background:{c}"></i>{way}</span>' for way, c in COLORS.items())
    return f'<div class="legend">{"".join(squares)}</div>'


def _tables(tables: Mapping[str, Table]) -> dict[str, Any]:
    return {
        name: {"axes": [*values.axes], "values": values.values} for name, values in tables.items()
    }


def _notes(rows: Sequence[tuple[str, ...]]) -> list[list[str]]:
    """Rows of the ledger with their statements, as HTML."""
    rooms = (transfer_claims, beyond_claims, two_layer_claims)
    known = {claim.id: claim.statement for room in rooms for claim in room.CLAIMS}
    return [[*row, html.escape(known[row[-1]])] for row in rows]


def _diverging() -> list[str]:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(color) for color in colormaps[style.DIVERGING](np.linspace(0, 1, 101))]
