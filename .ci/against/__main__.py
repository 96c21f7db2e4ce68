"""Runs all comparisons, prints tables of them, and writes them to docs/peers.

A module of this folder with a list `CASES` is a subject, and has a page. docs/peers.md is their
index. If a case fails, it is reported, and the other cases run. With given subjects, pages are
written only with `--write`, which replaces theirs and keeps the others.
"""

import importlib
import pkgutil
import shutil
import sys
import tempfile
import traceback
import warnings
from importlib.metadata import distributions
from pathlib import Path

from cases import IMAGES

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))
from markup import Page, table, written

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROGRAMS = (
    "torch",
    "torchax",
    "transformers",
    "peft",
    "safetensors",
    "torch-pruning",
    "mergekit",
    "compressed-tensors",
    "torchvision",
    "timm",
    "diffusers",
    "torch-geometric",
    "equinox",
    "flax",
)
HEAD = """`.ci/peers` gives the same folders to sail-jax and to the programs below, and compares the
outputs of the resulting models, on the CPU in float32. It wrote these pages, with:

{versions}.

Each row has the largest difference between logits, the largest logit, and the tolerance, the
largest difference that rounding explains. The tolerance is measured. The weights of the model move
at random by one rounding error of each weight's largest entry. The resulting change of the logits
is multiplied by the number of roundings in which the two programs' weights may differ.
"""


DOCS = ROOT / "docs"
HEADER = ("case", "comparison", "difference", "of", "tolerance", "")
COLUMNS = ("subject", "cases", "apart", "failed")


def page(subject: str, text: str) -> Page:
    """The page of a subject, with its counts in the index, from its text below the title."""
    title, _, text = text.removeprefix("# ").partition("\n\n")
    cases = sum(line.startswith("| ") for line in text.splitlines()) - 2  # without the head
    counts = cases, text.count("| **apart**"), text.count("| **failed**")
    return Page(f"peers/{subject}", title, text, [*map(str, counts)])


def version(name: str) -> str:
    """The version of an installed program."""
    return next(iter(distributions(name=name, path=[*sys.path, str(IMAGES)]))).version


def main(wanted: list[str]) -> int:
    """Runs the given subjects, all by default, and returns the exit code."""
    write = not wanted or "--write" in wanted
    wanted = [word for word in wanted if word != "--write"]
    warnings.filterwarnings("ignore")
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = sorted(m.name for m in pkgutil.iter_modules([str(HERE)]))
    if unknown := set(wanted) - set(found):
        print(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(found)}", file=sys.stderr)
        return 2
    versions = ", ".join(f"{name} {version(name)}" for name in PROGRAMS)
    index = (DOCS / "peers.md").read_text()
    # The line of versions must hold for all rows of the pages.
    stated = index.partition("with:\n\n")[2].partition(".\n\n")[0].split(", ")
    lost = set(stated) - set(versions.split(", ")) if wanted and write else set()
    if lost:
        print(
            f"docs/peers.md was written with {', '.join(lost)}; run all subjects", file=sys.stderr
        )
        return 2
    pages, failed = [], 0
    for subject in found:
        kept = DOCS / "peers" / f"{subject}.md"
        if wanted and subject not in wanted:
            pages += [page(subject, kept.read_text())] if kept.exists() else []
            continue
        module = importlib.import_module(subject)
        if not hasattr(module, "CASES"):
            continue
        title, *rest = module.__doc__.strip().split("\n\n", 1)
        rows = []
        for case in module.CASES:
            folder = Path(tempfile.mkdtemp())
            try:
                difference, scale, tolerance, note = case.run(folder)
                good = difference <= tolerance
                numbers = f"{difference:.1e}", f"{scale:.2g}", f"{tolerance:.1e}"
                note = note if good else f"**apart** {note}"
            # If one case raises, the other cases still run.
            except Exception as error:
                good, numbers = False, ("", "", "")
                words = str(error).replace(f"{folder}/", "").splitlines() or [""]
                note = f"**failed**: {type(error).__name__}: {words[0]}"
                traceback.print_exc()
            finally:
                shutil.rmtree(folder)
            failed += not good
            rows.append((case.name, case.what, *numbers, note))
            print("| " + " | ".join(rows[-1]) + " |", flush=True)
        text = [title.rstrip("."), *rest, table(HEADER, rows)]
        pages.append(page(subject, "\n\n".join(text)))
    if write:
        head = HEAD.format(versions=versions)
        index = Page("peers", "Compared with other programs", head, (), COLUMNS, pages)
        for name, text in written(index).items():
            (DOCS / name).write_text(text)
    print(f"{failed} failed" if failed else "all agree")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
