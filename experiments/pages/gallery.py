"""All finished runs and sweeps of a directory on one self-contained page.

The results of runs are next to the papers' figures.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.lab import grid, registry, store
from experiments.lab.findings import Finding, evidence, headline, rule
from experiments.lab.registry import Study
from sail_jax import disk
from sail_jax.cli.progress import say, show
from sail_jax.drawing import pages, style
from sail_jax.drawing.printing import Looks

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

PAGE, PNG = "report.html", Looks()
HEADER = ("claim", "where", "paper, at its scale")
OTHER = "a different scale from the paper's"
# Limits of the search for runs: the number of folders, and levels below the given directory.
FOLDERS = 10_000
DEPTH = 8
# The largest number of fields in which a config differs from the preset that the page states.
FEW = 3
ALL = "all fields"


def main(directory: str | Path, out: str | Path | None = None, looks: Looks = PNG) -> int:
    """Writes the page of all finished runs in a directory and below it.

    Runs that are not finished or cannot be read are skipped, and reported on stderr.

    Args:
      directory: The directory of the runs.
      out: The file of the page, which ends in ".html", or a folder for `report.html`; None for the
        directory itself. The page may replace an earlier page, but no other file.
      looks: How figures are drawn. The page shows SVG if that is among the formats, or else PNG.
        Files of the other formats are written to the folder `figures` beside it.

    Returns:
      The exit code: 0, or 1 if a run could not be read.

    Raises:
      RefusedError: If `directory` is not a directory, contains no finished run or too many folders,
        or if the page cannot be written to `out`.
      StoreError: If a file at `out` cannot be read, or the page cannot be written.
    """
    directory = Path(directory)
    out = directory if out is None else Path(out)
    folder = None if out.suffix in (".html", ".htm") else out
    out = out if folder is None else out / PAGE
    for path in (directory, out):
        disk.check_length(path)
    if not directory.is_dir():
        raise disk.RefusedError(f"{directory} is not a directory")
    if folder is not None and not folder.exists() and folder.parent.is_dir():
        with disk.explained("make", folder):
            folder.mkdir()
    _admit(out)
    pictures = _Pictures(looks, out.parent / "figures")
    sections, unfinished, bad = [], [], []
    # All runs are found first, so that an error is raised early if there are too many.
    for path in [*found(directory)]:
        try:
            place = path.relative_to(directory)
            if (path / grid.RECORD).exists():
                result = grid.reopen(path)
                with store.showing(path):
                    sections.append(_grid(place, result, pictures))
            else:
                run = store.reopen(path)
                with store.showing(path):
                    sections.append(_run(place, run, pictures))
            say(f"  {path}")
        except disk.RefusedError as exc:
            unfinished.append(str(exc))
        except disk.StoreError as exc:
            bad.append(str(exc))
    for line in (*unfinished, *bad):
        say(f"  left out: {line}")
    if not sections:
        raise disk.RefusedError(f"{directory} holds no finished run; make one with: sail-jax run")
    about = {
        "runs": str(len(sections)),
        **({"left out": "; ".join((*unfinished, *bad))} if unfinished or bad else {}),
        "figures": "drawn from the stored results",
    }
    page = pages.page("sail-jax: results of all runs", sections, about)
    disk.write_atomic(out, page.encode())
    show(f"Look at {out}")
    return 1 if bad else 0


class _Pictures(NamedTuple):
    """Renders figures for the page, and writes their files beside it."""

    looks: Looks
    folder: Path

    def __call__(self, place: Path, figures: Mapping[str, "Figure"]) -> list[pages.Picture]:
        """Returns the pictures of one run, in its folder below the given directory."""
        svg = "svg" in self.looks.formats
        shown = "svg" if svg else "png"
        others = self.looks._replace(
            formats=tuple(format for format in self.looks.formats if format != shown)
        )
        for name, data in others.files(figures).items():
            path = self.folder / "_".join((*place.parts, name))
            with disk.explained("write to", self.folder):
                self.folder.mkdir(exist_ok=True)
            disk.write_atomic(path, data)
        # Rendering for a page changes the colours of a figure, so it comes last.
        render = style.svg if svg else style.png
        return [(style.describe(figure), render(figure)) for figure in figures.values()]


def found(directory: Path) -> Iterator[Path]:
    """Finds the folders of runs in a directory.

    Links are not followed. Folders within a run or a sweep, and folders more than `DEPTH` levels
    down, are not searched.

    Args:
      directory: The directory to search. It may be the folder of a run itself.

    Yields:
      The folders of runs and of sweeps, finished or not. A folder comes before the folders within
      it, and folders come in the order of their names.

    Raises:
      RefusedError: If there are more than `FOLDERS` folders. The directory is then probably a
        mistake, such as "/".
    """
    for seen, (folder, inside, files) in enumerate(os.walk(directory)):
        if seen == FOLDERS:
            raise disk.RefusedError(
                f"{directory} has more than {FOLDERS} folders; choose one that holds runs"
            )
        inside.sort()
        path = Path(folder)
        is_run = store.RECORD in files and (store.RESULT in files or "stages" in inside)
        if is_run or grid.RECORD in files:
            yield path
            inside.clear()  # the folders within a run or a sweep belong to it
        elif len(path.relative_to(directory).parts) >= DEPTH:
            inside.clear()


def section(
    heading: str,
    study: Study,
    dataset: "xr.Dataset",
    pictures: Sequence[pages.Picture],
    findings: Sequence[Finding],
    scale: str = OTHER,
) -> pages.Section:
    """Makes the section of a page that shows one run.

    Args:
      heading: The heading of the section.
      study: The study.
      dataset: The result of the run.
      pictures: The figures of the run, each with an alternative text.
      findings: The findings on the papers' claims; empty if the study tests none.
      scale: The scale of the run, for the heading of the column with its own figures.

    Returns:
      The section: what was found, the question, the figures, the numbers in words, and the tables
      of the study and of the claims.
    """
    tables, answer = study.tables(dataset), study.summary(dataset)
    verdict = headline(findings, answer)
    if findings:
        rows = [(f.claim, f.where, f.paper, f.here + evidence(f), f.verdict) for f in findings]
        tables.append(((*HEADER, f"here, at {scale}", "verdict"), *rows))
        answer = "\n".join(filter(None, (answer, rule(findings))))
    return pages.Section(heading, study.question, answer, pictures, tables, verdict=verdict)


def _run(place: Path, run: store.Run, pictures: _Pictures) -> pages.Section:
    """Makes the section of a stored run, with details on how to compute it again."""
    record = run.record
    name = record["experiment"]
    study = registry.load(name)
    dataset, figures = store.drawn(run, study, pictures.looks)
    findings = study.findings(dataset)
    heading = name if place.name == name or place == Path() else f"{name} ({place})"
    preset, changed = preset_of(study, record["config"])
    exact = preset if not changed else ""
    scale = "the paper's scale" if exact.startswith("paper") else OTHER
    options = f" --preset {exact} --seed {record['seed']}"
    few = len(changed) <= FEW and changed != [ALL]
    nearest = f"{preset} with other {', '.join(changed)}" if few else "none: see config"
    details = {
        "preset": exact or nearest,
        **({"scale": scale} if findings else {}),  # matters only next to printed figures
        **origin(dataset),
        "computing time": f"{float(dataset.attrs['wall_seconds']):.0f} s",
        "result": f"{store.RESULT}, SHA-256 {record['result']['sha256']}",
        **({"again": f"sail-jax run {name}{options}"} if exact else {}),
        "config": json.dumps(record["config"], ensure_ascii=False),
    }
    drawn = pictures(place, figures)
    return section(heading, study, dataset, drawn, findings, scale)._replace(details=details)


def _grid(place: Path, result: grid.GridResult, pictures: _Pictures) -> pages.Section:
    """Makes the section of a stored sweep."""
    record, axes = result.record, result.record["axes"]
    study = registry.load(record["experiment"])
    drawn = pictures(place, pictures.looks.draw(lambda: result.figures))
    details = {
        **{f"values of {axis}": ", ".join(map(str, values)) for axis, values in axes.items()},
        "versions": _spelt(record["versions"]),
        "device": str(result.dataset.attrs["device"]),
        "started": record["started"],
        "computing time": f"{record['seconds']:.0f} s",
        "result": f"{store.RESULT}, SHA-256 {record['result']['sha256']}",
        "config": json.dumps(record["config"], ensure_ascii=False),
    }
    name = f"{study.name} over {', '.join(axes)}"
    heading = name if place == Path() else f"{name} ({place})"
    return pages.Section(heading, study.question, result.summary, drawn, details=details)


def _spelt(versions: Mapping[str, str]) -> str:
    """Lists versions of packages."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def preset_of(study: Study, config: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Finds the preset of a study that is closest to a stored config, apart from the seed.

    A preset that equals the whole config has priority over one without a location of the data
    (None). Of equally close ones, the first is used.

    Args:
      study: The study.
      config: The config as JSON data, as in `config.json`.

    Returns:
      The name of the preset, and the fields in which the config differs from it.
    """
    records = {name: store.config_record(preset) for name, preset in study.presets.items()}
    found = [
        (name, _differing({**record, "seed": config.get("seed")}, config, left_open))
        for left_open in (False, True)
        for name, record in records.items()
    ]
    return min(found, key=lambda one: len(one[1]), default=("none", [ALL]))


def _differing(stated: object, actual: object, left_open: bool, at: str = "") -> list[str]:
    """Returns the names of the fields of a config that differ from a preset's."""
    if isinstance(stated, dict) and isinstance(actual, dict) and stated.keys() == actual.keys():
        inner = ((f"{at}.{k}" if at else k, k) for k in stated)
        return [x for n, k in inner for x in _differing(stated[k], actual[k], left_open, n)]
    open_too = left_open and stated is None and isinstance(actual, str | list)
    return [] if stated == actual or open_too else [at or ALL]


def origin(dataset: "xr.Dataset") -> dict[str, str]:
    """Returns the origin of a stored result.

    Args:
      dataset: The stored result, with its attributes.

    Returns:
      Versions, device, seed and the time at which the run began, as texts by name.
    """
    attrs: Mapping[str, Any] = dataset.attrs
    return {
        "versions": _spelt(json.loads(attrs["versions"])),
        "device": f"{attrs['device_count']} x {attrs['device']}",
        "seed": str(attrs["seed"]),
        "started": attrs["started"],
    }


def _admit(out: Path) -> None:
    """Checks that the page may be written. It may replace an earlier page, but no other file."""
    mark = b"<title>sail-jax"
    if out.exists() and (out.is_dir() or mark not in disk.read_bytes(out, 1 << 30)[:2000]):
        raise disk.RefusedError(f"{out} exists and is not a report; choose another --out")
    if not out.parent.is_dir():
        raise disk.RefusedError(f"{out.parent} is not a directory; choose another --out")
    disk.probe(out.parent)
