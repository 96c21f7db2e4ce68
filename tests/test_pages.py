"""The README is short, links lead somewhere, every page is in the tree of the site."""

import re
from pathlib import Path

import pytest

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


def test_the_software_is_cited_by_its_version():
    import sail_jax

    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {sail_jax.__version__}\n" in citation
    numbers = re.findall(r"arXiv:(\d{4}\.\d{5})", (ROOT / "docs" / "papers.bib").read_text())
    assert numbers == re.findall(r"arXiv:(\d{4}\.\d{5})", citation)
    assert all(f"https://arxiv.org/abs/{n}" in (ROOT / "README.md").read_text() for n in numbers)
