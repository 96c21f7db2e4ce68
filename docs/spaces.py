"""Draws a forward pass, the labels of its axes, and a permutation that runs through it."""

import io

import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from sail_jax import change_basis, growth, spec_of

ORDER = (2, 4, 0, 5, 1, 3)
# One colour for each hidden unit, from Okabe and Ito's palette for colour blindness.
UNITS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
INK = "#1d2430"


def net(p, x):
    """A small network. Its spaces are inferred below."""
    return jnp.maximum(x @ p["in"] + p["bias"], 0) @ p["out"]


def picture() -> str:
    """Draws the picture of the page on the three ideas.

    Returns:
      The picture as SVG, the same at every call.
    """
    rng = np.random.default_rng(3)
    shapes = {"in": (4, 6), "bias": (6,), "out": (6, 3)}
    params = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}
    x = jnp.asarray(rng.normal(size=(1, 4)), jnp.float32)
    found = spec_of(net, params, x, names={"bias": "hidden"})
    moved = change_basis(params, found.spec, {"hidden": growth.permute(jnp.array(ORDER))})
    with mpl.rc_context({"svg.hashsalt": "spaces", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9.2, 4.6))
        for row, (p, units, title) in enumerate(
            (
                (params, range(6), "original order"),
                (moved, ORDER, "hidden units in another order"),
            )
        ):
            _row(figure, row, p, x, [UNITS[u] for u in units], title, found.rules)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _row(figure, row, p, x, colors, title, rules) -> None:
    """The arrays of one forward pass from left to right, hidden units in their colours."""
    hidden = jnp.maximum(x @ p["in"] + p["bias"], 0)
    parts = (
        ("x", x.T, None, None, "inputs"),
        ("in", p["in"], None, colors, f'"{rules["in"]}"'),
        ("bias", p["bias"][None], None, colors, f'"{rules["bias"]}"'),
        ("relu", hidden, None, colors, "activations"),
        ("out", p["out"], colors, None, f'"{rules["out"]}"'),
        ("y", net(p, x), None, None, "outputs: equal"),
    )
    top, left, unit = 0.94 - 0.49 * row, 0.03, 0.022
    figure.text(left, top, title, size=11, weight="bold", color=INK)
    for name, values, of_rows, of_columns, label in parts:
        rows, columns = values.shape
        width, height = unit * columns, 2 * unit * rows
        ax = figure.add_axes((left + 0.012, top - 0.23 - height / 2, width, height))
        ax.imshow(np.asarray(values), cmap="Greys", vmin=-2, vmax=2, aspect="auto")
        ax.set(xticks=[], yticks=[], xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
        options = {"clip_on": False, "linewidth": 0}
        for k, color in enumerate(of_columns or ()):
            ax.add_patch(Rectangle((k - 0.5, -1.3), 1, 0.6, color=color, **options))
        for k, color in enumerate(of_rows or ()):
            ax.add_patch(Rectangle((-1.3, k - 0.5), 0.6, 1, color=color, **options))
        center = left + 0.012 + width / 2
        figure.text(center, top - 0.07, name, ha="center", size=10, color=INK)
        figure.text(center, top - 0.42, label, ha="center", size=9, color=INK, family="monospace")
        left += width + 0.062
