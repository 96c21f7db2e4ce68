"""The README is short, links lead somewhere, every page is in the tree of the site."""

import re
import shlex
from pathlib import Path

import pytest

from sail_jax.cli import finder
from sail_jax.cli import main as cli

ROOT = Path(__file__).parents[1]
GENERATED = re.compile(r"(\.\./)?generated/[\w.-]+\.(md|rst|svg)(#[\w-]+)?")
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


def test_every_page_is_in_the_tree():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in WRITTEN[2:]:
        name = str(page.relative_to(ROOT / "docs").with_suffix(""))
        assert name == "index" or re.search(rf"^{re.escape(name)}$", index, re.M), name


# Blocks of shell that are run as they stand, on what `sail-jax examples` makes.
RUN = re.compile(r"^<!-- run -->\n```sh\n(.*?)^```", re.M | re.S)
HOW_TO = {page.stem: page.read_text() for page in sorted((ROOT / "docs" / "how_to").glob("*.md"))}


def commands(page):
    """The command lines of the blocks of a page that are run."""
    lines = "".join(RUN.findall(HOW_TO[page])).replace("\\\n", "").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_every_command_on_checkpoints_has_a_page_with_an_example_that_runs():
    shown = {words[1] for page in HOW_TO for words in commands(page)}
    for name in finder.commands("sail_jax.cli.commands"):
        called = rf"^>>> .*\b{name}_checkpoints?\("
        assert name in shown or any(re.search(called, page, re.M) for page in HOW_TO.values())


@pytest.mark.slow
@pytest.mark.thirds(slow=True)
@pytest.mark.parametrize("page", [page for page in HOW_TO if commands(page)])
def test_blocks_of_shell_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for program, *words in commands(page):
        assert program == "sail-jax"
        assert cli.main(words) == 0, (words, capsys.readouterr().err)


def test_the_software_is_cited_by_its_version():
    import sail_jax

    released = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released[:2] == ["Unreleased", sail_jax.__version__]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {sail_jax.__version__}\n" in citation
    numbers = re.findall(r"arXiv:(\d{4}\.\d{5})", (ROOT / "docs" / "papers.bib").read_text())
    assert numbers == re.findall(r"arXiv:(\d{4}\.\d{5})", citation)
    assert all(f"https://arxiv.org/abs/{n}" in (ROOT / "README.md").read_text() for n in numbers)
