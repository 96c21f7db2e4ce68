"""Four real results in a minute or two, on one page.

Three results come from studies, and the fourth from growing a checkpoint. The page is written again
after each result, so that it can be read early.
"""

import contextlib
import dataclasses
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from experiments.lab import registry, store
from experiments.lab.findings import counted
from experiments.lab.progress import reporting
from experiments.pages import gallery, quickstart_panels
from sail_jax import disk
from sail_jax.cli.progress import say, show
from sail_jax.drawing import pages, style

if TYPE_CHECKING:
    import xarray as xr

    from experiments.lab.registry import Study

PAGE = "index.html"
GROWTH = "growth"


class Part(NamedTuple):
    """A study on the page.

    Attributes:
      heading: The heading of its section.
      about: Background for a newcomer.
      more: The command that shows more.
      preset: The preset of the run.
      quick: The preset of the run with `--quick`.
    """

    heading: str
    about: str
    more: str
    preset: str
    quick: str


# In this order, each in a folder with its name. The part with the fastest figures comes first.
STUDIES = {
    "transfer_phase": Part(
        "Transfer against training from scratch",
        "A network trained on one task can help or hurt on another. For linear networks a formula "
        "predicts the gain. It is compared here with means over random data. Transfer helps where "
        "the map is orange. Training from scratch is better where it is purple.",
        "sail-jax run transfer_phase --preset figure_6_7",
        "default",
        "quick",
    ),
    "merge_digits": Part(
        "Merging experts on real digits",
        "The experts are fine-tuned from one network, each on another task made of the digits. "
        "They are then merged into one network without further training. The prediction adds the "
        "outputs of the experts instead of their weights.",
        "sail-jax examples ex",
        "default",
        "quick",
    ),
    "ledger": Part(
        "The theorems, checked",
        "Each row of the table compares one theorem of five papers with a computation of the same "
        "quantity. A theorem that is wrong as printed stays in the table, next to its correction.",
        "sail-jax verify",
        "main",
        "main_quick",
    ),
}


def main(out: str | Path, *, seed: int, quick: bool, resume: bool) -> int:
    """Computes every result, and writes the page again after each.

    All folders are locked before any work starts, so that errors are raised immediately. The
    verdicts that are printed at the end are those at the top of the page.

    Args:
      out: The directory of the page and of the runs.
      seed: The seed of all of them.
      quick: Whether to use smaller grids and fewer data sets.
      resume: Whether to continue an interrupted quickstart.

    Returns:
      The exit code: 0, or 1 if a claim of the ledger has an unexpected verdict.

    Raises:
      RefusedError: If the directory contains anything else, or contains a quickstart and `resume`
        is false.
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
            # The page has separate figures; those of the study are for `sail-jax plot`.
            datasets[name], _ = store.complete(run, study, configs[name], reporting, shown=0)
            page.about.update(gallery.origin(datasets[name]))
            page.add(name, _section(part, study, datasets[name], quickstart_panels.SHOWN[name]))
    say("{}: {}".format(*GROWN))
    page.add(GROWTH, grown(out / GROWTH, seed))
    say(f"time: {page.times()}; {sum(page.spent.values()):.0f} s in total")
    for section in page.sections:
        show(f"{section.heading}: {section.verdict}")
    show(f"Look at {page.path}")
    return 0 if datasets["ledger"]["ok"].values.all() else 1


def _section(
    part: Part, study: "Study", dataset: "xr.Dataset", shown: quickstart_panels.Shown
) -> pages.Section:
    """Makes the section of a study."""
    findings = study.findings(dataset)
    figures = shown.figures(dataset)
    section = gallery.section(part.heading, study, dataset, (), findings)
    return section._replace(
        verdict=" ".join(filter(None, (shown.verdict(dataset), counted(findings)))),
        pictures=[(style.describe(figure), style.svg(figure)) for figure in figures],
        about=part.about,
        more=part.more,
    )


class _Page:
    """The page so far. It is written again with every section."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sections: list[pages.Section] = []
        self.about: dict[str, str] = {}
        self.spent: dict[str, float] = {}
        self.start = time.perf_counter()

    def add(self, name: str, section: pages.Section) -> None:
        """Adds the section that was computed last, and writes the page."""
        self.sections.append(section)
        self.spent[name], self.start = time.perf_counter() - self.start, time.perf_counter()
        about = {**self.about, "computing time": self.times()}
        text = pages.page("sail-jax quickstart", self.sections, about)
        disk.write_atomic(self.path, text.encode())
        say(f"  {section.verdict}\n  look at {self.path}\n")

    def times(self) -> str:
        """Returns the computing time of each section as text."""
        return ", ".join(f"{name} {took:.0f} s" for name, took in self.spent.items())


GROWN = ("A checkpoint, grown", "Does a network compute the same after growth?")


def grown(folder: Path, seed: int) -> pages.Section:
    """Trains a small network on digits, grows it to twice its width and depth, and scores both.

    An existing network is not trained again, and an interrupted growth is continued.

    Args:
      folder: The folder of the checkpoints.
      seed: The seed of the training, and of the choice of held-out digits.

    Returns:
      The section of the page, with a table of sizes and accuracies.

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
    worst = max(growth.agreement, key=lambda run: run.largest)
    same, within = ("the same", "is within") if growth.verdict.agrees else ("another", "exceeds")
    heading, question = GROWN
    return pages.Section(
        heading,
        question,
        f"Growth is {growth.verdict}. " + "; ".join(map(str, growth.agreement)) + ".",
        tables=[rows],
        about="The training of a large network can start from a small trained one. New units and "
        "layers are inserted, and the outputs stay the same. The certificate is a run of both "
        "networks on the same inputs.",
        more=f"sail-jax grow {small} OUT --width 2x --depth 2x",
        verdict=f"The grown network has {rows[2][1]} parameters in place of {rows[1][1]}, and "
        f"computes {same} function. The largest difference of their outputs (up to "
        f"{worst.scale:.2g}) is {worst.largest:.1g}, and {within} rounding.",
    )


def _admit(out: Path, resume: bool) -> None:
    """Rejects a folder that contains anything but the files of a quickstart."""
    if not out.is_dir():
        return  # new, or a file: opening the first run then raises an error
    names = {path.name for path in out.iterdir() if path.suffix != ".part"}
    if foreign := sorted(names - {*STUDIES, GROWTH, PAGE}):
        raise disk.RefusedError(f"{out} holds something else ({foreign[0]}); choose another --out")
    if names and not resume:
        raise disk.RefusedError(
            f"{out} holds a quickstart; add --resume to continue it, or choose another --out"
        )
