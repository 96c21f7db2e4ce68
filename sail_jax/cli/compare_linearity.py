"""Shows the result of `sail-jax inspect A B --data FILE --linearity`: JSON, text and figure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sail_jax.drawing import style

FIGURE = "linearity.png"
FEW = 40  # rows of a table without --full

TITLES = {
    "interpolation": "f(a A + (1 - a) B) against a f(A) + (1 - a) f(B)",
    "average": "f(mean of all) against the mean of all f",
    "addition": "f(base + s (tA + tB)) against the mean of f(base + 2 s tA), f(base + 2 s tB)",
    "midpoint": "f(base) against the mean of f(base + s t) and f(base - s t)",
    "reflection": "f(base - s t) against 2 f(base) - f(base + s t)",
}
STITCHED = {
    "plain": "one model's features in another",
    "addition": "two models' mean features in the base",
    "addition, weights": "features of two models' mean in the base",
    "single": "one model's features in the base",
    "negation": "2 f(base) - f(base + s t) in the base",
    "negation, weights": "f(base - s t) in the base",
}


def described(found: Any) -> dict[str, Any]:
    """Describes the measurements as JSON data.

    Args:
      found: A `LayerwiseLinearity` of checkpoints.

    Returns:
      The record. "identities" has a row for each identity, set of models, point and layer.
      "averaging" has a row for each set. "stitching" has a row for each network and layer. "stderr"
      is the standard error over examples.
    """
    rows = []
    for it in found.identities:
        for (i, layer), (j, point) in _grid(it.found.layers, it.points):
            row: dict[str, Any] = {
                "identity": it.name, "models": list(it.models), "point": point, "layer": layer,
            }  # fmt: skip
            for name, estimate in (
                ("cosine", it.found.cosine),
                ("coefficient", it.found.coefficient),
                ("baseline", it.baseline),
            ):
                row[name] = float(estimate.value[i, j])
                row[f"{name} stderr"] = float(estimate.stderr[i, j])
            rows.append(row | {"gap": float(it.found.gap[i, j])})
    record: dict[str, Any] = {
        "layers": list(found.identities[0].found.layers), "identities": rows,
    }  # fmt: skip
    if found.averaging is None:
        return record
    sets = []
    for k, which in enumerate(found.sets):
        row = {"models": list(which)}
        for name in ("average", "ensemble", "agreement"):
            estimate = getattr(found.averaging, name)
            row |= {name: float(estimate.value[k]), f"{name} stderr": float(estimate.stderr[k])}
        sets.append(row)
    members = found.averaging.members
    return record | {
        "metric": found.metric,
        "members": [
            {"value": float(v), "stderr": float(e)}
            for v, e in zip(members.value, members.stderr, strict=True)
        ],
        "averaging": sets,
        "correlation": _correlation(sets),
        "stitching": [
            {
                "stitched": it.name, "models": list(it.models), "scale": it.scale, "layer": layer,
                "value": float(it.metric.value[i]), "stderr": float(it.metric.stderr[i]),
                "upper": float(it.upper.value), "upper stderr": float(it.upper.stderr),
            }
            for it in found.stitched
            for i, layer in enumerate(it.layers)
        ],
    }  # fmt: skip


def _grid(a: Sequence[Any], b: Sequence[Any]) -> Iterable[tuple[tuple[int, Any], tuple[int, Any]]]:
    return ((x, y) for y in enumerate(b) for x in enumerate(a))


def _correlation(sets: Sequence[Mapping[str, Any]]) -> float | None:
    """Correlates averages and ensembles over the sets of three (Pearson; Figure 4)."""
    threes = [row for row in sets if len(row["models"]) == 3]
    x, y = ([row[name] for row in threes] for name in ("average", "ensemble"))
    if len(threes) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def _middle(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Selects the tables to show: interpolation at its midpoint, the others at every point."""
    kinds = list(dict.fromkeys((row["identity"], row["point"]) for row in rows))
    alphas = [point for name, point in kinds if name == "interpolation"]
    nearest = min(alphas, key=lambda a: abs(a - 0.5))
    return [kind for kind in kinds if kind[0] != "interpolation" or kind[1] == nearest]


def _by_layer(
    record: Mapping[str, Any], name: str, point: float
) -> tuple[int, dict[str, np.ndarray]]:
    """Counts the pairs or models, and averages each layer's measurements over them.

    All of them use the same examples, so their standard errors are averaged, too.
    """
    rows = [r for r in record["identities"] if (r["identity"], r["point"]) == (name, point)]
    count = len(rows) // len(record["layers"])
    keys = [k for k in rows[0] if isinstance(rows[0][k], float) and k != "point"]
    # The layers of one pair follow one another.
    means = {k: np.reshape([r[k] for r in rows], (count, -1)).mean(0) for k in keys}
    return count, means


