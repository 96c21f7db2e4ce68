"""Writes the page on performance from the records of benchmarks in `docs/performance`.

    sail-jax bench all --out docs/performance
    sail-jax bench all --preset long --out docs/performance     # what seldom changes
    python docs/performance.py

A flame graph is drawn from samples of py-spy 0.4:

    py-spy record --rate 500 --format raw --output stacks.txt -- sail-jax merge RECIPE OUT
    python docs/performance.py stacks.txt

`docs/performance/page.txt` is written by hand. The text that this module makes from the records
replaces each line `{{ NAME }}` of that file. Each figure holds a digest of its records.
"""

import io
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markup import table

from experiments.commands import bench
from sail_jax.provenance import versions

HERE = Path(__file__).parent
FOLDER = HERE / "performance"
PAGE = HERE / "performance.md"
NAMES = ("merge", "scale", "large", "caps", "stacks")

DRAWN = {"merges.svg": ("merge",), "scale.svg": ("scale", "large"), "flame.svg": ("stacks",)}
"""The records that each figure is drawn from."""

Record = Mapping[str, Any]
COSTS = ("cpu_seconds", "seconds", "peak_bytes")
AXES = {
    "parameters": "parameters of each of two merged models",
    "models": "merged models of 50 M parameters",
    "shards": "files of each of two models with 2,613 tensors",
    "memory": "bytes of `--max-memory`, TIES of 200 M parameters",
    "growth": "parameters of the network before growth",
    "alignment": "parameters of each network of an alignment, two sweeps",
    "dimension": "dimension d of a phase diagram",
    "draws": "data sets of a phase diagram",
    "members": "simultaneous trainings",
    "devices": "devices for 8 trainings, simulated on one CPU",
}


def records(folder: Path = FOLDER) -> dict[str, Record]:
    """Reads the existing records; `scale` without the axes that `large` measures further."""
    paths = {name: folder / f"{name}.json" for name in NAMES}
    found = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    if {"scale", "large"} <= found.keys():
        further = {row["axis"] for row in found["large"]["rows"]}
        for part in ("rows", "fits"):
            found["scale"][part] = [x for x in found["scale"][part] if x["axis"] not in further]
        if "parameters" in further:
            found["scale"]["per_byte"] = {}
    return found


def page(found: Mapping[str, Record], written: str) -> str:
    """Makes the page.

    Args:
      found: The records by name.
      written: The handwritten text, with the places of the generated parts.

    Returns:
      The page in Markdown.
    """
    made = {
        "inputs": inputs(found["merge"]),
        "merges": merges(found["merge"]),
        "allocators": allocators(found["merge"]),
        "flame": measured_on(found["stacks"]),
        "scale": scale([found[name] for name in ("scale", "large") if name in found]),
        "caps": caps(found["caps"]) if "caps" in found else "Not measured yet.",
    }
    for name, text in made.items():
        place = "{{ " + name + " }}\n"
        if written.count(place) != 1:
            raise ValueError(f"page.txt: expected one line {place.strip()}")
        written = written.replace(place, text.rstrip("\n") + "\n")
    return written


def measured_on(record: Record) -> str:
    """One sentence on commit, machine and versions."""
    machine, versions = record["machine"], record["versions"]
    peer = record.get("peer", {})
    more = "".join(f", {name} {version}" for name, version in peer.items())
    if record.get("load") is not None:
        more += f"; the load average was {record['load']:.2g} at the start"
    return (
        f"Measured at commit {record.get('commit') or 'unknown'} on {machine['cores']} cores of "
        f"{machine['processor']}, Python {versions['python']}, jax {versions['jax']}{more}."
    )


# --- merges, compared with a copy and with mergekit


def largest(record: Record) -> Record:
    """The part of a record about its largest models."""
    return max(record["speed"], key=lambda each: each["parameters"])


def inputs(record: Record) -> str:
    """A sentence on the merged checkpoints."""
    n = largest(record)["parameters"]
    return (
        "Four Llama-shaped bfloat16 checkpoints (a base and three models) of "
        f"{short(n)} parameters, {2 * n / 1e9:.2g} GB each, are merged into one."
    )


def tracks(record: Record) -> dict[str, Record]:
    """The costs of the commands of the largest size that succeeded, by name."""
    return {n: t for n, t in largest(record)["tracks"].items() if "failure" not in t}


def compared(record: Record) -> list[tuple[str, Record, Record | None, Record]]:
    """For each method the run of sail-jax, of mergekit (if there is one), and of the copy."""
    ran = tracks(record)
    names = [name.removeprefix("ours ") for name in ran if name.startswith("ours ")]
    files = {"slerp": 2, "karcher": 3}
    copies = {int(name.split()[1]): t for name, t in ran.items() if name.endswith(" synced")}
    return [
        (name, ran[f"ours {name}"], ran.get(f"peer {name}"), copies[files.get(name, max(copies))])
        for name in names
    ]


