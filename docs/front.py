"""Draws the pictures of the start page: `python docs/front.py`.

`phase.svg` is what the code on that page draws. `slices.svg` compares the same closed form with
least squares on random data.
"""

from pathlib import Path

import jax
import matplotlib as mpl
import numpy as np

from sail_jax.drawing import style
from theory import deep_linear

HERE = Path(__file__).parent
DIMENSION, DRAWS, NOISE = 200, 50, 0.2
ANGLES = {"π/8": np.pi / 8, "π/4": np.pi / 4, "3π/8": 3 * np.pi / 8}


def phase() -> mpl.figure.Figure:
    """Draws the diagram of linear transfer in the limit of many dimensions."""
    return deep_linear.phase_diagram("linear", sigma=NOISE).figure


def slices() -> mpl.figure.Figure:
    """Draws the gain by the load at three angles, in closed form and on random data."""
    figure, ((ax,),) = style.figure()
    fine = np.setdiff1d(np.arange(3, 2 * DIMENSION + 1), DIMENSION + np.arange(-1, 2))
    sizes = np.setdiff1d(np.arange(10, 2 * DIMENSION, 20), [DIMENSION])
    draws = deep_linear.simulate_overlaps(
        jax.random.split(jax.random.key(0), DRAWS), sizes.tolist(), DIMENSION
    )
    for (name, angle), colour in zip(ANGLES.items(), style.PALETTE, strict=False):
        exact = deep_linear.transferability("linear", n=fine, d=DIMENSION, theta=angle, sigma=NOISE)
        gains = np.asarray(draws.scratch(angle, NOISE) - draws.linear_transfer(angle, NOISE))
        error = gains.std(0, ddof=1) / DRAWS**0.5
        ax.plot(fine / DIMENSION, exact, color=colour, label=f"angle {name}")
        ax.errorbar(sizes / DIMENSION, gains.mean(0), error, fmt="o", ms=3.5, color=colour)
    ax.axhline(0, color=style.INK, lw=0.8)
    ax.set(xlabel="load $n/d$", ylabel="transferability $T$", ylim=(-1, 1.5))
    ax.set_title(f"lines: closed form; dots: {DRAWS} data sets, $d$ = {DIMENSION}")
    ax.legend(frameon=False, fontsize=9)
    return figure


def main() -> None:
    """Writes both pictures."""
    with mpl.rc_context({"svg.hashsalt": "front", "svg.fonttype": "none"}):
        for draw in (phase, slices):
            draw().savefig(HERE / f"{draw.__name__}.svg", metadata={"Date": None}, dpi=style.DPI)


if __name__ == "__main__":
    main()
