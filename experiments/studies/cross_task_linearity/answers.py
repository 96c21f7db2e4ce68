"""Statistics of a finished run of `cross_task_linearity`, and its summary in sentences.

`findings` judges the paper's claims with these statistics, and `plots` draws them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

if TYPE_CHECKING:
    import xarray as xr

PREDICTORS = (
    "main_term",
    "distance",
    "norm",
    "norm_on_segment",
    "along_at_base",
    "along_in_middle",
)
DRAWS = 2000  # samples of the bootstrap
PUBLISHED = {"main_term": 0.903, "distance": 0.839, "norm": 0.782}  # R^2 of App. B.2
FACTORS = tuple(PUBLISHED)  # in the order of `theory.linearity.RSquared`


def r_squared(
    found: Mapping[str, Float[np.ndarray, "checkpoint pair"]], seed: int
) -> dict[str, tuple[tuple[str, ...], Any]]:
    """Regresses the gap of the loss on each predictor and bootstraps the R^2.

    The bootstrap resamples checkpoints, not pairs, because all pairs of a checkpoint use the same
    Hessian.

    - `found`: the arrays of `parts.theorem`: "gap" and all of `PREDICTORS`, each
      `(checkpoint, pair)`. One axis has the checkpoints of all repetitions.
    - `seed`: seed of the bootstrap, >= 0.

    It returns variables of the dataset, as (names of dimensions, values):
    - along "predictor": `r_squared`; its 95 % percentile interval, `r_squared_low` to
      `r_squared_high`; and the interval of the main term's R^2 minus this one, `ahead_low` to
      `ahead_high`.
    - along "factor": `independent`, the R^2 that each of `FACTORS` would have if curvature,
      distance and direction were independent.

    References:
      Zhou et al., Cross-Task Linearity, 2024 (arXiv 2402.03660), Appendix B.2.
    """
    from theory.linearity import correlation

    x = np.stack([found[name] for name in PREDICTORS])
    y = found["gap"]
    n = y.shape[0]
    drawn = np.random.default_rng(seed).integers(n, size=(DRAWS, n))

    def fit(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        x, y = (v.reshape(*v.shape[:-2], -1) for v in (x, y))
        return np.asarray(correlation.regression(jnp.asarray(x), jnp.asarray(y)), float)

    # Draws: [predictor, draw].
    value, draws = fit(x, y), fit(x[:, drawn], y[drawn])
    low, high = np.nanquantile(draws, (0.025, 0.975), axis=1)
    less = np.nanquantile(draws[0] - draws, (0.025, 0.975), axis=1)
    # gap = curvature x distance x direction, up to a constant, which does not change cv2.
    direction = y / found["main_term"]
    cv2 = [float(np.var(v) / np.mean(v) ** 2) for v in (found["norm"], x[1], direction)]
    independent = correlation.r_squared(*cv2)
    return {
        "predictor": (("predictor",), list(PREDICTORS)),
        "r_squared": (("predictor",), value),
        "r_squared_low": (("predictor",), low),
        "r_squared_high": (("predictor",), high),
        "ahead_low": (("predictor",), less[0]),
        "ahead_high": (("predictor",), less[1]),
        "factor": (("factor",), list(FACTORS)),
        "independent": (("factor",), [float(v) for v in independent]),
    }


def per_replicate(values: "xr.DataArray") -> "xr.DataArray":
    """Averages a variable over its pairs and tasks."""
    return values.mean([d for d in ("pair", "split_pair", "task") if d in values.dims])


def mean_error(values: "xr.DataArray") -> tuple[np.ndarray, np.ndarray]:
    """Computes the mean over repetitions and its standard error.

    Pairs and tasks are averaged first, because they are not independent within a repetition.
    """
    values = per_replicate(values)
    n = values.sizes["replicate"]
    return values.mean("replicate").values, values.std("replicate", ddof=1).values / n**0.5


def pm(values: "xr.DataArray", digits: int = 2) -> str:
    """Formats the mean over repetitions, pairs and tasks with its standard error."""
    mean, error = (float(x) for x in mean_error(values))
    return f"{mean:.{digits}g} ± {error:.1g}"


def summary(dataset: "xr.Dataset") -> str:
    """Describes the measurements of each part of a run, in one or more sentences.

    It returns text of several lines: a line on the numbers, then lines for each part of the run.
    """
    parts = dataset.attrs["parts"].split()
    # The function with a part's name describes it.
    lines = [line for part in parts for line in globals()[f"_{part}"](dataset)]
    head = f"Means ± standard errors over {dataset.sizes['replicate']} repetitions."
    return "\n".join([head, *lines])


def _ctl(dataset: "xr.Dataset", name: str, layer: str) -> str:
    """Describes the linearity of a network half way between two models.

    The text has 1 - cosine at the output and in the worst layer, each compared with its value
    between the two models, then the coefficient and the relative gap.
    """
    half = dataset.sel(alpha=0.5)
    turn, base = half[f"{name}_turn"], half[f"{name}_baseline"]
    out, worst = {layer: "output"}, worst_ratio(dataset, name, layer)
    return (
        f"1 - cosine {pm(turn.sel(out))} at the output, {pm(base.sel(out))} between the "
        f"models ({pm(worst)} of it in the worst layer, {worst[layer].item()}); "
        f"coefficient {pm(half[f'{name}_coefficient'].sel(out), 3)} at the output, "
        f"{pm(half[f'{name}_coefficient'].isel({layer: -2}), 3)} in the last layer before; "
        f"relative gap {pm(half[f'{name}_gap'].sel(out))} at the output"
    )


def worst_ratio(dataset: "xr.Dataset", name: str, layer: str) -> "xr.DataArray":
    """Computes 1 - cosine divided by its value between the two models, in the worst layer.

    Both are measured half way between the models and averaged over pairs before the division. The
    worst layer has the largest mean ratio over repetitions.

    It returns the ratio of each repetition, with the coordinate `layer`. A ratio below 1 means that
    features of interpolated weights are closer to interpolated features than the two models'
    features are to each other.
    """
    half = dataset.sel(alpha=0.5)
    ratio = per_replicate(half[f"{name}_turn"]) / per_replicate(half[f"{name}_baseline"])
    return ratio.isel({layer: int(ratio.mean("replicate").values.argmax())})


def _rotated(dataset: "xr.Dataset") -> list[str]:
    """Describes linearity and mode connectivity of the MLPs fine-tuned on rotated images."""
    own, other = dataset["rotated_own_loss"], dataset["rotated_other_loss"]
    return [
        f"CTL, rotated images, MLP, middle of the line: {_ctl(dataset, 'rotated', 'layer')}.",
        (
            f"On a task the loss is {pm(own)} for its own model and {pm(other)} for another. The "
            f"barrier above the straight line between them is {pm(dataset['rotated_barrier'])} "
            "nats."
        ),
    ]


def _split_classes(dataset: "xr.Dataset") -> list[str]:
    """Describes the linearity of the ResNets fine-tuned on different classes."""
    how = {
        "interpolated": "running statistics interpolated",
        "batch": "statistics of the probed images",
    }
    return [
        f"CTL, split classes, ResNet, {words}: {_ctl(dataset, f'split_{name}', 'block')}."
        for name, words in how.items()
    ]


def _scratch(dataset: "xr.Dataset") -> list[str]:
    """Describes pairs of models without a common base, unaligned and aligned, and pairs with
    one."""
    lines = []
    for setting in dataset["setting"].values.astype(str):
        at = dataset.sel(setting=setting)
        out = at["scratch_gap"].sel(layer="output")
        drop = at["scratch_ends"] - at["scratch_middle"]
        told = "; ".join(
            f"{way}: gap {pm(out.sel(way=way))}, coefficient "
            f"{pm(at['scratch_coefficient'].sel(layer='output', way=way))}, barrier "
            f"{pm(at['scratch_barrier'].sel(way=way))} nats, accuracy lost "
            f"{pm(drop.sel(way=way))}"
            for way in at["way"].values.astype(str)
        )
        lines.append(f"Without pre-training, {setting}, middle of the line, output: {told}.")
    return lines


def _random_labels(dataset: "xr.Dataset") -> list[str]:
    """Describes the gaps of networks pre-trained on true labels, on random ones or not at all."""
    lines = []
    for name, words in (
        ("mlp_interpolated", "MLP"),
        ("resnet_interpolated", "ResNet, running statistics interpolated"),
        ("resnet_batch", "ResNet, statistics of the probed images"),
    ):
        layer = "layer" if name.startswith("mlp") else "block"
        gap = dataset[f"random_{name}_gap"].sel({layer: "output"})
        learned = dataset[f"random_{name.split('_')[0]}_learned"]
        told = []
        for target in gap["target"].values.astype(str):
            out = gap.sel(target=target)
            by_labels = ", ".join(f"{k} {pm(out.sel(labels=k))}" for k in out["labels"].values)
            told.append(f"fine-tuned on {target} {by_labels}")
        lines.append(
            f"Random labels, {words} (accuracy on the labels of pre-training: true "
            f"{pm(learned.sel(learned='true'))}, random {pm(learned.sel(learned='random'))}), "
            f"relative gap at the output by labels of pre-training: {'; '.join(told)}."
        )
    return lines


def average_lead(dataset: "xr.Dataset") -> "xr.DataArray":
    """Computes the accuracy of the average of all models minus their mean accuracy."""
    all_of_them = dataset["size"].values == dataset["size"].values.max()
    average = dataset["averaging_average"].isel(subset=all_of_them).mean("subset")
    return average - dataset["averaging_members"].mean("member")


def _averaging(dataset: "xr.Dataset") -> list[str]:
    """Describes how averaged weights compare with averaged logits, in three sentences."""
    average, ensemble = dataset["averaging_average"], dataset["averaging_ensemble"]
    three = dataset["size"].values == 3
    a, e = (v.values[:, three] for v in (average, ensemble))
    # A correlation is undefined without variance.
    varies = (a.std(1) > 0) & (e.std(1) > 0)
    r = [np.corrcoef(x, y)[0, 1] for x, y in zip(a[varies], e[varies], strict=True)]
    if len(r) > 1:
        r_error = np.std(r, ddof=1) / len(r) ** 0.5
        linked = f"their correlation over sets of three is {np.mean(r):.2f} ± {r_error:.1g}"
    else:
        linked = "their accuracies do not vary over sets of three"
    all_of_them = dataset["size"].values == dataset["size"].values.max()
    lead = average_lead(dataset)
    output = dataset["averaging_gap"].sel(layer="output")
    two = output.isel(subset=dataset["size"].values == 2).mean("subset")
    k = int(dataset["size"].max())
    full = output.isel(subset=all_of_them).mean("subset")
    line = dataset["line_average"] - dataset["line_ensemble"]
    chord = dataset["line_average"] - dataset["line_chord"]
    error = (line**2).mean(["pair", "weight"]) ** 0.5
    agree = dataset["averaging_agreement"].mean("subset")
    return [
        (
            f"Averaged weights and averaged logits, one task: accuracies differ by "
            f"{pm((average - ensemble).mean('subset'))}, classes agree for {pm(agree, 3)} of the "
            f"images, and {linked}. Averaging all {k} models exceeds their mean by {pm(lead)}."
        ),
        (
            f"From 2 to {k} models the relative gap at the output grows by the factor "
            f"{pm(full / two)}. For a quadratic function with equal gaps of pairs it grows by "
            f"2 (k - 1) / k = {2 * (k - 1) / k:.2f}."
        ),
        (
            "Along the line between models of two tasks, interpolated logits predict the accuracy "
            f"of interpolated weights with an r.m.s. error of {pm(error)}, interpolated accuracies "
            f"with {pm((chord**2).mean(['pair', 'weight']) ** 0.5)}."
        ),
    ]


def middle_scale(dataset: "xr.Dataset") -> float:
    """Finds the scale of task vectors that is closest to the paper's 0.4."""
    return float(dataset["scale"].values[np.abs(dataset["scale"].values - 0.4).argmin()])


