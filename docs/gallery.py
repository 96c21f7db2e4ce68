"""Makes the gallery: a picture of every study, kept in `docs/gallery`, with its command.

The pictures were run once and are kept, since all studies together take the better part of an hour.
To make some of them again, run their commands with `--out RUNS/STUDY`, then

    python docs/gallery.py RUNS

which keeps the picture named here of every study that it finds there.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "gallery"
WIDTH = 1440  # pixels


class Picture(NamedTuple):
    """A figure of a study, and the run that it is of.

    Attributes:
      figure: The name of the figure, as the study's `plot` has it.
      options: The options of `sail-jax run STUDY`.
      caption: One sentence: what was found.
      further: More figures of the run by name, with their captions: one for each message.
    """

    figure: str
    options: str
    caption: str
    further: Mapping[str, str] = {}

    def files(self, study: str) -> list[tuple[str, str, str]]:
        """Lists the figures with their files, without endings, and their captions."""
        more = [(figure, f"{study}-{figure}", text) for figure, text in self.further.items()]
        return [(self.figure, study, self.caption), *more]


PICTURES: Mapping[str, Picture] = {
    "transfer_phase": Picture(
        "linear_transfer",
        "",
        "Where linear transfer helps (orange) and hurts (purple), by the number of samples and the "
        "angle between the tasks: closed form (its line of no gain is dashed), least squares on "
        "random data (theirs is solid, with its standard error), and slices of both.",
    ),
    "ridge_transfer": Picture(
        "ridge",
        "",
        "Risk of linear transfer against the ridge, exact and on random data: with many samples "
        "none is best, with few some is.",
    ),
    "regularised_transfer": Picture(
        "regularised",
        "",
        "What linear transfer, L2-SP and a penalty on all but the source's direction gain over "
        "ridge regression at its best penalty, by load and angle (exact, and where they are equal "
        "in theory and on random data); how far L2-SP helps by the source's samples; and a source "
        "that helps with few data only.",
    ),
    "transfer_factors": Picture(
        "transfer_by_spectrum",
        "",
        "Transferability by the load and by how fast the spectrum of the inputs decays, in theory, "
        "and on random data: least squares, and the estimator of fine-tuning, averaged over data.",
    ),
    "transfer_scales": Picture(
        "scales",
        "",
        "Risk of fine-tuning by the scale of the layers, in the limit and on data sets: diagonal "
        "networks from rich to lazy, where transfer helps them, and two layers of unequal size.",
    ),
    "relu_transfer": Picture(
        "laws",
        "",
        "Risk of training from scratch by the number of samples, and what frozen ReLU features "
        "cannot express by the share of the target's neurons that the source lacks.",
    ),
    "several_sources": Picture(
        "sources",
        "",
        "Risk of fine-tuning by the weights of two sources, by the covariance of a source's "
        "inputs, and by the number of directions that move: closed forms (dashed), and least "
        "squares on random data.",
    ),
    "divergences": Picture(
        "divergences",
        "",
        "Transferability against three distances between the laws of source and target.",
    ),
    "overtraining_linear": Picture(
        "perturbation",
        "",
        "Pre-training loss of two-layer networks under noise, by pre-training time and noise: "
        "closed form, networks, and for each the time after which more pre-training hurts.",
    ),
    "overtraining_lora": Picture(
        "lora",
        "",
        "Pre-training and fine-tuning loss of two-layer networks after all weights or a low-rank "
        "adapter were fine-tuned, by pre-training time and learned modes, and how long an adapter "
        "searches: closed forms are dashed, dots are networks.",
    ),
    "overtraining_further": Picture(
        "best_time",
        "",
        "A steep spectrum has fewer modes that are worth learning if noise follows. The best time "
        "to stop drops wherever one mode less is worth it, and noise bounds it from above.",
        {
            "turned": "Where left and right singular vectors differ, the best time to stop is "
            "later from every start. The formula for τ → ∞ holds from τ = 2 on.",
            "rounding": "With more bits the best time to stop is later. Rounding to nearest "
            "agrees with theory from 4 bits on, and allows longer pre-training below.",
            "rise": "Late in training rounding to nearest adds what independent errors would. "
            "Early on it adds up to twice as much, and in mirrored layers it can lower the loss.",
            "sam": "Without normalisation SAM delays large modes most, until the largest comes "
            "last. With normalisation it balances the layers of the sharpest mode alone.",
            "label_noise": "Label noise lowers the trace of the Hessian, and a decay of the rate "
            "ends that. A constant rate holds networks below the line of theory, which is the "
            "trace at the minimum. A decay adds the difference.",
        },
    ),
    "overtraining_language": Picture(
        "perturbation",
        "",
        "What noise adds to the loss of language models, by the budget of their pre-training, "
        "above what two-layer linear networks say.",
    ),
    "overtraining_checkpoints": Picture(
        "noise",
        "",
        "Loss of one training's checkpoints under noise of several sizes.",
    ),
    "cross_task_linearity": Picture(
        "rotated",
        "",
        "Features of interpolated weights are near interpolated features: in every layer their "
        "1 - cosine is less than a tenth of the one between the two models. Their length falls "
        "short by up to 12 %.",
    ),
    "merge_digits": Picture(
        "accuracy",
        "",
        "Accuracy of a base network, its experts and their merges on every task, and what adding "
        "outputs predicts of the merges.",
    ),
    "merge_prediction": Picture(
        "ranking",
        "",
        "Rank correlation of what is measured before a merge with how it turns out.",
    ),
    "merging_scaling": Picture(
        "excess",
        "",
        "Excess risk, loss and accuracy of merged experts by their steps, batch, rate, samples and "
        "number, on quadratics beside the bounds and on networks.",
    ),
    "proximal_spirals": Picture(
        "gamma_shared",
        "",
        "Loss, accuracy and norm of the gradient on two spirals against the weight between two "
        "models at which training starts.",
    ),
    "proximal_gamma": Picture(
        "gamma",
        "",
        "With shared initial weights the best weight between two language models is below 0 after "
        "training. With independent ones it is near 0, with a barrier half way. Where the MMD of "
        "block means predicts it costs least; other distances between texts predict less.",
    ),
    "sail_language": Picture(
        "perplexity",
        "",
        "Perplexity along the training of a language model, by its start.",
    ),
    "sail_vision": Picture(
        "accuracy",
        "",
        "From SAIL's start a ResNet is ahead of training from scratch for the first 50 steps, and "
        "both end alike. Of the other starts padding alone is as fast.",
    ),
    "sail_diffusion": Picture(
        "distance",
        "",
        "Distance of a diffusion model's samples from images along training, by alignment and "
        "start.",
    ),
    "growth_training": Picture(
        "loss",
        "",
        "Held-out loss of a grown network along training, by the method that grew it.",
    ),
    "trajectory_averaging": Picture(
        "windows",
        "",
        "Held-out loss of averages of one run's checkpoints and of runs with a decayed rate, by "
        "the window of both: measured, and predicted by quadratics fitted to the averages.",
    ),
    "merge_choice": Picture(
        "diagram",
        "",
        "Which merge of Gaussian task vectors has the least risk, by noise, heterogeneity and the "
        "number of tasks: in theory (colour) and of drawn task vectors (dots).",
    ),
    "ledger": Picture(
        "ledger",
        "--preset main",
        "Main claims of five papers, simulation against prediction in standard errors or "
        "tolerances: what should hold (blue), and what is wrong as printed (orange).",
    ),
}


def page() -> str:
    """Makes the page of the gallery.

    Returns:
      The page in Markdown: for each study its question, a picture, what it shows, and its command.
    """
    from experiments.lab import registry

    parts = []
    for name, picture in PICTURES.items():
        command = " ".join(["sail-jax run", name, picture.options]).strip()
        shown = "".join(
            f"```{{image}} ../gallery/{file}.png\n:alt: {caption}\n:width: {_width(file)}\n```\n\n"
            f"{caption}\n\n"
            for _, file, caption in picture.files(name)
        )
        parts.append(f"## {registry.load(name).question}\n\n{shown}```sh\n{command}\n```\n")
    return (
        "# Gallery\n\nA picture of every study, with the question that it asks and the command "
        "that draws it and its others, on data that every installation has. What a study claims, "
        "with its tests, is printed by the run. All presets are under [Studies](studies.md).\n\n"
        + "\n".join(parts)
    )


def _width(file: str) -> str:
    """The width of a picture on the page: a column of panels is not made larger than it is."""
    from PIL import Image

    with Image.open(FOLDER / f"{file}.png") as image:
        return "100%" if image.width > WIDTH // 2 else f"{image.width}px"


def keep(runs: Path, folder: Path = FOLDER) -> list[str]:
    """Keeps the pictures of finished runs, small enough for a page.

    Args:
      runs: The folder of runs, each called as its study.
      folder: Where the pictures go.

    Returns:
      The names of the files that were kept, without their endings.
    """
    from PIL import Image

    kept = []
    for name, picture in PICTURES.items():
        for figure, file, _ in picture.files(name):
            path = runs / name / f"{figure}.png"
            if path.exists():
                image = Image.open(path).convert("RGB")
                size = (WIDTH, round(image.height * WIDTH / image.width))
                small = (
                    image if image.width <= WIDTH else image.resize(size, Image.Resampling.LANCZOS)
                )
                colours = small.quantize(128, method=Image.Quantize.MAXCOVERAGE, kmeans=2)
                folder.mkdir(exist_ok=True)
                colours.save(folder / f"{file}.png", optimize=True)
                kept.append(file)
    return kept


if __name__ == "__main__":
    print("kept:", ", ".join(keep(Path(sys.argv[1]))))
