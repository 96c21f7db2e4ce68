"""Colour bars show clipping; texts of others are drawn literally."""

import numpy as np
import pytest
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from sail_jax.drawing import pages, style

VALUES = np.array([[0.0, 1.0], [2.0, np.nan]])


def _extend(values, **options):
    _, ((ax,),) = style.figure()
    return style.heatmap(ax, values, **options).colorbar.extend


@pytest.mark.parametrize(
    ("low", "high", "extend"),
    [(0, 2, "neither"), (0.5, 2, "min"), (0, 1.5, "max"), (0.5, 1.5, "both"), (1e-9, 2, "neither")],
)
def test_a_bar_is_pointed_where_values_lie_beyond_it(low, high, extend):
    assert _extend(VALUES, vmin=low, vmax=high) == extend


def test_a_bar_without_limits_leaves_out_nothing():
    assert _extend(VALUES) == "neither"
    assert _extend(VALUES[1:] + 1, norm=LogNorm(1, 2)) == "max"


def test_a_bar_shows_what_the_other_maps_that_it_stands_for_leave_out():
    assert _extend(VALUES, vmin=0, vmax=2, also=np.array([5.0])) == "max"


def _titled(text, **how):
    fig, ((ax,),) = style.figure(width=3, height=1)
    ax.set_title(text, fontsize=5, **how)
    return fig


NAMES = {
    r"a$\frac$": r"a$\frac$",  # no mathematics: it cannot be drawn as such
    r"$\sqrt{2}$ \$x\$ $": r"$\sqrt{2}$ \$x\$ $",
    r"_^\alpha%#&": r"_^\alpha%#&",
    "c\x1b[31m$$\n\u202e": r"c\x1b[31m$$\n\u202e",
    "d" * 9999: "d" * 29 + "..." + "d" * 28,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_what_others_wrote_is_drawn_as_it_is(name):
    plain = style.png(_titled(NAMES[name], parse_math=False))
    assert style.png(_titled(style.literal(name))) == plain


@pytest.mark.slow
def test_what_cannot_be_mathematics_is_drawn_as_it_is():
    figure, plain = _titled(r"a$\frac$"), _titled(r"a$\frac$", parse_math=False)
    assert style.png(figure) == style.png(plain)
    assert style.png(_titled("$x^2$")) != style.png(_titled("$x^2$", parse_math=False))


def test_a_figure_is_described_with_the_dollars_that_are_meant():
    title = f"$\\gamma$ of {style.literal('a$b')}"
    assert style.describe(_titled(title)) == r"\gamma of a$b"


def test_a_figure_of_a_thousand_rows_is_drawn_smaller(monkeypatch):
    monkeypatch.setattr(style, "SIDE", 100)
    monkeypatch.setattr(style, "AREA", 5000)
    for size in ((3, 300), (300, 3), (4, 4)):
        width, height = np.frombuffer(style.png(Figure(size))[16:24], ">u4")
        assert max(width, height) <= 100
        assert 1000 < width * height <= 5000 or max(width, height) == 100


def _themed():
    fig, ((plain, mapped),) = style.figure(1, 2, width=2, height=2)
    plain.set(title="black", xlabel="$x$")
    plain.plot([0, 1], color=style.INK)
    plain.errorbar([0], [0], [1], color=style.PALETTE[0])
    style.heatmap(mapped, VALUES)
    mapped.text(0, 0, "in a cell", color="black")
    mapped.plot([0, 1], color=style.INK)
    return fig


@pytest.mark.slow
def test_a_drawing_for_pages_follows_the_theme_but_for_what_lies_on_a_map():
    drawn = style.svg(_themed()).decode()
    assert drawn == style.svg(_themed()).decode()
    # the ink on the map; the black of its text is the default, which is not written
    assert drawn.count(style.INK) == 1 + 1
    assert drawn.lower().count(style.PALETTE[0].lower()) >= 1
    assert drawn.count("var(--ink)") > 10
    assert "var(--grid)" in drawn
    assert "#e4e4e3" not in drawn
    assert "#ffffff" not in drawn
    assert "prefers-color-scheme: dark" in drawn


def test_a_page_shows_what_others_wrote():
    """No markup, nothing that is hidden or turns a line, and always what can be written."""
    odd = "<b>\"'&$x$\x1b[31m\u202e\x00\ud800 日本"
    section = pages.Section(odd, odd, odd, [(odd, b"")], [[[odd]]], {odd: odd}, odd, odd)
    page = pages.page(odd, [section] * 4, {odd: odd}).encode().decode()
    shown = r"&lt;b&gt;&#34;&#39;&amp;$x$\x1b[31m\u202e\x00\ud800 日本"
    assert page.count(shown) > 20
    assert not [c for c in "\x1b\u202e\x00\ud800" if c in page]
    assert '<b>"' not in page