def _arithmetic(dataset: "xr.Dataset") -> list[str]:
    """Describes how close both sides of equations 2 to 4 are, and the order of their gap."""
    scale, lines = middle_scale(dataset), []
    for name, words in (
        ("addition", "Equation 2, addition"),
        ("midpoint", "Equation 3, negation as a midpoint"),
        ("reflection", "Equation 4, negation as a reflection"),
    ):
        at = dataset.sel(scale=scale, layer="output")
        turn, base = at[f"{name}_turn"], at[f"{name}_baseline"]
        gap = dataset[f"{name}_gap"].sel(layer="output")
        ends = gap.mean([d for d in ("pair", "task") if d in gap.dims])
        first, last = dataset["scale"].values[[0, -1]]
        # The exponent between the smallest and the largest scale.
        order = np.log(ends.sel(scale=last) / ends.sel(scale=first)) / np.log(last / first)
        lines.append(
            f"{words}, scale {scale:g}, output: 1 - cosine {pm(turn)}, {pm(base)} between "
            "the models, coefficient "
            f"{pm(at[f'{name}_coefficient'], 3)}, relative gap {pm(at[f'{name}_gap'])}, which "
            f"grows as the scale to the power {pm(order)} (a second-order gap has power 2)."
        )
    return lines


def stitched(dataset: "xr.Dataset") -> "xr.Dataset":
    """Selects the part "stitching" after the middle layer and at the largest scale."""
    middle = dataset["hidden"].values[(dataset.sizes["hidden"] - 1) // 2]
    return dataset.sel(hidden=middle).isel(stitch_scale=-1)


def _stitching(dataset: "xr.Dataset") -> list[str]:
    """Describes the accuracies of stitched, added and subtracted features."""
    middle = str(stitched(dataset)["hidden"].item())
    at = stitched(dataset)
    s = float(at["stitch_scale"])
    plain, added = at["stitched_stitched"], at["stitched_addition_features"]
    task, upright = (at[f"stitched_negation_features_{x}"] for x in ("task", "upright"))
    gap = abs(added - at["stitched_addition_weights"])
    apart = abs(task - at["stitched_negation_weights_task"])
    return [
        (
            f"Stitching after {middle}: features of one model in the upper layers of another have "
            f"an accuracy of {pm(plain)} on the first's task. The first model alone has "
            f"{pm(at['stitched_own'])}, the other {pm(at['stitched_upper'])}."
        ),
        (
            f"Added features in the base (scale {s:g}) have {pm(added)} on both tasks, added "
            f"weights {pm(at['stitched_addition_weights'])} (difference {pm(gap)}), one model's "
            f"features {pm(at['stitched_addition_single'])}."
        ),
        (
            f"Subtracting the change by fine-tuning from features leaves {pm(task)} on the task "
            "and "
            f"{pm(upright)} on the pre-training task (subtracting weights: "
            f"{pm(at['stitched_negation_weights_task'])} and "
            f"{pm(at['stitched_negation_weights_upright'])}, difference {pm(apart)}). The base has "
            f"{pm(at['stitched_base_task'])} and {pm(at['stitched_base_upright'])}."
        ),
    ]


def _theorem(dataset: "xr.Dataset") -> list[str]:
    """Describes how well Theorem 1's main term and other predictors explain the gap of the loss."""

    def told(name: str) -> str:
        at = dataset.sel(predictor=name)
        value, low, high = (float(at[f"r_squared{end}"]) for end in ("", "_low", "_high"))
        return f"{value:.2f} [{low:.2f}, {high:.2f}]"

    independent = ", ".join(f"{float(v):.2f}" for v in dataset["independent"])
    above, segment = (
        float((dataset["theorem_gap"] > dataset[f"theorem_{x}"]).mean())
        for x in ("main_term", "norm_on_segment")
    )
    looser = float((dataset["theorem_main_term"] / dataset["theorem_gap"]).median())
    return [
        (
            f"Theorem 1 on the loss, {dataset['theorem_gap'].size} pairs, R^2 with 95 % intervals: "
            f"main term {told('main_term')}, squared distance {told('distance')}, norm of the "
            f"Hessian {told('norm')} (published: .90, .84, .78; with independent factors: "
            f"{independent})."
        ),
        (
            f"With the largest norm of three on the segment {told('norm_on_segment')}; along the "
            f"line itself, at the checkpoint {told('along_at_base')}, in the middle "
            f"{told('along_in_middle')}. The main term is {looser:.2g} times the gap (median). "
            "It is "
            f"below the gap in {above:.0%} of pairs, and with the largest norm in {segment:.0%}."
        ),
    ]
