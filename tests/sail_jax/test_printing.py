"""Figures have the fonts, sizes and widths that journals expect, and notebooks show them."""

import re
import zlib
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from sail_jax.drawing import printing, style
from sail_jax.drawing.printing import Looks


def plot():
    """A line, a heat map with its colour bar, and a legend."""
    figure, ((left, right),) = style.figure(1, 2)
    left.plot([0, 1], [0, 1], label="a line")
    left.set(xlabel="$x$", ylabel="y", title="one")
    left.legend(frameon=False, fontsize=style.points(8))
    style.heatmap(right, np.eye(3), label="entry")
    return {"both": figure}


TEXTS = ("$x$", "y", "one", "a line", "entry")


def sizes(figure):
    """The sizes of texts, and of the labels of the ticks that are drawn."""
    figure.draw_without_rendering()
    found = {t.get_text(): t.get_fontsize() for t in figure.findobj(Text)}
    ticks = {t.get_fontsize() for ax in figure.axes for t in ax.get_yticklabels()}
    return {text: found[text] for text in TEXTS} | {"ticks": max(ticks), "smallest": min(ticks)}


@pytest.mark.slow
def test_each_format_is_written_the_same_each_time():
    looks = Looks(("png", "svg", "pdf")).checked()
    files = looks.files(looks.draw(plot))
    assert {name: data[:4] for name, data in files.items()} == {
        "both.png": b"\x89PNG", "both.svg": b"<?xm", "both.pdf": b"%PDF",
    }  # fmt: skip
    assert files == looks.files(looks.draw(plot))


def fonts(pdf):
    """The kinds of fonts in a PDF: Type 42 is TrueType, CIDFontType2 in a composite font."""
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.S)
    text = pdf + b"".join(zlib.decompress(s) for s in streams if s[:1] == b"\x78")
    return set(re.findall(rb"/Subtype /(Type3|CIDFontType2|Type0|TrueType|Type1)\b", text))


def test_a_pdf_has_no_type_3_fonts(tmp_path):
    assert fonts(Looks(("pdf",)).files(plot())["both.pdf"]) == {b"Type0", b"CIDFontType2"}
    plot()["both"].savefig(tmp_path / "own.pdf")
    assert b"Type3" not in fonts((tmp_path / "own.pdf").read_bytes())
    plain = Figure()
    plain.text(0.5, 0.5, "as usual")
    plain.savefig(tmp_path / "plain.pdf")
    assert b"Type3" in fonts((tmp_path / "plain.pdf").read_bytes())  # the check can fail


@pytest.mark.slow
def test_every_size_follows_the_callers_font_size():
    usual = sizes(plot()["both"])
    with matplotlib.rc_context({"font.size": 15}):
        assert sizes(plot()["both"]) == pytest.approx({t: 1.5 * s for t, s in usual.items()})
    styled = Looks(style={"font.size": 5}).draw(plot)["both"]
    assert sizes(styled) == pytest.approx({text: size / 2 for text, size in usual.items()})
    assert matplotlib.rcParams["font.size"] == 10


def test_no_size_is_fixed():
    """Numbers of points are given by `style.points`, so that they follow `rcParams`."""
    root = Path(__file__).parents[2]
    files = [
        f for room in ("sail_jax", "theory", "experiments") for f in (root / room).rglob("*.py")
    ]
    fixed = re.compile(r"(font|label)size(\"?:|=) ?\d")
    assert [str(file) for file in files if fixed.search(file.read_text())] == []


@pytest.mark.parametrize(("width", "scale"), [("single", 2 / 3), ("double", 7.2 / 8.4)])
def test_a_column_of_a_journal_keeps_text_readable(width, scale):
    usual, figure = sizes(plot()["both"]), Looks(width=width).draw(plot)["both"]
    assert figure.get_size_inches()[0] == printing.COLUMNS[width]
    found = sizes(figure)
    assert found == pytest.approx({text: size * scale for text, size in usual.items()})
    assert min(found.values()) > 5


@pytest.mark.parametrize(("count", "columns", "left"), [(5, 5, 2), (3, 1, 1), (2, 2, 2)])
def test_a_legend_wider_than_a_column_of_a_journal_gets_fewer_columns(count, columns, left):
    figure, axes = style.figure()
    names = [f"line {k} of all" for k in range(count)]
    handles = [axes[0, 0].plot([0, 1])[0] for _ in names]
    legend = figure.legend(handles, names, ncols=columns, loc="outside lower center", fontsize=12)
    printing.fit(figure, printing.COLUMNS["single"])
    assert legend.get_window_extent().width <= figure.bbox.width
    places = {text.get_text(): text.get_window_extent() for text in legend.get_texts()}
    assert len({round(box.x0) for box in places.values()}) == left
    first = [name for name, box in places.items() if box.x0 == places[names[0]].x0]
    assert first == names[: -(-count // left)]  # down the columns, as before


def test_panels_fill_rows_and_the_last_may_take_the_rest():
    figure, axes = style.panels(5, 3, width=2.0, height=1.5)
    assert figure.get_size_inches() == pytest.approx([6.0, 3.0])
    assert figure.axes == axes
    places = [(ax.get_subplotspec().rowspan.start, ax.get_subplotspec().colspan) for ax in axes]
    assert places[2:] == [(0, range(2, 3)), (1, range(1)), (1, range(1, 2))]
    _, axes = style.panels(5, 3, wide=True)
    assert axes[-1].get_subplotspec().colspan == range(1, 3)
    assert axes[-2].get_subplotspec().colspan == range(1)
    figure, axes = style.panels(1, 3, wide=True, width=2.0)
    assert len(axes) == 1
    assert figure.get_size_inches()[0] == 2.0


def test_a_wider_figure_keeps_its_text():
    figure, _ = style.figure()
    printing.fit(figure, 8.4)
    assert figure.get_size_inches() == pytest.approx([8.4, 6.8])


@pytest.mark.parametrize(
    ("looks", "error", "message"),
    [
        ({"formats": ("png", "pdv")}, ValueError, "formats: expected one of .*'pdf'; got 'pdv'"),
        ({"width": "triple"}, ValueError, "width: expected one of 'single', 'double'"),
        ({"style": "ggplo"}, ValueError, r"style: neither .* 'ggplo' \(nearest: 'ggplot'\)"),
        ({"style": "https://a.example/b.mplstyle"}, ValueError, "style: neither a file nor"),
        ({"style": {"font.sise": 3}}, ValueError, "style: .*font.sise"),
        ({"style": {"font.size": "x"}}, ValueError, "style: .*font.size"),
        ({"style": 3}, TypeError, "style: expected a name, a path or a mapping; got 3"),
    ],
)
def test_unknown_looks_are_refused(looks, error, message):
    with pytest.raises(error, match=message):
        Looks(**looks).checked()


@pytest.mark.slow
def test_a_figure_and_its_axes_show_themselves():
    shown = style.png(plot()["both"])
    assert plot()["both"]._repr_png_() == shown
    assert plot()["both"].axes[0]._repr_png_() == shown
