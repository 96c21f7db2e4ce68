"""Counts the lines of code of each feature, and finds its users: pages, tests and papers' figures.

    python docs/decisions/lines.py

It prints the tables of `lines.md`. `lines.yaml` declares the features: the files that exist for one
alone, the words that its users write (a regular expression), and a verdict if it is not "keep". The
words of a library are by default its public functions and classes. A page or a test file uses a
feature if it contains these words, and so does another module of our packages ("inside"). A figure
uses a study or a command if a line of `docs/figures.yaml` runs it. Lines of code are those without
comments, docstrings and blank lines.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/*.md", "docs/*/*.md", "docs/methods.yaml")
NO_PAGES = ("docs/decisions", "docs/generated", "docs/_build")


def code_lines(file: Path) -> int:
    """Counts the lines of a Python file that are neither blank, comment nor docstring."""
    text = file.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(x) and not x.startswith("#") and n not in docstrings for n, x in lines)


def matching(*globs: str) -> list[Path]:
    """Lists the files of some globs, below the root of the repository.

    Raises `SystemExit` if a glob matches nothing, so the table cannot name what is gone.
    """
    found = []
    for glob in globs:
        files = sorted(ROOT.glob(glob))
        if not files:
            raise SystemExit(f"lines.yaml: no file is {glob}")
        found += files
    return found


def pages() -> dict[str, str]:
    """Reads the pages that people write, by their path below the root."""
    named = {str(file.relative_to(ROOT)): file for file in matching(*PAGES)}
    return {name: file.read_text() for name, file in named.items() if not name.startswith(NO_PAGES)}


def tests() -> dict[str, str]:
    """Reads the tests, by their path below the root."""
    return {
        str(file.relative_to(ROOT)): file.read_text() for file in matching("tests/**/test_*.py")
    }


def modules() -> dict[str, str]:
    """Reads our packages, by their path below the root, except files that only hand names on."""
    files = matching("sail_jax/**/*.py", "theory/**/*.py", "experiments/**/*.py")
    named = {str(file.relative_to(ROOT)): file for file in files if file.stem != "__init__"}
    return {name: file.read_text() for name, file in named.items()}


def figures() -> list[str]:
    """Lists the commands of the papers' figures and tables, one string for each of them."""
    papers = yaml.safe_load((ROOT / "docs" / "figures.yaml").read_text())
    lines = [line for paper in papers.values() for line in paper["lines"]]
    return [" ; ".join([*line.get("here", ()), *line.get("own", ())]) for line in lines]


def called(files: list[Path]) -> str:
    """Makes the expression that finds calls of public functions and classes of some files."""
    names = [
        node.name
        for file in files
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    either = "|".join(map(re.escape, names))
    return rf"[.`\"'](?:{either})\b|\b(?:{either})\(|import .*\b(?:{either})\b"


def expanded(rows: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the features of a group. A row "each: GLOB" stands for one row per file or folder."""
    for name, row in rows.items():
        if "each" not in row:
            yield name, row
            continue
        for path in matching(row["each"]):
            if path.stem.startswith("_") or path.stem in row.get("without", ()):
                continue
            place = str(path.relative_to(ROOT))
            own = {"files": f"{place}/*.py" if path.is_dir() else place}
            if "words" in row:
                own["words"] = row["words"].replace("NAME", path.stem)
            yield path.stem, own | row.get("verdicts", {}).get(path.stem, {})


def main() -> None:
    """Prints a table for each group of features."""
    groups = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    read, inside, drawn, counted = (pages(), tests()), modules(), figures(), 0
    for group, rows in groups.items():
        print(f"\n## {group}\n\n| feature | code | pages | tests | inside | figures | verdict |")
        print("|---|--:|--:|--:|--:|--:|---|")
        for name, row in expanded(rows):
            files = matching(*row["files"].split())
            words = re.compile(row.get("words") or called(files))
            lines = sum(map(code_lines, files))
            own = {str(file.relative_to(ROOT)) for file in files}
            others = {place: text for place, text in inside.items() if place not in own}
            users: list[Any] = [
                sum(map(bool, map(words.search, of.values()))) for of in (*read, others)
            ]
            if "words" in row:
                users[2] = ""  # what users write is in no module
            shown = sum(bool(words.search(f"sail-jax run {line}")) for line in drawn)
            cells = (lines, *users, shown or "", row.get("verdict", "keep"))
            print(f"| {name} | " + " | ".join(map(str, cells)) + " |")
            counted += lines
    print(f"\n{counted} lines of code belong to a feature alone.", file=sys.stderr)


if __name__ == "__main__":
    main()
