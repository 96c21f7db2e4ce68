"""Verdicts on the paper's claims about cross-task linearity, from the stored dataset alone."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from experiments.lab.findings import Finding, judged
from experiments.studies.cross_task_linearity.answers import (
    PUBLISHED,
    average_lead,
    middle_scale,
    per_replicate,
    pm,
    stitched,
    worst_ratio,
)
from experiments.studies.cross_task_linearity.answers import summary as summary

if TYPE_CHECKING:
    import xarray as xr

PAPER = "cross-task linearity"
NETWORKS = {
    "mlp_interpolated": "an MLP",
    "resnet_interpolated": "a ResNet with running statistics interpolated",
    "resnet_batch": "a ResNet with statistics of the probed images",
}


def findings(dataset: "xr.Dataset") -> list[Finding]:
    """Judges each claim of the paper that the parts of a run test.

    It returns the findings, part by part in the order of the run. Verdicts are not yet corrected
    for their number.
    """
    parts = dataset.attrs["parts"].split()
    # The function with a part's name judges it.
    return [finding for part in parts for finding in globals()[f"_{part}"](dataset)]


def _larger(
    where: str, claim: str, paper: str, more: "xr.DataArray", less: "xr.DataArray"
) -> Finding:
    """Judges the claim that one measurement is larger than another, paired by repetition."""
    margins = per_replicate(more) - per_replicate(less)
    return judged(
        f"{PAPER}, {where}", claim, paper, f"{pm(more)} against {pm(less)}", margins.values
    )


def _linear(dataset: "xr.Dataset", name: str, layer: str, words: str, where: str) -> Finding:
    """Judges cross-task linearity: 1 - cosine is below its value between the models in every layer.

    The layer with the smallest difference decides.
    """
    worst = worst_ratio(dataset, name, layer)
    return judged(
        f"{PAPER}, {where}",
        f"half way between {words}, features of interpolated weights are closer to interpolated "
        "features than the two models' features are to each other, in every layer",
        "1 - cosine near 0 in all layers (curves without figures)",
        f"{pm(worst)} of 1 - cosine between the models in the worst layer, {worst[layer].item()}",
        1 - worst.values,
    )


def _rotated(dataset: "xr.Dataset") -> Iterator[Finding]:
    """Judges the claims on models fine-tuned on rotated images."""
    yield _linear(dataset, "rotated", "layer", "MLPs fine-tuned on rotated images", "Fig. 2")
    yield _larger(
        "Sec. 4.1",
        "models fine-tuned on different rotations are not linearly mode connected: on a task, "
        "another task's model has a higher loss than its own",
        "stated without figures",
        dataset["rotated_other_loss"],
        dataset["rotated_own_loss"],
    )


def _split_classes(dataset: "xr.Dataset") -> Iterator[Finding]:
    """Judges linearity of the ResNets, for both kinds of normalisation."""
    for name in ("interpolated", "batch"):
        words = NETWORKS[f"resnet_{name}"].replace(
            "a ResNet", "ResNets fine-tuned on other classes"
        )
        yield _linear(dataset, f"split_{name}", "block", words, "Fig. 2")


def _scratch(dataset: "xr.Dataset") -> Iterator[Finding]:
    """Judges whether alignment helps without pre-training, and whether pre-training helps more."""
    for setting in dataset["setting"].values.astype(str):
        gap = dataset.sel(setting=setting)["scratch_gap"].sel(layer="output")
        # The smaller gap of each pair of models. The claims state which side this favours.
        best = gap.sel(way=["weight matching", "activation matching"]).min("way")
        yield _larger(
            "Fig. 11",
            f"without pre-training ({setting}), alignment lowers the gap at the output (the better "
            "of two kinds of alignment for each pair, which favours the claim)",
            "curves without figures",
            gap.sel(way="none"),
            best,
        )
        yield _larger(
            "Fig. 11",
            f"pre-training ({setting}) lowers the gap at the output below the gap of aligned "
            "models "
            "(the better of two kinds of alignment for each pair, which is against the claim)",
            "curves without figures",
            best,
            gap.sel(way="pre-trained"),
        )


def _random_labels(dataset: "xr.Dataset") -> Iterator[Finding]:
    """Judges whether random labels in pre-training are worse than true ones."""
    for name, network in NETWORKS.items():
        layer = "layer" if name.startswith("mlp") else "block"
        gap = dataset[f"random_{name}_gap"].sel({layer: "output"})
        for target in gap["target"].values.astype(str):
            yield _larger(
                "Fig. 12",
                f"pre-training on random labels leaves a larger gap than on true ones, for "
                f"{network} fine-tuned on {target}",
                "curves without figures",
                gap.sel(target=target, labels="random"),
                gap.sel(target=target, labels="true"),
            )


def _averaging(dataset: "xr.Dataset") -> Iterator[Finding]:
    """Judges whether averaging models of one task makes them more accurate."""
    lead = average_lead(dataset)
    yield judged(
        f"{PAPER}, Fig. 4",
        "the average of all models of one task is more accurate than the models are on average",
        "points without figures",
        f"by {pm(lead)}",
        lead.values,
    )


def _arithmetic(dataset: "xr.Dataset") -> Iterator[Finding]:
    """Judges equations 2 to 4 on features at the output."""
    scale = middle_scale(dataset)
    for name, words, where in (
        ("addition", "of two added task vectors (eq. 2)", "Fig. 7"),
        ("midpoint", "of a negated task vector, as a midpoint (eq. 3)", "Fig. 8"),
        ("reflection", "of a negated task vector, as a reflection (eq. 4)", "Fig. 8"),
    ):
        at = dataset.sel(scale=scale, layer="output")
        yield _larger(
            where,
            f"features {words} at scale {scale:g} are closer to the sum of features than the "
            "models' are to each other (1 - cosine)",
            "curves without figures",
            at[f"{name}_baseline"],
            at[f"{name}_turn"],
        )


def _stitching(dataset: "xr.Dataset") -> Iterator[Finding]:
    """Judges the claims on features as input of other models' upper layers."""
    at = stitched(dataset)
    task, upright = (at[f"stitched_negation_features_{x}"] for x in ("task", "upright"))
    lost, lost_elsewhere = at["stitched_base_task"] - task, at["stitched_base_upright"] - upright
    yield _larger(
        "Sec. 4.3",
        "features of one model in the upper layers of another are more accurate on the first's "
        "task than the other model is",
        "stated without figures",
        at["stitched_stitched"],
        at["stitched_upper"],
    )
    yield _larger(
        "Fig. 9",
        "added features in the base are more accurate on both tasks than one model's features",
        "points without figures",
        at["stitched_addition_features"],
        at["stitched_addition_single"],
    )
    yield _larger(
        "Fig. 10",
        "subtracting the change by fine-tuning from features lowers accuracy on the task",
        "points without figures",
        at["stitched_base_task"],
        task,
    )
    yield _larger(
        "Fig. 10",
        "this subtraction lowers accuracy more on the task than on the pre-training task",
        "points without figures",
        lost,
        lost_elsewhere,
    )


def _theorem(dataset: "xr.Dataset") -> Iterator[Finding]:
    """Judges by bootstrap intervals whether the main term predicts the gap best.

    R^2 is one number for all checkpoints, so there are no repetitions for Student's test.
    """
    by_predictor = dataset.set_index(predictor="predictor")
    words = {"distance": "the squared distance", "norm": "the Hessian's top eigenvalue"}
    for name, rival in words.items():
        low, high = (
            float(by_predictor[f"ahead_{end}"].sel(predictor=name)) for end in ("low", "high")
        )
        r = [float(by_predictor["r_squared"].sel(predictor=p)) for p in ("main_term", name)]
        yield Finding(
            f"{PAPER}, App. B.2",
            f"the product of curvature and squared distance predicts the gap better than {rival}",
            f"R² {PUBLISHED['main_term']} against {PUBLISHED[name]} (ResNet-20, CIFAR-10)",
            f"R² {r[0]:.2f} against {r[1]:.2f}, ahead by {low:.2f} to {high:.2f} (MLP, images; "
            "95 % interval, not corrected)",
            "holds" if low > 0 else "fails" if high < 0 else "undecided",
        )
