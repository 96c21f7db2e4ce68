"""Four real results in a minute or two, and one page that shows them.

Three come from studies, the fourth from a checkpoint that is grown. The page is written again after
each, so that there is something to look at early.
"""

import contextlib
import dataclasses
import math
import time
from pathlib import Path
from typing import NamedTuple

from experiments.lab import registry, store
from experiments.lab.progress import reporting
from experiments.pages import gallery
from sail_jax import disk
from sail_jax.cli.progress import say, show
from sail_jax.drawing import pages

PAGE = "index.html"
GROWTH = "growth"


class Part(NamedTuple):
    """A study on the page.

    Attributes:
      heading: The heading of its section.
      about: What a newcomer should know to read it.
      more: The command that shows more.
      preset: The preset that is run.
      quick: The preset that is run with `--quick`.
      figures: How many of its figures are shown, from the first.
    """

    heading: str
    about: str
    more: str
    preset: str
    quick: str
    figures: int


# In this order, each in a folder of its own name. The one that has figures soonest comes first.
STUDIES = {
    "transfer_phase": Part(
        "Transfer against training from scratch",
        "A network trained on one task can help or hurt on another. For linear networks there is a "
        "formula for the gain (left), which is compared with means over random data (middle). "
        "Orange: transfer helps; purple: training from scratch is better. They meet on the dashed "
        "line by the formula, and on the solid line as measured.",
        "sail-jax run transfer_phase --preset figure_6_7",
        "default",
        "quick",
        2,
    ),
    "merge_digits": Part(
        "Merging experts on real digits",
        "Experts are fine-tuned from one network, each on digits of another kind, then merged into "
        "one network without further training. A good merge keeps what every expert knows.",
        "sail-jax examples ex",
        "default",
        "quick",
        3,
    ),
    "ledger": Part(
        "The theorems, checked",
        "Each row compares a theorem of one of five papers with a computation of what it is about. "
        "What is wrong as printed stays in the ledger, next to its correction.",
        "sail-jax verify",
        "main",
        "main_quick",
        0,  # a table of so few rows says more than a figure
    ),
}


def main(out: str | Path, *, seed: int, quick: bool, resume: bool) -> int:
    """Computes every result, and writes the page again after each.

    All folders are taken before any work starts, so that a refusal costs nothing.

    Args:
      out: The directory of the page and of the runs.
      seed: The seed of all of them.
      quick: Whether to use smaller grids and fewer draws.
      resume: Whether to continue a quickstart that was interrupted.

    Returns:
      The exit code: 0, or 1 if a claim of the ledger did not fare as expected.

    Raises:
      RefusedError: If the directory holds anything else, or a quickstart and `resume` is false.
      StoreError: If something stored is damaged or cannot be written.
    """
    out = Path(out)
    _admit(out, resume)
    studies = {name: registry.load(name) for name in STUDIES}
    configs = {
        name: dataclasses.replace(
            study.presets[STUDIES[name].quick if quick else STUDIES[name].preset], seed=seed
        )
        for name, study in studies.items()
    }
    with contextlib.ExitStack() as held:
        runs = {
            name: held.enter_context(store.Run.open(out / name, name, config, resume=resume))
            for name, config in configs.items()
        }
        page, datasets = _Page(out / PAGE), {}
        for name, run in runs.items():
            study, part = studies[name], STUDIES[name]
            say(f"{part.heading}: {study.question}")
            datasets[name], figures = store.complete(
                run, study, configs[name], reporting, part.figures
            )
            declared = study.findings(datasets[name])
            drawn = {figure: run.path.joinpath(f"{figure}.png").read_bytes() for figure in figures}
            section = gallery.section(
                part.heading, study, datasets[name], figures, declared, drawn=drawn
            )
            page.about.update(gallery.origin(datasets[name]))
            page.add(name, section._replace(about=part.about, more=part.more))
    say("{}: {}".format(*GROWN))
    page.add(GROWTH, grown(out / GROWTH, seed))
    say(f"time: {page.times()}; {sum(page.spent.values()):.0f} s in all")
    show(f"Look at {page.path}")
    return 0 if datasets["ledger"]["ok"].values.all() else 1


class _Page:
    """The page so far, which is written again with every section."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sections: list[pages.Section] = []
        self.about: dict[str, str] = {}
        self.spent: dict[str, float] = {}
        self.start = time.perf_counter()

    def add(self, name: str, section: pages.Section) -> None:
        """Adds a section, which was computed since the one before, and writes the page."""
        self.sections.append(section)
        self.spent[name], self.start = time.perf_counter() - self.start, time.perf_counter()
        about = {**self.about, "computing time": self.times()}
        text = pages.page("sail-jax quickstart", self.sections, about)
        disk.write_atomic(self.path, text.encode())
        say(f"  {section.answer}\n  look at {self.path}\n")

    def times(self) -> str:
        """The computing time of each section, in words."""
        return ", ".join(f"{name} {took:.0f} s" for name, took in self.spent.items())


GROWN = ("A checkpoint, grown", "Does a network that is made larger still compute the same?")


def grown(folder: Path, seed: int) -> pages.Section:
    """Trains a small network on digits, grows it to twice its width and depth, and grades both.

    A network that is there already is not trained again, and an interrupted growth is continued.

    Args:
      folder: Where the checkpoints are kept.
      seed: The seed of the training, and of what digits are held out.

    Returns:
      The section of the page: the verdict on the growth, and a table of sizes and accuracies.

    Raises:
      StoreError: If a checkpoint is damaged or cannot be written.
    """
    from experiments.data import example_checkpoints as examples
    from sail_jax.checkpoint import RunOptions, grow_checkpoint, load_checkpoint

    small, large = folder / "examples" / examples.MODELS[0], folder / "grown"
    if not (folder / "examples" / examples.RECORD).exists():
        examples.make(folder / "examples", seed=seed, force=True)
    growth = grow_checkpoint(
        small, large, {"width": 2, "depth": 2}, certify=True, run=RunOptions(resume=True)
    )
    rows = [("network", "parameters", *(f"accuracy, {task}" for task in examples.HELD_OUT))]
    for name, path in (("trained", small), ("grown", large)):
        count = sum(math.prod(x.shape) for x in load_checkpoint(path).values())
        grades = examples.evaluate(path, seed=seed).values()
        rows.append((name, f"{count:,}", *(f"{grade:.3f}" for grade in grades)))
    heading, question = GROWN
    return pages.Section(
        heading,
        question,
        f"Growth is {growth.verdict}. " + "; ".join(map(str, growth.agreement)) + ".",
        tables=[rows],
        about="Training a large network can start from a small one that is trained already: new "
        "units and layers are put in so that the outputs stay what they were. The certificate is "
        "a run of both networks on the same inputs.",
        more=f"sail-jax grow {small} OUT --width 2x --depth 2x",
    )


def _admit(out: Path, resume: bool) -> None:
    """Refuses a folder that holds anything that a quickstart would not have left there."""
    if not out.is_dir():
        return  # new, or not a folder at all: opening the first run tells
    names = {path.name for path in out.iterdir() if path.suffix != ".part"}
    if foreign := sorted(names - {*STUDIES, GROWTH, PAGE}):
        raise disk.RefusedError(f"{out} holds something else ({foreign[0]}); choose another --out")
    if names and not resume:
        raise disk.RefusedError(
            f"{out} holds a quickstart; add --resume to continue it, or choose another --out"
        )
