"""Finished runs as one self-contained page, with the papers' printed figures beside their own."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.lab import registry, store
from experiments.lab.findings import Finding, evidence, rule
from experiments.lab.registry import Study
from sail_jax import disk
from sail_jax.cli.progress import say, show
from sail_jax.drawing import pages, style

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

PAGE = "report.html"
HEADER = ("claim", "where", "paper, at its scale")
OTHER = "another scale than the paper's"
FOLDERS = 10_000  # that are looked into
DEPTH = 8  # folders below the one that is asked for


def main(directory: str | Path, out: str | Path | None = None) -> int:
    """Writes the page of all finished runs in `directory` and below; returns 1 if one could not be
    read. Runs that are not finished are told and left out."""
    directory = Path(directory)
    out = directory / PAGE if out is None else Path(out)
    if not directory.is_dir():
        raise disk.RefusedError(f"{directory} is not a directory")
    _admit(out)
    sections, unfinished, bad = [], [], []
    for path in [*found(directory)]:
        try:
            run = store.reopen(path)
            sections.append(_run(path.relative_to(directory), run))
            say(f"  {path}")
        except disk.RefusedError as exc:
            unfinished.append(str(exc))
        except disk.StoreError as exc:
            bad.append(str(exc))
        except (LookupError, TypeError, ValueError) as exc:
            why = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
            bad.append(f"{path}: this version cannot show what it holds ({why})")
    for line in (*unfinished, *bad):
        say(f"  left out: {line}")
    if not sections:
        raise disk.RefusedError(f"{directory} holds no finished run; make one with: sail-jax run")
    about = {
        "runs": str(len(sections)),
        **({"left out": "; ".join((*unfinished, *bad))} if unfinished or bad else {}),
        "figures": "drawn from the stored results",
    }
    page = pages.page("sail-jax: what was run, and what was found", sections, about)
    disk.write_atomic(out, page.encode())
    show(f"Look at {out}")
    return 1 if bad else 0


def found(directory: Path) -> Iterator[Path]:
    """Folders of runs, in order of their names; links are not followed.

    Raises RefusedError where there are so many folders that none can have been meant, such as "/".
    """
    for seen, (folder, inside, files) in enumerate(os.walk(directory)):
        if seen == FOLDERS:
            raise disk.RefusedError(
                f"{directory} has more than {FOLDERS} folders; name one that holds runs"
            )
        inside.sort()
        path = Path(folder)
        if store.RECORD in files and (store.RESULT in files or "stages" in inside):
            yield path
            inside.clear()  # what a run keeps is its own
        elif len(path.relative_to(directory).parts) >= DEPTH:
            inside.clear()


def section(
    heading: str,
    study: Study,
    dataset: "xr.Dataset",
    figures: Mapping[str, "Figure"],
    findings: Sequence[Finding],
    scale: str = OTHER,
) -> pages.Section:
    """One run: question, answer, figures, and where the study has them its tables and what became
    of the papers' claims."""
    pictures = [(style.describe(figure), style.png(figure)) for figure in figures.values()]
    tables, answer = study.tables(dataset), study.summary(dataset)
    if findings:
        rows = [(f.claim, f.where, f.paper, f.here + evidence(f), f.verdict) for f in findings]
        tables.append(((*HEADER, f"here, at {scale}", "verdict"), *rows))
        answer = "\n".join(filter(None, (answer, rule(findings))))
    return pages.Section(heading, study.question, answer, pictures, tables)


def _run(place: Path, run: store.Run) -> pages.Section:
    record = run.record
    name = record["experiment"]
    study = registry.load(name)
    dataset, figures = store.drawn(run, study)
    findings = study.findings(dataset)
    heading = name if place.name == name or place == Path() else f"{name} ({place})"
    preset = preset_of(study, record["config"])
    scale = "the paper's scale" if (preset or "").startswith("paper") else OTHER
    options = (f" --preset {preset}" if preset else "") + f" --seed {record['seed']}"
    details = {
        "preset": preset or "none of them: see config",
        **({"scale": scale} if findings else {}),  # beside the printed
        **origin(dataset),
        "computing time": f"{float(dataset.attrs['wall_seconds']):.0f} s",
        "result": f"{store.RESULT}, SHA-256 {record['result']['sha256']}",
        **({"again": f"sail-jax run {name}{options}"} if preset else {}),
        "config": json.dumps(record["config"], ensure_ascii=False),
    }
    return section(heading, study, dataset, figures, findings, scale)._replace(details=details)


def preset_of(study: Study, config: Mapping[str, Any]) -> str | None:
    """Which preset a stored config is, but for its seed: one that says all of it, or else one that
    leaves open (None) where data are. Of equal presets it is the first, the default."""
    for left_open in (False, True):
        for name, preset in study.presets.items():
            stated = {**store.config_record(preset), "seed": config.get("seed")}
            if _says(stated, config, left_open=left_open):
                return name
    return None


def _says(stated: Any, actual: Any, *, left_open: bool) -> bool:
    """Whether a value, or all of a group, is what a preset states."""
    if isinstance(stated, dict):
        return (
            isinstance(actual, dict)
            and stated.keys() == actual.keys()
            and all(_says(stated[k], actual[k], left_open=left_open) for k in stated)
        )
    return stated == actual or (left_open and stated is None and isinstance(actual, str | list))


def origin(dataset: "xr.Dataset") -> dict[str, str]:
    """Where a stored dataset comes from."""
    attrs: Mapping[str, Any] = dataset.attrs
    versions = json.loads(attrs["versions"])
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "device": f"{attrs['device_count']} x {attrs['device']}",
        "seed": str(attrs["seed"]),
        "started": attrs["started"],
    }


def _admit(out: Path) -> None:
    """A page may replace one of its kind, nothing else."""
    mark = b"<title>sail-jax"
    if out.exists() and (out.is_dir() or mark not in disk.read_bytes(out, 1 << 30)[:2000]):
        raise disk.RefusedError(f"{out} exists and is no report; choose another --out")
    if not out.parent.is_dir():
        raise disk.RefusedError(f"{out.parent} is not a directory; choose another --out")
    disk.probe(out.parent)
