"""Runs all comparisons, prints a table of them, and writes it to docs/peers.md.

A module of this folder with a list `CASES` is a subject. If a case fails, it is reported, and the
other cases run. With given subjects, the page is written only with `--write`, which replaces their
sections and keeps the others.
"""

import importlib
import pkgutil
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from importlib.metadata import distributions
from pathlib import Path

from cases import IMAGES

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
HEAD = """# Compared with other programs

`.ci/peers` gives the same folders to sail-jax and to the programs below, and compares the outputs
of the resulting models, on the CPU in float32. It wrote this page, with:

{versions}.

Each row has the largest difference between logits, the largest logit, and the tolerance, the
largest difference that rounding explains. The tolerance is measured. The weights of the model move
at random by one rounding error of each weight's largest entry. The resulting change of the logits
is multiplied by the number of roundings in which the two programs' weights may differ.
"""


PAGE = ROOT / "docs" / "peers.md"


def sections(page: str) -> dict[str, str]:
    """The sections of the page by their titles. The text above the first has the title ""."""
    parts = re.split(r"^## (.+)$", page, flags=re.M)
    return {title: text.strip() for title, text in zip(["", *parts[1::2]], parts[::2], strict=True)}


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
    kept = sections(PAGE.read_text()) if wanted else {}
    # The line of versions must hold for all rows of the page.
    stated = re.search(r"with:\n\n(.+)\.\n", kept.get("", ""))
    lost = set(stated[1].split(", ")) - set(versions.split(", ")) if write and stated else set()
    if lost:
        print(f"{PAGE} was written with {', '.join(lost)}; run all subjects", file=sys.stderr)
        return 2
    pages, failed = {"": HEAD.format(versions=versions)}, 0
    for subject in found:
        module = importlib.import_module(subject) if subject in (wanted or found) else None
        if not hasattr(module, "CASES"):
            continue
        title, *rest = module.__doc__.strip().split("\n\n", 1)
        rows = ["| case | comparison | difference | of | tolerance | |", "|---" * 6 + "|"]
        for case in module.CASES:
            folder = Path(tempfile.mkdtemp())
            try:
                difference, scale, tolerance, note = case.run(folder)
                good = difference <= tolerance
                numbers = f"{difference:.1e} | {scale:.2g} | {tolerance:.1e}"
                note = note if good else f"**apart** {note}"
            # If one case raises, the other cases still run.
            except Exception as error:
                good, numbers = False, "| |"
                words = str(error).replace(f"{folder}/", "").splitlines() or [""]
                note = f"**failed**: {type(error).__name__}: {words[0]}"
                traceback.print_exc()
            finally:
                shutil.rmtree(folder)
            failed += not good
            rows.append(f"| {case.name} | {case.what} | {numbers} | {note} |")
            print(rows[-1], flush=True)
        pages[title.rstrip(".")] = "\n\n".join([*rest, "\n".join(rows)])
    if write:
        pages = kept | pages
        texts = [f"## {title}\n\n{text}" if title else text for title, text in pages.items()]
        PAGE.write_text("\n\n".join(text.strip() for text in texts) + "\n")
    print(f"{failed} failed" if failed else "all agree")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
