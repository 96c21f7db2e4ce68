"""The README is short, links are valid, and shell blocks print the output shown on their pages."""

import doctest
import importlib
import os
import re
import shlex
from pathlib import Path

import pytest
import shell_blocks

from sail_jax.cli import finder

ROOT = Path(__file__).parents[1]
GENERATED = re.compile(r"(\.\./)?generated/[\w.-]+\.(md|svg)(#[\w-]+)?")
WRITTEN = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in (ROOT / "docs").glob("**/*.md") if "_build" not in path.parts),
]
WRITTEN = [path for path in WRITTEN if "generated" not in path.parts]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    links = re.findall(r"\]\(\s*([^)\s]+)\s*\)", prose)
    away = ("https://", "#")
    lost = [
        link
        for link in links
        if not link.startswith(away)
        and not GENERATED.fullmatch(link)
        and not (page.parent / link.partition("#")[0]).exists()
    ]
    assert not lost


def tree(page):
    """The pages in the contents of a page."""
    contents = re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.M | re.S)
    lines = (line.strip() for text in contents for line in text.splitlines())
    return [line.removeprefix("/") for line in lines if line and not line.startswith(":")]


def test_every_page_is_in_the_tree_once():
    names = {page: str(page.relative_to(ROOT / "docs").with_suffix("")) for page in WRITTEN[2:]}
    listed = [name for page in names for name in tree(page)]
    assert sorted({*names.values()} - {"index", *listed}) == []
    assert [name for name in listed if listed.count(name) > 1] == []


def test_the_sidebar_is_short():
    index = ROOT / "docs" / "index.md"
    assert len(tree(index)) <= 25
    assert len(re.findall(r"^:caption:", index.read_text(), re.M)) == 5


def long(pages):
    """The pages with more words than a page may have."""
    words = importlib.import_module("markup").WORDS
    return [page for page in pages if len(page.read_text().split()) > words]


def test_no_page_is_too_long(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    assert long(WRITTEN[2:]) == []


@pytest.mark.slow
def test_generated_pages_are_short_and_links_to_them_lead_somewhere(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "docs")
    importlib.import_module("generate").write_all(tmp_path)
    pages = sorted(tmp_path.glob("*.md"))
    assert long(pages) == []
    text, written = ("\n".join(page.read_text() for page in found) for found in (pages, WRITTEN))
    links = re.findall(r"\]\(([\w.-]+\.md)", text)
    links += re.findall(r"\((?:\.\./)?generated/([\w.-]+)", written)
    assert {*links} - {path.name for path in tmp_path.iterdir()} == set()
    labels = re.findall(r"^\(([\w-]+)\)=$", text, re.M)
    assert {*re.findall(r"\]\(#([\w-]+)\)", text)} - {*labels} == set()
    assert len({*labels}) == len(labels)


# Blocks of shell that are run, on what `sail-jax examples` makes: tests/helpers/shell_blocks.py.
RUN = [
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("index.md", "start.md")),
    *sorted(path for part in ("tutorials", "how_to") for path in (ROOT / "docs" / part).glob("*")),
]
BLOCKS = {
    str(page.relative_to(ROOT)): shell_blocks.blocks(
        page.read_text(), ("sh", "python") if page.name == "index.md" else ("sh",)
    )
    for page in RUN
}
NEEDS = {
    *("a cluster", "a large checkpoint", "factors of qwix", "mergekit", "quantised models"),
    *("the network", "two hosts", "uv", "your data"),
}
REASONS = {
    *(f"needs {what}" for what in NEEDS),
    "installs packages, as .ci/run and .ci/wheel do",
    "needs the files of this page, with which a test of its own runs",
    "takes hours",
    "writes into the package",
}


def commands(page):
    """The commands of the blocks of a page that are run."""
    lines = "".join(block.code for block in BLOCKS[page] if "not run" not in block.marks)
    lines = lines.replace("\\\n", "").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_every_command_on_checkpoints_has_a_page_with_an_example_that_runs():
    shown = {words[1] for page in BLOCKS for words in commands(page) if words[0] == "sail-jax"}
    pages = [path.read_text() for path in RUN]
    for name in finder.commands("sail_jax.cli.commands"):
        called = rf"^>>> .*\b{name}_checkpoints?\("
        assert name in shown or any(re.search(called, page, re.M) for page in pages)


