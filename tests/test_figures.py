"""The list of figures, tables and settings of the papers, and the gallery: complete, and of what
there is."""

import fnmatch
import functools
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from experiments.lab import registry
from sail_jax import methods
from sail_jax.cli.finder import commands
from theory import claims
from theory.coverage import EQUATIONS

DOCS = Path(__file__).parents[1] / "docs"


def _module(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    if str(DOCS) not in sys.path:  # they import one another
        sys.path.append(str(DOCS))
    sys.modules[spec.name] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


figures, gallery = _module("figures"), _module("gallery")
method_pages = _module("method_pages")
PAPERS = figures.read()
IDS = [claim.id for claim in claims.all_claims()]
LINES = [(key, line) for key, paper in PAPERS.items() for line in paper.lines]
BY_ITEM = pytest.mark.parametrize(
    ("key", "line"), LINES, ids=[f"{key}: {line.item}" for key, line in LINES]
)


def test_every_paper_is_listed():
    assert list(PAPERS) == list(EQUATIONS)


@pytest.mark.parametrize("key", PAPERS)
def test_every_number_is_listed(key):
    paper = PAPERS[key]
    listed = {number for line in paper.lines for number in line.numbers}
    expected = {("Figure", n + 1) for n in range(paper.figures)}
    assert listed == expected | {("Table", n + 1) for n in range(paper.tables)}
    assert len({line.item for line in paper.lines}) == len(paper.lines)
    assert sum(paper.counts().values()) == sum(line.count for line in paper.lines)


@BY_ITEM
def test_lines_say_how_far_and_why(key, line):
    assert line.how_far in figures.HOW_FAR
    ran = bool(line.here or line.claims)
    assert ran or line.how_far in ("not done", "nothing to run")
    assert line.why or line.how_far not in ("reduced", "not done")


@BY_ITEM
def test_a_faithful_line_is_the_paper_s_own_setting(key, line):
    """Words for another setting contradict it."""
    if line.how_far == "faithful":
        assert not re.search(r"in place of|times as|\bten times|corrected|\bonly\b", line.why)


def _known(study, *words):
    """Fails for a study, a preset or an option that does not exist."""
    presets = registry.load(study).presets
    config = presets[words[words.index("--preset") + 1] if "--preset" in words else "default"]
    for word in words:
        if word.startswith("--") and word != "--preset":
            assert "_" not in word
            functools.reduce(getattr, word[2:].replace("-", "_").split("."), config)


@BY_ITEM
def test_lines_name_what_there_is(key, line):
    """Commands, studies, presets, options and claims."""
    for text in (*line.here, *line.own):
        name, *words = figures.command(text)
        assert name in commands()
        if name != "run":
            continue
        _known(*words)
    for glob in line.claims:
        assert fnmatch.filter(IDS, f"{key}/{glob}"), glob


def test_ranges_count_their_numbers():
    line = figures.Line("Figures 30-34", "", "reduced")
    assert (line.count, line.numbers[0], line.numbers[-1]) == (5, ("Figure", 30), ("Figure", 34))
    assert figures.Line("Table II", "", "reduced").numbers == [("Table", 2)]
    assert figures.Line("Appendix C.2", "", "reduced").count == 1


def test_every_study_has_a_picture():
    lacking = registry.studies().keys() - gallery.PICTURES.keys()
    assert not lacking, (
        f"no picture of {sorted(lacking)}: add a row to PICTURES in docs/gallery.py, run its "
        "command with --out RUNS/STUDY, then python docs/gallery.py RUNS"
    )
    assert gallery.PICTURES.keys() <= registry.studies().keys(), "a picture of no study"
    for name, picture in gallery.PICTURES.items():
        _known(name, *picture.options.split())
    files = {
        file for name, picture in gallery.PICTURES.items() for _, file, _ in picture.files(name)
    }
    assert {path.stem for path in gallery.FOLDER.iterdir()} == files


def test_a_study_may_have_a_picture_for_each_message(tmp_path):
    from PIL import Image

    run = tmp_path / "overtraining_further"
    run.mkdir()
    for name in ("best_time", "sam", "other"):
        Image.new("RGB", (720, 500), "white").save(run / f"{name}.png")
    kept = ["overtraining_further", "overtraining_further-sam"]
    assert gallery.keep(tmp_path, tmp_path / "kept") == kept
    assert sorted(path.stem for path in (tmp_path / "kept").iterdir()) == kept
    # On a wide screen a narrow picture is not made larger, and on a phone it may become smaller.
    assert "../gallery/overtraining_further-sam.png\n:alt: " in gallery.page()
    assert ":width: 720px" in gallery.page()


def test_pictures_are_kept_small(tmp_path):
    from PIL import Image

    run = tmp_path / "ledger"
    run.mkdir()
    Image.new("RGB", (1500, 750), "white").save(run / "ledger.png")
    assert gallery.keep(tmp_path, tmp_path / "kept") == ["ledger"]
    with Image.open(tmp_path / "kept" / "ledger.png") as image:
        assert image.size == (gallery.WIDTH, gallery.WIDTH // 2)


def test_a_picture_too_wide_to_read_on_a_page_is_refused(tmp_path):
    """Text of 9 points has 9.5 pixels if 1500 are shown as 760."""
    from PIL import Image

    run = tmp_path / "ledger"
    run.mkdir()
    Image.new("RGB", (1501, 700), "white").save(run / "ledger.png")
    with pytest.raises(ValueError, match=r"ledger\.png: 1501 pixels wide, .* at most 1500"):
        gallery.keep(tmp_path, tmp_path / "kept")


def test_the_page_on_performance_is_made_of_its_records():
    page = _module("performance")
    found = page.records()
    assert {"merge", "scale", "caps"} <= found.keys()
    made = page.page(found, (page.FOLDER / "page.txt").read_text())
    assert page.PAGE.read_text() == made, "run python docs/performance.py"
    for name, drawn in page.DRAWN.items():
        # Other versions of Matplotlib draw other bytes: the digest tells what was drawn.
        digest = page.digest([found[record] for record in drawn if record in found])
        assert digest in (page.FOLDER / name).read_text(), f"{name}: run python docs/performance.py"


def test_every_method_has_advice_for_its_page():
    advice = method_pages.advice()
    assert set(methods.METHODS) <= set(advice)
    assert all(callable(getattr(methods, name)) for name in advice)