def merges(record: Record) -> str:
    """The table of merges: time and memory, compared with a copy and with mergekit."""
    rows = []
    for name, ours, peer, copy in compared(record):
        rows.append(
            [
                name,
                *_cost(ours),
                f"{ours['seconds'] / copy['seconds']:.1f}",
                *(_cost(peer) if peer else ["", "", ""]),
                f"{peer['seconds'] / ours['seconds']:.1f}" if peer else "",
            ]
        )
    heading = ["", "wall s", "CPU s", "peak GB", "x copy"]
    heading += ["mergekit wall s", "CPU s", "peak GB", "x sail-jax"]
    repeats = sorted({ours["repeats"] for _, ours, _, _ in compared(record)})
    runs = " or ".join(map(str, repeats))
    return f"{table(heading, rows)}\n\n{measured_on(record)} Medians of runs of sail-jax: {runs}.\n"


def _cost(track: Record) -> list[str]:
    peak = f"{track['peak_bytes'] / 1e9:.2f}"
    return [f"{track['seconds']:.3g}", f"{track['cpu_seconds']:.3g}", peak]


def allocators(record: Record) -> str:
    """The table of both programs with both memory allocators."""
    ran = tracks(record)
    rows = []
    for name in [n.removeprefix("untuned ours ") for n in ran if n.startswith("untuned ours ")]:
        four = [f"ours {name}", f"untuned ours {name}", f"tuned peer {name}", f"peer {name}"]
        rows.append([name, *(" / ".join(_cost(ran[n])) if n in ran else "" for n in four)])
    if not rows:
        return "These records were made without `--allocators`.\n"
    heading = ["wall s / CPU s / GB", "sail-jax, tuned (its default)", "sail-jax, glibc's"]
    return table([*heading, "mergekit, tuned", "mergekit, glibc's (its default)"], rows) + "\n"


# --- how cost grows


def scale(runs: Sequence[Record]) -> str:
    """The table of several records on the growth of cost."""
    heading = [
        "size",
        "",
        "from",
        "to",
        "CPU s",
        "exponent of CPU time",
        "of wall time",
        "of memory",
    ]
    parts = []
    for run in runs:
        fits = {(f["axis"], f["series"], f["cost"]): f for f in run["fits"]}
        rows = []
        for axis, series in series_of(run):
            own = points(run, axis, series)
            law = [fits.get((axis, series, cost)) for cost in COSTS]
            ends = [short(own[k]["size"]) for k in (0, -1)]
            seconds = " to ".join(f"{own[k]['cpu_seconds']:.3g}" for k in (0, -1))
            exponents = [f"{f['exponent']:.2f} ± {f['half']:.2f}" if f else "" for f in law]
            rows.append([AXES[axis], series, *ends, seconds, *exponents])
        parts.append(f"{table(heading, rows)}\n\n{measured_on(run)}\n{_per_byte(run)}")
    return "\n".join(parts)


def short(n: float) -> str:
    """A number in short form, such as 52 M."""
    for unit, name in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if n >= max(unit, 10_000):
            return f"{n / unit:.3g}{name}"
    return f"{n:g}"


def _per_byte(run: Record) -> str:
    """A sentence on the time per byte, where it was measured."""
    top = max((row["size"] for row in run["rows"] if row["axis"] == "parameters"), default=0)
    return "".join(
        f"From .5 to {top / 1e9:.2g} B parameters the CPU time per byte of *{series}* varies by "
        f"{spread:.0%}.\n"
        for series, spread in run["per_byte"].items()
    )


def series_of(run: Record) -> list[tuple[str, str]]:
    """The axes and series of a record that have points."""
    return list(
        dict.fromkeys(
            (row["axis"], row["series"])
            for row in run["rows"]
            if not row["start"] and "failure" not in row
        )
    )


def points(run: Record, axis: str, series: str) -> list[Record]:
    """The points of a series, by size."""
    own = [row for row in run["rows"] if (row["axis"], row["series"]) == (axis, series)]
    good = [row for row in own if not row["start"] and "failure" not in row]
    return sorted(good, key=lambda row: row["size"])


# --- memory caps


def caps(record: Record) -> str:
    """The table of the least caps that methods accept, and a sentence on all tested caps."""
    rows = record["caps"]
    sizes = sorted({row["largest"] for row in rows})
    body = []
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for size in sizes:
            least = [r for r in rows if (r["method"], r["largest"]) == (method, size)]
            asked = [r for r in least if r["cap"] == "least"]
            cells.append(_least(asked[0]) if asked else "")
        body.append([method, *cells])
    counts = record["counts"]
    tried = sum(n for kind, n in counts.items() if kind != "larger")
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()) if kind != "larger")
    over = counts.get("over", 0)
    heading = ["least cap, MB (peak, MB)", *(f"{size / 2**20:g} Mi entries" for size in sizes)]
    asked = ", ".join(dict.fromkeys(row["cap"] for row in rows))
    made = table(heading, body)
    return (
        f"{made}\n\nOf {tried} merges by these methods (caps: {asked}), {over} exceeded the cap "
        f"({kinds}). {measured_on(record)}\n"
    )


