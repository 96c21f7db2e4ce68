"""Three real results in a few minutes, and one page that shows them."""

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.lab import registry, store
from experiments.lab.progress import reporting
from experiments.lab.registry import Study
from experiments.pages import gallery
from sail_jax import disk
from sail_jax.cli.progress import say, show
from sail_jax.drawing import pages

PAGE = "index.html"


# In order; each is run in a folder of its own name.
HEADINGS = {
    "transfer_phase": "Transfer against training from scratch",
    "ledger": "The ledger of theorems",
    "merge_digits": "Merging experts on digits",
}

# The preset of each: as a rule, and with --quick. Of the ledger the theorems; `sail-jax verify` has
# all of it, in minutes.
PARTS = {
    "transfer_phase": ("default", "quick"),
    "ledger": ("theorems", "theorems_quick"),
    "merge_digits": ("default", "quick"),
}


def main(out: str | Path, *, seed: int, quick: bool, resume: bool) -> int:
    """Runs every part, then writes the page; returns 1 if a claim did not fare as expected.

    All folders are taken before any work starts, so a refusal costs nothing.
    """
    out = Path(out)
    _admit(out, resume)
    studies = {name: registry.load(name) for name in HEADINGS}
    configs = {name: _config(name, study, seed, quick) for name, study in studies.items()}
    sections, spent, datasets = [], {}, {}
    with contextlib.ExitStack() as held:
        runs = {
            name: held.enter_context(store.Run.open(out / name, name, config, resume=resume))
            for name, config in configs.items()
        }
        for name, run in runs.items():
            say(f"{HEADINGS[name]}: {studies[name].question}")
            start = time.perf_counter()
            study, heading = studies[name], HEADINGS[name]
            dataset, figures = store.complete(run, study, configs[name], reporting)
            declared = study.findings(dataset)
            sections.append(gallery.section(heading, study, dataset, figures, declared))
            datasets[name], spent[name] = dataset, time.perf_counter() - start
            say(f"  {sections[-1].answer}\n")
    wall = {name: float(dataset.attrs["wall_seconds"]) for name, dataset in datasets.items()}
    about = {**gallery.origin(datasets["ledger"]), "computing time": _times(wall)}
    disk.write_atomic(out / PAGE, pages.page("sail-jax quickstart", sections, about).encode())
    say(f"time: {_times(spent)}; {sum(spent.values()):.0f} s in all")
    show(f"Look at {out / PAGE}")
    return 0 if datasets["ledger"]["ok"].values.all() else 1


def _times(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {took:.0f} s" for name, took in seconds.items())


def _config(name: str, study: Study, seed: int, quick: bool) -> Any:
    """The preset of this part, with this seed."""
    return dataclasses.replace(study.presets[PARTS[name][quick]], seed=seed)


def _admit(out: Path, resume: bool) -> None:
    """Refuses a folder that holds anything a quickstart would not have left there."""
    if not out.is_dir():
        return  # new, or not a folder at all: opening the first run tells
    names = {path.name for path in out.iterdir() if path.suffix != ".part"}
    if foreign := sorted(names - {*HEADINGS, PAGE}):
        raise disk.RefusedError(f"{out} holds something else ({foreign[0]}); choose another --out")
    if names and not resume:
        raise disk.RefusedError(
            f"{out} holds a quickstart; add --resume to continue it, or choose another --out"
        )
