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
WIDTH, WIDEST = 1440, 1500  # pixels: kept, and drawn


class Picture(NamedTuple):
    """A figure of a study, and the run that it is of.

    Attributes:
      figure: The name of the figure, as the study's `plot` has it.
      options: The options of `sail-jax run STUDY`.
      caption: What was found, in short sentences.
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
        "Linear transfer helps (orange) at small angles and with few samples, and hurts "
        "(purple) elsewhere. Near load 1 it always helps, since training from scratch fits the "
        "noise there. Random data confirm the closed form: both lines of no gain agree, and so "
        "do slices.",
    ),
    "ridge_transfer": Picture(
        "ridge",
        "",
        "With 250 samples no ridge is best. With 10 samples and a large angle some ridge is "
        "best, and the exact optimum (star) finds it. The limit of the paper misses this: it is "
        "lowest without a ridge. All points of a panel come from the same data sets, so they are "
        "off the line together.",
    ),
    "regularised_transfer": Picture(
        "regularised",
        "",
        "Compared with the best ridge regression, the gain near load 1 disappears. L2-SP helps "
        "up to 60 degrees at every load. A free direction helps further.",
        {
            "sources": "L2-SP needs a good source and few data. A source of least norm loses its "
            "value where its own load is near 1. If the tasks are opposite in directions of small "
            "variance, L2-SP hurts above a load of about 0.3.",
        },
    ),
    "transfer_factors": Picture(
        "transfer_by_spectrum",
        "",
        "The faster the spectrum of the inputs decays, the less transfer helps. Linear transfer "
        "turns harmful below load 1. Fine-tuning only loses its gain. Random data agree with "
        "theory.",
    ),
    "transfer_scales": Picture(
        "scales",
        "",
        "In diagonal networks, rich training needs fewer shared features before transfer helps "
        "(28 % of them) than lazy training (50 %).",
        {
            "layers": "In two layers, a dominant first layer (left) fixes the features, and the "
            "risk is higher. There data sets of 64 dimensions exceed the limit.",
        },
    ),
    "relu_transfer": Picture(
        "laws",
        "",
        "The risk of training from scratch falls as 1/n: the fitted exponent is 1.01. Pre- "
        "trained features express the target better than the source teacher's own. With more "
        "than 40 % of the features missing they are worse than untrained ones.",
    ),
    "several_sources": Picture(
        "sources",
        "",
        "SAIL's weights, which add up to 1, are best only if the second source has little "
        "noise. With much noise equal weights are worse than no source.",
        {
            "covariance": "Fine-tuning hurts after a good source (orange), unless the inputs of "
            "source and target differ much: it helps from about 60 degrees on.",
            "rank": "Moving about 7 directions, the largest first, has the least risk. A random "
            "subspace is worse than moving all directions.",
        },
    ),
    "divergences": Picture(
        "divergences",
        "",
        "One distance between source and target can go with a gain or a loss, so no distance "
        "predicts transfer.",
        {
            "samples": "Estimates of the Wasserstein distance from 250 samples vary more than the "
            "distance itself.",
        },
    ),
    "overtraining_linear": Picture(
        "perturbation",
        "",
        "Under noise the loss of two-layer networks has a best pre-training time. Larger noise "
        "makes it earlier. Networks trained by SGD agree with the closed form.",
    ),
    "overtraining_lora": Picture(
        "lora",
        "",
        "After longer pre-training, full fine-tuning forgets more. An adapter forgets no more "
        "once more modes are learned than its rank. It also learns less of the new task. "
        "Networks (dots) agree with the closed forms.",
    ),
    "lora_start": Picture(
        "start",
        "",
        "From B = 0 the rows of a random A have a best size. Larger rows rotate more slowly, and "
        "delay small directions more. Rank 16 is only 1.4 to 2.3 times as fast as rank 1. If both "
        "layers have small adapters, the smaller layer moves almost alone. Each line is the mean "
        "of a closed form over the law of A.",
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
        "Longer pre-training makes small language models more sensitive to noise of every size. "
        "Under the larger noises the loss itself rises in the end. Two-layer linear networks "
        "show the same.",
    ),
    "overtraining_checkpoints": Picture(
        "noise",
        "",
        "Later checkpoints of one training suffer more from noise. Under the two largest noises "
        "the perplexity has a minimum and then rises.",
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
        "Every merge is more accurate in the mean than the base and every single expert, and "
        "TIES is the most accurate. Adding the outputs of the experts predicts the accuracy of "
        "a soup and of task arithmetic to about .01.",
    ),
    "merge_prediction": Picture(
        "ranking",
        "",
        "A merge is ranked best by its own loss on a few examples. Among the probes that need "
        "no merge, a quadratic expansion at the experts is best. Sign conflicts, Hessian traces "
        "and distances between tasks rank badly.",
    ),
    "choice_prediction": Picture(
        "forecasts",
        "",
        "Theory names the best use of a source, and the best merge, less often than a rule that "
        "repeats the most frequent winner. Its probabilities are too extreme. It is better than "
        "always fine-tuning.",
    ),
    "merging_scaling": Picture(
        "excess",
        "",
        "Theorem 3 exceeds the excess risk of quadratics by more than five powers of ten in "
        "all settings but one, the corrected bound by about three.",
        {
            "accuracy": "Of four merges of networks, TIES has the highest accuracy in most "
            "settings. Accuracy falls with every further task.",
        },
    ),
    "proximal_spirals": Picture(
        "gamma_shared",
        "",
        "With one spiral for each source, the best weight is 1/2, as predicted. With inner and "
        "outer parts only the prediction by parameters finds the best weight. With random parts "
        "the weight hardly matters. After 300 epochs little difference is left.",
    ),
    "proximal_gamma": Picture(
        "gamma",
        "",
        "Between two language models from shared initial weights the loss has no barrier, and "
        "after training the best weight is below 0. From independent ones it has a barrier half "
        "way, and the best weight is near 0.",
        {
            "weights": "The weight that the MMD of block means predicts costs .004 nats after 200 "
            "steps, for both kinds of initial weights. Other distances between texts predict lower "
            "weights, which cost up to .1.",
        },
    ),
    "sail_language": Picture(
        "perplexity",
        "",
        "SAIL's start and a greedy soup have the lowest perplexity at every step. A uniform "
        "soup catches up by the end. Sources of other shapes lose their lead: training from "
        "scratch overtakes them after 800 steps.",
    ),
    "sail_vision": Picture(
        "accuracy",
        "",
        "From SAIL's start a ResNet is ahead of training from scratch for most of the first 60 "
        "steps, and both end alike. Of the other starts padding and the first source are about as "
        "fast.",
    ),
    "sail_diffusion": Picture(
        "distance",
        "",
        "With targets from the data, SAIL's samples are nearer to the images than REPA's "
        "throughout, and the lead shrinks. As printed, SAIL is ahead at first and behind from "
        "step 600 on. REPA ends level with plain SiT.",
    ),
    "growth_training": Picture(
        "loss",
        "",
        "All methods but `sail svd` and learned `sail` reach the lowest loss from scratch in "
        "half of the steps or fewer. `msg` and learned `ligo` end lowest. Preserving the "
        "function does not decide: `interpolate` and `aki` change it, and end as low as "
        "`lemon`.",
    ),
    "trajectory_averaging": Picture(
        "windows",
        "",
        "Averages over 50 to 400 steps have less loss than the last checkpoint. From 200 steps "
        "on, a linear decay of the rate is better than every average. Quadratics predict the "
        "averages, and overestimate the loss of long decays for the GPT.",
    ),
    "merge_choice": Picture(
        "diagram",
        "",
        "If all tasks use all entries, the plain average has the least risk. If each task uses "
        "few entries, TIES or trimming wins until the noise is large. With published settings "
        "and much noise, the base is better than every merge. Drawn task vectors (dots) agree.",
    ),
    "merge_or_pool": Picture(
        "diagram",
        "",
        "Averaged experts are better than pooled training (orange) if the teachers differ by more "
        "than the risk of an expert on its own task. With the best penalties they are better "
        "where the best experts have less risk on their own tasks than the pooled model.",
        {
            "weights": "If the curvatures of the tasks differ, the plain average loses to pooled "
            "training. Weights by curvatures from other data stay better than pooled training.",
        },
    ),
    "ledger": Picture(
        "ledger",
        "--preset main",
        "Every claim that should hold (blue) lies within its tolerance, or on the allowed side "
        "of its bound. Every claim that is wrong as printed (orange) fails clearly.",
    ),
}


def page() -> str:
    """Makes the page of the gallery.

    Returns:
      The page in Markdown: for each study its question, what was found, a picture, and its command.
    """
    from experiments.lab import registry

    parts = (
        f"## {registry.load(name).question}\n\n{shown(name)}"
        f"```sh\n{' '.join(['sail-jax run', name, picture.options]).strip()}\n```\n"
        for name, picture in PICTURES.items()
    )
    return (
        "# Gallery\n\nEach study has a question, what was found, a picture, and the command that "
        "draws the picture. The data come with every installation. A run prints all findings with "
        "their tests. [Studies](studies.md) lists the presets.\n\n" + "\n".join(parts)
    )


def shown(study: str) -> str:
    """The findings of a study in Markdown, each above its picture."""
    return "".join(
        f"{caption}\n\n"
        f"```{{image}} ../gallery/{file}.png\n:alt: {caption}\n:width: {_width(file)}\n```\n\n"
        for _, file, caption in PICTURES[study].files(study)
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

    Raises:
      ValueError: If a picture is so wide that its text would be too small on a page.
    """
    from PIL import Image

    kept = []
    for name, picture in PICTURES.items():
        for figure, file, _ in picture.files(name):
            path = runs / name / f"{figure}.png"
            if path.exists():
                image = Image.open(path).convert("RGB")
                if image.width > WIDEST:
                    raise ValueError(
                        f"{path}: {image.width} pixels wide, with text too small for a page; draw "
                        f"at most {WIDEST}, with fewer panels in a row"
                    )
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
