"""Draws the figure of `sail-jax inspect A B`, which shows where models conflict, layer by layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from sail_jax.drawing import style


def draw(groups: Sequence[Mapping[str, Any]], models: int) -> Figure:
    """Draws heat maps of similarity and conflict, with layers as columns and modules as rows.

    The first map shows the mean cosine between the models or, with a base, between their task
    vectors. With a base, a second map shows how often the signs of the task vectors conflict.

    Args:
      groups: The groups of a record of `sail_jax.cli.compare`, one for each module of each layer.
      models: The number of models. The expected conflict of unrelated signs depends on it.

    Returns:
      The figure.
    """
    kinds = [k for k in ("cosine", "sign conflict") if any(k in group for group in groups)]
    layers = list(dict.fromkeys(group["layer"] for group in groups))
    modules = list(dict.fromkeys(group["module"] for group in groups))
    names = list(map(style.literal, modules))
    at = {(group["module"], group["layer"]): group for group in groups}
    width = 2.9 + 0.28 * len(layers) + 0.06 * max(map(len, names))
    fig, axes = style.figure(1, len(kinds), width=width, height=1.5 + 0.24 * len(modules))
    for ax, kind in zip(axes[0], kinds, strict=True):
        values = np.array(
            [[at.get((m, n), {}).get(kind, np.nan) for n in layers] for m in modules], float
        )
        scale: dict[str, Any] = (
            {"cmap": style.DIVERGING, "vmin": -1, "vmax": 1}
            if kind == "cosine"
            else {"vmin": 0, "vmax": 1}
        )
        style.heatmap(ax, values, **scale)
        ax.set_facecolor(style.NOTHING)  # unlike 0, which is nearly white
        few = range(0, len(layers), max(1, len(layers) // 16))
        ax.set_xticks(list(few), [style.literal(layers[i] or "-", 20) for i in few])
        ax.set_xlabel("layer (-: outside the layers)")
        ax.set_yticks(range(len(modules)), names if ax is axes[0, 0] else [])
        ax.tick_params(axis="y", labelsize=style.points(8))
        ax.invert_yaxis()
    what = "changes" if len(kinds) > 1 else "weights"
    axes[0, 0].set_title(f"cosine of {what} (unrelated: 0)", loc="left")
    if len(kinds) > 1:
        chance = 1 - 2.0 ** (1 - models)
        axes[0, 1].set_title(f"sign conflict (unrelated: {chance:.3g})", loc="left")
    return fig