def test_blocks_of_shell_run_or_have_a_reason():
    every = [block for found in BLOCKS.values() for block in found]
    reasons = [block.marks["not run"] for block in every if "not run" in block.marks]
    assert {*reasons} <= REASONS
    assert len(reasons) <= 20, "a block that runs serves a reader better"


@pytest.fixture(scope="session")
def examples(tmp_path_factory):
    """The location of the folders made by `sail-jax examples`, for all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "examples"
    folder.mkdir(exist_ok=True)
    return folder


SHORT, LONG = (
    [
        name
        for name, found in BLOCKS.items()
        if any(("soak" in b.marks) == soak and "not run" not in b.marks for b in found)
    ]
    for soak in (False, True)
)


@pytest.mark.slow
@pytest.mark.parametrize("page", SHORT)
def test_blocks_of_shell_print_what_the_page_shows(page, tmp_path, examples):
    shell = shell_blocks.Shell(tmp_path, examples)
    assert not "\n".join(shell_blocks.faults(BLOCKS[page], shell))


@pytest.mark.soak
@pytest.mark.parametrize("page", LONG)
def test_long_blocks_of_shell_print_what_the_page_shows(page, tmp_path, examples):
    shell = shell_blocks.Shell(tmp_path, examples)
    assert not "\n".join(shell_blocks.faults(BLOCKS[page], shell, soak=True))


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("loss 1.25\n", "a line\nloss  1.25\n", True),
        ("loss 1.25\n", "loss 1.26\n", True),  # rounded otherwise
        ("loss 1.25\n", "loss 1.27\n", False),
        ("3 files, 1,000 bytes\n", "3 files, 1,001 bytes\n", False),
        ("loss 1.3e-06 (t = 1.0)\n", "loss 1.4e-06 (t = 1.0)\n", True),
        ("loss 1.3e-06\n", "loss 1.3e-05\n", False),
        ("one ... three\n", "one\ntwo\nthree\n", True),
        ("one\nthree\n", "one\ntwo\nthree\n", False),
        ("expert-0: 1\n", "expert-1: 1\n", False),
    ],
)
def test_outputs_are_compared_word_by_word(shown, printed, same):
    assert shell_blocks.shows(shell_blocks.Output(shown, varies=False), printed) == same


def test_numbers_that_vary_may_be_any():
    assert shell_blocks.shows(shell_blocks.Output("took 1.2 s\n", varies=True), "took 34 s")
    assert not shell_blocks.shows(shell_blocks.Output("took 1.2 s\n", varies=True), "ran 1.2 s")


def test_a_block_that_fails_or_prints_something_else_is_found(tmp_path):
    page = """
<!-- with: echo 2 > two -->
```sh
cat two | tail -n 1
```

```text
3
```

```sh
false
```

<!-- not run: needs a GPU -->
```sh
false
```
"""
    shell = shell_blocks.Shell(tmp_path, tmp_path)
    shown, code = shell_blocks.faults(shell_blocks.blocks(page), shell)
    assert shown == "line 3: the page shows\n3\n\nprinted is\n2\n"
    assert code == "line 11: exit code 1\n"


def test_formulas_of_docstrings_are_set(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    formulas = importlib.import_module("formulas")
    assert doctest.testmod(formulas).failed == 0
    assert formulas.tex(["a = sum_{i<=n} sqrt(x_i) / (2 kappa)", "", "b = X^T y -> inf"]) == [
        r"\begin{aligned}",
        r"& a = \sum_{i\le n} \sqrt{x_{i}} / (2 \kappa) \\",
        r"& b = X^{\top} y \to \infty \\",
        r"\end{aligned}",
    ]
    assert formulas.tex(["the risk of training from scratch = 1"]) is None  # a sentence
    assert formulas.tex(["mean   1 / n", "most   2 / n"]) is None  # a table
    assert formulas.tex(["x = f(rate=0.1)"]) is None  # a program


def test_the_software_is_cited_by_its_version():
    import sail_jax

    released = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released[:2] == ["Unreleased", sail_jax.__version__]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {sail_jax.__version__}\n" in citation
    bibliography = (ROOT / "docs" / "papers.bib").read_text()
    assert f"version = {{{sail_jax.__version__}}}" in bibliography
    numbers = re.findall(r"arXiv:(\d{4}\.\d{5})", bibliography)
    assert numbers == re.findall(r"arXiv:(\d{4}\.\d{5})", citation)
    assert all(f"https://arxiv.org/abs/{n}" in (ROOT / "README.md").read_text() for n in numbers)