def render(record: Mapping[str, Any], letters: list[str], full: bool = False) -> list[str]:
    """Formats a record as text.

    Args:
      record: The output of `described`.
      letters: The label of each model.
      full: Whether to show all rows.

    Returns:
      Lines: a table for each identity, one of averages and one of stitched networks.
    """
    from sail_jax.basis.spaces import table

    lines = ["linearity in the weights, by layer (± standard errors over examples):"]
    most = None if full else FEW
    kinds = _middle(record["identities"])
    first = dict(reversed(kinds))
    for name, point in kinds if full else reversed(first.items()):
        count, of = _by_layer(record, name, point)
        at = {"interpolation": f", a = {point:g}", "average": ""}.get(name, f", s = {point:g}")
        many = f", mean of {count}" if count > 1 else ""
        lines += ["", f"{name}: {TITLES[name]}{at}{many}"]
        rows = [("layer", "1 - cosine", "between the models", "coefficient", "gap")]
        rows += [
            (
                layer,
                _pm(1 - of["cosine"][i], of["cosine stderr"][i]),
                _pm(1 - of["baseline"][i], of["baseline stderr"][i]),
                _pm(of["coefficient"][i], of["coefficient stderr"][i]),
                f"{of['gap'][i]:.2%}",
            )
            for i, layer in enumerate(record["layers"])
        ]
        lines.append(table(rows[:1] + rows[1:][:most]))
        lines += _more(len(rows) - 1, most)
    if not full and len(kinds) > len(first):
        lines += ["", "--full shows the other scales"]
    if "metric" not in record:
        return [*lines, "", "no labels, so averages, ensembles and stitching are not compared"]
    alone = zip(letters, record["members"], strict=True)
    lines += ["", f"{record['metric']} of averaged weights against averaged logits"]
    lines.append("alone: " + ", ".join(f"{n} {_pm(x['value'], x['stderr'])}" for n, x in alone))
    rows = [("models", "average", "ensemble", "same class")]
    rows += [
        ("-".join(letters[i] for i in row["models"]), *(_pm(row[k], row[f"{k} stderr"]) for k in
         ("average", "ensemble", "agreement")))
        for row in record["averaging"]
    ]  # fmt: skip
    lines.append(table(rows[:1] + rows[1:][:most]))
    lines += _more(len(rows) - 1, most)
    if record["correlation"] is not None:
        lines.append(f"correlation over the sets of three: {record['correlation']:.3f}")
    layers = list(dict.fromkeys(row["layer"] for row in record["stitching"]))
    lines += ["", f"{record['metric']} of lower features in upper layers, up to layer"]
    rows = [("", "models", "s", *layers, "upper alone")]
    stitched = record["stitching"]
    for start in range(0, len(stitched), len(layers)):
        row, some = stitched[start], stitched[start : start + len(layers)]
        which = (" in " if row["stitched"] == "plain" else "-").join(
            letters[i] for i in row["models"]
        )
        scale = "" if row["scale"] is None else f"{row['scale']:g}"
        values = (_pm(r["value"], r["stderr"]) for r in some)
        upper = _pm(row["upper"], row["upper stderr"])
        rows.append((STITCHED[row["stitched"]], which, scale, *values, upper))
    lines.append(table(rows[:1] + rows[1:][:most]))
    return lines + _more(len(rows) - 1, most)


def _more(rows: int, most: int | None) -> list[str]:
    return [f"and {rows - most} more: --full"] if most is not None and rows > most else []


def _pm(value: float, error: float) -> str:
    """Formats a number with its standard error, to two digits of the error.

    >>> _pm(0.98765, 0.0123), _pm(1.0000023, 0.0000071), _pm(0.0000123, 0.0000045)
    ('0.988 ± 0.012', '1.0000023 ± 7.1e-06', '1.2e-05 ± 4.5e-06')
    """
    if not error:
        return f"{value:.4g} ± 0"
    digits = 1 - math.floor(math.log10(error))
    if digits > 5:
        return f"{value:.{digits}f} ± {error:.2g}" if value > 0.5 else f"{value:.2g} ± {error:.2g}"
    return f"{value:.{max(0, digits)}f} ± {error:.{max(0, digits)}f}"