def _least(row: Record) -> str:
    cap = f"{row['bytes'] / 1e6:.0f}"
    return cap if row["kind"] == "larger" else f"{cap} ({row['peak_bytes'] / 1e6:.0f})"


# --- figures


def figures(found: Mapping[str, Record]) -> dict[str, str]:
    """Draws the figures.

    Args:
      found: The records by name.

    Returns:
      SVG by file name. Each has the digests of its records as its description.
    """
    draw = {
        "merges.svg": lambda runs: _draw_merges(runs[0]),
        "scale.svg": _draw_scale,
        "flame.svg": lambda runs: _draw_flame(runs[0]),
    }
    made = {}
    for name, drawn in DRAWN.items():
        runs = [found[record] for record in drawn if record in found]
        made[name] = _svg(draw[name](runs), runs)
    return made


def digest(records: Sequence[Record]) -> str:
    """The digest of the records of a figure."""
    import hashlib

    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()


def _svg(figure: Any, drawn: Sequence[Record]) -> str:
    import matplotlib as mpl

    text = io.StringIO()
    about = {"Date": None, "Creator": None, "Description": digest(drawn)}
    with mpl.rc_context({"svg.hashsalt": "performance", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata=about)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _draw_merges(record: Record) -> Any:
    """Two panels, one below the other: wall time and peak memory of every method."""
    from sail_jax.drawing import style

    rows = compared(record)[::-1]
    fig, axes = style.figure(2, 1, width=4.6, height=2.7)
    blue, orange = style.PALETTE[:2]
    for ax, cost, unit, per in (
        (axes[0, 0], "seconds", "wall time, s", 1),
        (axes[1, 0], "peak_bytes", "peak memory, GB", 1e9),
    ):
        for y, (_, ours, peer, copy) in enumerate(rows):
            label = y == 0
            if cost == "seconds":
                copied = {"label": "copy of the files" if label else None, "color": style.INK}
                ax.plot(copy[cost], y, "|", ms=13, mew=2, **copied)
            ax.plot(ours[cost] / per, y, "o", ms=8, color=blue, label="sail-jax" if label else None)
            if peer:
                x = peer[cost] / per
                ax.plot([ours[cost] / per, x], [y, y], "-", color=style.FAINT, lw=1, zorder=1)
                ax.plot(x, y, "s", ms=8, color=orange)
        ax.set_yticks(range(len(rows)), [name for name, *_ in rows])
        style.logarithmic(ax, "x")
        ax.tick_params(labelsize=12)
        ax.set_xlabel(unit, fontsize=12)
        ax.set_ylim(-0.6, len(rows) - 0.4)
    axes[0, 0].plot([], [], "s", ms=8, color=orange, label="mergekit")
    options = {"frameon": False, "fontsize": 11, "handletextpad": 0.3, "columnspacing": 1.0}
    known = axes[0, 0].get_legend_handles_labels()
    fig.legend(*known, loc="outside upper center", ncols=3, **options)
    return fig


def _draw_scale(runs: Sequence[Record]) -> Any:
    """A panel for every axis: CPU-seconds as points, and the fitted law as a dashed line."""
    import numpy as np
    from matplotlib.ticker import LogLocator

    from sail_jax.drawing import style

    axes_names = [
        name
        for name in AXES
        if any((name, s) in series_of(r) for r in runs for _, s in series_of(r))
    ]
    count = -(-len(axes_names) // 2)
    fig, axes = style.figure(count, 2, width=3.2, height=2.9)
    for ax in axes.flat[len(axes_names) :]:
        ax.remove()
    for ax, axis in zip(axes.flat, axes_names, strict=False):
        place = 0
        for run in runs:
            fits = {(f["axis"], f["series"]): f for f in run["fits"] if f["cost"] == "cpu_seconds"}
            for name, series in series_of(run):
                if name != axis:
                    continue
                own = points(run, axis, series)
                x = np.asarray([row["size"] for row in own], float)
                color, marker = style.PALETTE[place % 6], "osD^vP"[place % 6]
                place += 1
                fit = fits.get((axis, series))
                label = series + (f": {fit['exponent']:.2f} ± {fit['half']:.2f}" if fit else "")
                y = [row["cpu_seconds"] for row in own]
                ax.plot(x, y, marker, color=color, ms=6, label=label)
                if fit and len(x) > 1:
                    line = np.geomspace(x[0], x[-1], 50)
                    law = fit["start"] + fit["factor"] * line ** fit["exponent"]
                    ax.plot(line, law, "--", color=color, lw=1.2)
        style.logarithmic(ax, "x", "y")
        low, high = ax.get_xlim()
        if high > 50 * low:  # one label for each power of ten
            ax.xaxis.set_major_locator(LogLocator(10, (1,), numticks=5))
        ax.xaxis.set_major_formatter(lambda value, _: short(value))
        ax.set_xlabel(axis, fontsize=12)
        ax.tick_params(labelsize=11)
        ax.margins(y=0.1)
        above = {"loc": "lower left", "bbox_to_anchor": (-0.1, 1), "borderaxespad": 0.2}
        ax.legend(frameon=False, fontsize=9, handletextpad=0.2, **above)
    for ax in axes[:, 0]:
        ax.set_ylabel("CPU-seconds", fontsize=12)
    return fig


# --- a flame graph

_FRAME = re.compile(r"(?P<name>.*) \((?P<file>[^()]*)(:\d+)?\)")
OURS = "sail_jax"
WAITS = "stop_on_signals.watch"
"""A thread that waits for signals, without using the processor."""
LEAST = 0.004
"""The smallest share of the samples of a drawn function."""


def stacks(text: str) -> Record:
    """Counts the samples of py-spy by function, from its raw output.

    Frames of another package become one, and so do those that import a module.

    Args:
      text: A line `frame;frame;... count` for each stack.

    Returns:
      The record: the counts by stack, from the outermost function, and where they were measured.
    """
    found: Counter[str] = Counter()
    for line in text.splitlines():
        frames, _, count = line.rpartition(" ")
        named: list[str] = []
        for frame in frames.split(";"):
            match = _FRAME.fullmatch(frame)
            file = match["file"].split(":")[0] if match else ""
            if match is None or file.startswith("<frozen"):
                continue
            room = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            package = room.split(".")[0] if "/" in file else "Python"
            function = match["name"].replace(".<locals>", "").replace("<", "").replace(">", "")
            inner = f"{function} ({room.removeprefix(OURS + '.')})"
            label = inner if package == OURS else package
            if match["name"] == "<module>":  # of the script, or of an imported module
                label = f"import {room if package == OURS else package}" if named else "sail-jax"
            if not named or named[-1] != label:
                named.append(label)
        if WAITS not in frames.replace(".<locals>", ""):
            found[";".join(named)] += int(count)
    return {
        "commit": bench.commit(),
        "machine": bench.machine(),
        "versions": versions(),
        "stacks": dict(found),
    }


def _draw_flame(record: Record) -> Any:
    """Rectangles of functions below their callers, as wide as their share of the samples."""
    from matplotlib.patches import Rectangle

    from sail_jax.drawing import style

    total = sum(record["stacks"].values())
    shares: Counter[tuple[str, ...]] = Counter()
    for stack, count in record["stacks"].items():
        names = tuple(stack.split(";"))
        for depth in range(len(names)):
            shares[names[: depth + 1]] += count / total
    fig, axes = style.figure(1, 1, width=9.4, height=6)
    ax, left, end = axes[0, 0], {(): 0.0}, Counter[tuple[str, ...]]()
    deepest = 0
    # Callers come before the functions that they call, and the widest of these first.
    for names in sorted(shares, key=lambda names: (len(names), -shares[names])):
        above, share = names[:-1], shares[names]
        if share < LEAST or above not in left:
            continue
        left[names] = left[above] + end[above]
        end[above] += share
        depth, deepest = len(names), max(deepest, len(names))
        color = style.PALETTE[0] if "(" in names[-1] else style.PALETTE[1]
        if names[-1].startswith("import"):
            color = style.FAINT
        at = (100 * left[names], -depth)
        box = Rectangle(
            at, 100 * share, 0.96, facecolor=color, alpha=0.45, edgecolor="white", lw=0.5
        )
        ax.add_patch(box)
        if share > 0.02:
            text = names[-1][: int(155 * share)]
            ax.text(at[0] + 0.15, at[1] + 0.45, text, fontsize=7, va="center", clip_on=True)
    ax.set(xlim=(0, 100), ylim=(-deepest - 0.1, 0.1), yticks=[])
    ax.set_xlabel("share of CPU time, %", fontsize=10)
    ax.spines[["left", "top", "right"]].set_visible(False)
    return fig


def write(sampled: str = "") -> None:
    """Writes the page and its figures, and first the record of samples if a file is given."""
    if sampled:
        text = json.dumps(stacks(Path(sampled).read_text()), indent=0, sort_keys=True)
        (FOLDER / "stacks.json").write_text(text + "\n")
    found = records()
    PAGE.write_text(page(found, (FOLDER / "page.txt").read_text()))
    for name, text in figures(found).items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    write(*sys.argv[1:])
