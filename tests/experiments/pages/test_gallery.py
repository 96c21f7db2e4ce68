"""The page of finished runs is complete, self-contained, and displayed correctly in a browser."""

import dataclasses
import re
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr

from experiments.lab import registry, store
from experiments.lab.config import varied
from experiments.lab.findings import Finding, judged
from experiments.pages import gallery
from sail_jax.cli import main as cli
from sail_jax.drawing import style


@dataclasses.dataclass(frozen=True)
class Data:
    folder: str | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    seed: int = 0
    steps: int = 2
    data: Data = Data()


class Fake(SimpleNamespace):
    question = "Why & how?"
    config = Config
    presets = {"default": Config(), "paper": Config(steps=9)}  # noqa: RUF012

    def run(self, config, stage=store.direct):
        return xr.Dataset({"gain": ("seed", np.arange(3.0) + config.steps)})

    def plot(self, dataset):
        fig, axes = style.figure()
        axes[0, 0].plot(dataset["gain"])
        axes[0, 0].set_xlabel("<seed>")
        return {"gain": fig}

    def summary(self, dataset):
        return f"gain <i>{float(dataset['gain'].mean()):.1f}</i>."

    def tables(self, dataset):
        return []

    def findings(self, dataset):
        return [
            judged("A & B, Table 1", "it gains", "7 of 9", "3 of 3", dataset["gain"]),
            Finding("A & B", "<script>alert(1)</script>", "-", "-", "not tested"),
        ]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two finished runs (one in a subfolder), an unfinished one, and other files."""
    path = tmp_path_factory.mktemp("runs")
    for place, name, config in (
        ("fake", "fake", Config(seed=4, data=Data("where"))),
        ("deep/er", "other", Config(steps=9, data=Data("there"))),
        ("own", "other", Config(steps=3)),
    ):
        with store.Run.open(path / place, name, config) as run:
            store.complete(run, Fake(), config)
    with store.Run.open(path / "half", "fake", Config()) as run:
        run.stage("one", lambda: {"x": 1})
    (path / "model").mkdir()
    (path / "model" / "config.json").write_text("{}")
    return path


@pytest.fixture
def runs(made, monkeypatch, tmp_path):
    """A copy of them."""
    monkeypatch.setattr(registry, "load", lambda _: Fake())
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True)


@pytest.mark.slow
def test_every_finished_run_is_on_the_page(runs, capsys):
    assert cli.main(["report", str(runs)]) == 0
    out, err = capsys.readouterr()
    assert out == f"Look at {runs / 'report.html'}\n"
    assert "left out" in err
    assert "half" in err
    assert "model" not in err
    text = (runs / "report.html").read_text()
    headings = re.findall("<h2>(.*?)</h2>", text)
    assert headings == ["other (deep/er)", "fake", "other (own)"]
    assert "gain &lt;i&gt;3.0&lt;/i&gt;." in text
    first = "It gains: this holds (3 of 3). Of 1 tested claim, 1 holds."
    order = [f'<p class="verdict">{first}</p>', "<figure", "The numbers in words", "<table>"]
    for section in text.split("<section")[1:]:
        assert [*map(section.index, order)] == sorted(map(section.index, order))
    assert "<script" not in text
    assert text.count("data:image/png;base64,") == 3
    for cell in ("it gains", "A &amp; B, Table 1", "7 of 9", "holds", "not tested"):
        assert f"<td>{cell}</td>" in text
    assert text.count("paper, at its scale") == 3
    assert text.count("here, at a different scale from the paper&#39;s") == 2
    assert text.count("here, at the paper&#39;s scale") == 1
    facts = re.findall("<dt>(preset|scale|again)</dt><dd>(.*?)</dd>", text)
    assert facts == [
        ("preset", "paper"),
        ("scale", "the paper&#39;s scale"),
        ("again", "sail-jax run other --preset paper --seed 0"),
        ("preset", "default"),
        ("scale", "a different scale from the paper&#39;s"),
        ("again", "sail-jax run fake --preset default --seed 4"),
        ("preset", "default with other steps"),
        ("scale", "a different scale from the paper&#39;s"),
    ]


@pytest.mark.slow
def test_what_was_found_is_computed_once_for_each_run(runs, monkeypatch):
    asked, findings = [], Fake.findings
    monkeypatch.setattr(Fake, "findings", lambda *a: asked.append(a) or findings(*a))
    assert cli.main(["report", str(runs)]) == 0
    assert len(asked) == 3


def test_a_preset_leaves_open_where_data_are_and_nothing_else():
    study = registry.load("sail_vision")
    preset = study.presets["paper"]

    def told(**changes):
        return gallery.preset_of(study, store.config_record(varied(preset, seed=3, **changes)))

    assert told() == told(data={"folder": "here"}) == ("paper", [])
    assert told(data={"name": "fashion", "folder": "here"}) == ("paper", ["data.name"])
    assert told(optimizer={"clip": 1.0}) == ("paper", ["optimizer.clip"])
    assert gallery.preset_of(study, {"seed": 3}) == ("default", ["all fields"])


@pytest.mark.slow
def test_a_page_is_made_again_and_nothing_else_is_replaced(runs, capsys):
    (runs / "notes.html").write_text("mine")
    (runs / "mine").mkdir()
    (runs / "mine" / "report.html").write_text("mine")
    assert cli.main(["report", str(runs)]) == 0
    assert cli.main(["report", str(runs)]) == 0
    for out, says in (
        (runs / "notes.html", "is not a report"),
        (runs / "mine", "is not a report"),
        (runs / "no" / "where", "is not a directory"),
        (runs / "no" / "where.html", "is not a directory"),
    ):
        capsys.readouterr()
        assert cli.main(["report", str(runs), "--out", str(out)]) == 2
        assert says in capsys.readouterr().err
    assert (runs / "notes.html").read_text() == "mine"


@pytest.mark.slow
def test_a_folder_is_made_for_the_page_and_for_files_of_its_figures(runs):
    out = runs.with_name("shown")
    command = ["report", str(runs), "--out", str(out), "--format", "svg,pdf"]
    assert cli.main(command) == 0
    assert "data:image/svg+xml" in (out / "report.html").read_text()
    assert {path.suffix for path in (out / "figures").iterdir()} == {".pdf"}


@pytest.mark.slow
@pytest.mark.parametrize(("place", "says"), [("model", "holds no finished run"), ("x", "is not a")])
def test_where_there_is_nothing_to_show(runs, capsys, place, says):
    assert cli.main(["report", str(runs / place)]) == 2
    assert says in capsys.readouterr().err
    assert not (runs / place / "report.html").exists()


@pytest.mark.slow
def test_damage_is_named_and_the_others_are_shown(runs, capsys):
    with open(runs / "fake" / "result.nc", "ab") as file:
        file.write(b"x")
    assert cli.main(["report", str(runs)]) == 1
    assert "result.nc" in capsys.readouterr().err
    text = (runs / "report.html").read_text()
    assert len(re.findall("<h2>", text)) == 2
    assert "result.nc is damaged" in text


@pytest.mark.slow
def test_a_result_of_another_version_is_named(runs, capsys, monkeypatch):
    monkeypatch.setattr(Fake, "summary", lambda _, dataset: str(dataset["loss"]))
    assert cli.main(["report", str(runs)]) == 2
    assert "this version cannot show its result" in capsys.readouterr().err


def test_links_are_not_followed(runs):
    (runs / "own" / "back").symlink_to(runs)
    (runs / "link").symlink_to(runs / "deep")
    assert [p.name for p in gallery.found(runs)] == ["er", "fake", "half", "own"]


CHROMIUM = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)
BARE = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr")
TALLY = """<script>
window.addEventListener("load", () => {
  const images = [...document.images];
  const links = [...document.querySelectorAll('a[href^="#"]')];
  document.title = JSON.stringify({
    images: images.length,
    broken: images.filter((i) => !i.complete || !i.naturalWidth).length,
    dead: links.filter((a) => !document.getElementById(a.hash.slice(1))).length,
    wide: document.documentElement.scrollWidth > window.innerWidth,
  });
});
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_the_page_is_well_in_a_browser(runs):
    for name in ("a", "b"):  # enough for a table of contents
        shutil.copytree(runs / "own", runs / name)
    assert cli.main(["report", str(runs)]) == 0
    page = (runs / "report.html").read_text()

    def look(path):
        found = subprocess.run(
            [CHROMIUM, *BARE, f"--user-data-dir={runs / 'chromium'}", "--dump-dom", path.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert not re.findall("CONSOLE.*", found.stderr)
        return found.stdout

    assert look(runs / "report.html").count("<h2>") == 5
    # the page admits no script: counting is done in a copy that does
    counted = re.sub("<meta http-equiv.*?>", "", page, flags=re.DOTALL)
    (runs / "counted.html").write_text(counted.replace("</body>", f"{TALLY}</body>"))
    title = re.search("<title>(.*?)</title>", look(runs / "counted.html"))
    assert title
    assert title[1] == '{"images":5,"broken":0,"dead":0,"wide":false}'


def test_a_disk_is_not_walked(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gallery, "FOLDERS", 3)
    for k in range(3):
        (tmp_path / str(k)).mkdir()
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "more than 3 folders" in capsys.readouterr().err
    (tmp_path / "0").rmdir()
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "holds no finished run" in capsys.readouterr().err