def draw(record: Mapping[str, Any]) -> Figure:
    """Draws cosines and coefficients by layer, and the accuracy of averages and stitched networks.

    Args:
      record: What `described` returns.

    Returns:
      The figure. It has a column for each identity and, with labels, one for averages and stitched
      networks.
    """
    first = dict(reversed(_middle(record["identities"])))  # the first of several scales
    kinds = list(reversed(first.items()))
    scored = "metric" in record
    fig, axes = style.figure(2, len(kinds) + scored, width=3.3, height=2.7)
    x = np.arange(1, len(record["layers"]) + 1)
    for (name, point), (top, low) in zip(kinds, axes.T, strict=False):
        _, of = _by_layer(record, name, point)
        look: dict[str, Any] = {"capsize": 2, "ms": 3.5, "lw": 1.2}
        for key, label, color, ls in (
            ("cosine", "both sides", style.PALETTE[1], "-o"),
            ("baseline", "the models", style.INK, "--D"),
        ):
            # Rounding alone gives about 1e-7, and a log axis cannot show 0.
            y = np.maximum(1 - of[key], 1e-8)
            top.errorbar(x, y, of[f"{key} stderr"], fmt=ls, color=color, label=label, **look)
        top.set_yscale("log")
        sign = {"interpolation": "a", "average": ""}.get(name, "s")
        top.set_title(f"{name}, {sign} = {point:g}" if sign else f"{name} of all")
        low.axhline(1, color=style.FAINT, lw=1, ls="--")
        y, error = of["coefficient"], of["coefficient stderr"]
        low.errorbar(x, y, error, fmt="-o", color=style.PALETTE[0], **look)
        for ax in (top, low):
            ax.set_xlim(0.5, len(x) + 0.5)
            step = max(1, -(-len(x) // 8))
            ax.set_xticks(x[::step], [str(k) for k in x[::step]])
        low.ticklabel_format(axis="y", useOffset=False)
        low.set_xlabel("layer (the last: outputs)")
    axes[0, 0].set_ylabel("1 - cosine (± s.e.)")
    axes[1, 0].set_ylabel("coefficient (± s.e.)")
    handles = list(axes[0, 0].get_legend_handles_labels())
    if scored:
        more = _scored(record, *axes[:, -1])
        handles = [a + b for a, b in zip(handles, more, strict=True)]
    fig.legend(
        *handles, loc="outside lower center", ncols=4, frameon=False, fontsize=style.points(8)
    )
    return fig


def _scored(record: Mapping[str, Any], top: Axes, low: Axes) -> tuple[list[Any], list[str]]:
    """Draws averages against ensembles, and stitched networks by layer."""
    sets, metric = record["averaging"], record["metric"]
    x, y = (np.array([row[k] for row in sets]) for k in ("average", "ensemble"))
    errors = [[row[f"{k} stderr"] for row in sets] for k in ("average", "ensemble")]
    top.errorbar(
        x, y, errors[1], errors[0], fmt="o", ms=3.5, lw=0.8, capsize=1.5, color=style.PALETTE[2]
    )
    ends = np.array([min(x.min(), y.min()), max(x.max(), y.max())])
    top.plot(ends, ends, color=style.FAINT, lw=1, ls="--")
    top.set_xlabel(f"{metric}, averaged weights")
    top.set_ylabel(f"{metric}, ensemble")
    top.set_title("sets of models")
    layers = list(dict.fromkeys(row["layer"] for row in record["stitching"]))
    scales = list(dict.fromkeys(r["scale"] for r in record["stitching"] if r["scale"]))
    for k, name in enumerate(STITCHED):
        rows = [r for r in record["stitching"] if r["stitched"] == name]
        if not rows or (len(scales) > 1 and name == "plain"):
            continue
        look = {"fmt": f"-{'oDs^vP'[k]}", "color": style.PALETTE[k], "capsize": 2, "ms": 3.5}
        # The axis is the layer or, with several scales, the scale at the last layer (Figure 10).
        key, along = ("scale", scales) if len(scales) > 1 else ("layer", layers)
        rows = [r for r in rows if key == "layer" or r["layer"] == layers[-1]]
        means = np.array(
            [
                [np.mean([r[q] for r in rows if r[key] == v]) for q in ("value", "stderr")]
                for v in along
            ]
        )
        x = scales if key == "scale" else [record["layers"].index(layer) + 1 for layer in layers]
        apart = 0.012 * (k - 2.5) * (max(x) - min(x) or 1)
        low.errorbar(np.array(x) + apart, *means.T, label=STITCHED[name], lw=1.2, **look)
    if len(scales) > 1:
        low.set_xlabel("scale s of task vectors")
        low.set_title(f"stitched after {style.literal(layers[-1])}")
    else:
        low.set_xticks([record["layers"].index(layer) + 1 for layer in layers])
        low.set_xlabel("stitched after layer")
        low.set_title(f"stitched, s = {scales[0]:g}" if scales else "stitched")
    low.set_ylabel(f"{metric} (± s.e.)")
    return low.get_legend_handles_labels()
