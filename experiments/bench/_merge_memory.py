"""Peak resident memory of merges against the size of models that differ only in depth."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.bench._llama import Llama
from experiments.bench._measuring import print_table, process
from experiments.bench._merge_recipes import Job
from experiments.bench._merge_speed import checkpoints, write_recipe
from sail_jax import disk
from sail_jax.cli.progress import say

# Equal tensors, more of them: memory may depend on the largest tensor, not on the model's size.
DEPTHS = {f"depth-{n}": Llama(1024, 2816, n, 16_000) for n in (1, 5, 17, 36)}


def run(
    folder: Path,
    ours: Sequence[str],
    jobs: Mapping[str, Job],
    caps: Sequence[str],
    picture: Path,
    depths: Mapping[str, Llama] = DEPTHS,
) -> dict[str, Any]:
    """Merges models of several sizes under several memory limits, and draws a figure.

    Only the checkpoints of one size are on disk at a time.

    Args:
      folder: The folder for checkpoints and outputs.
      ours: The command that merges; recipe and output are appended.
      jobs: The merges, by name.
      caps: Values of `--max-memory`; "" leaves the option out.
      picture: The .png file to write.
      depths: The models, by name.

    Returns:
      The record: a row for each merge, with peak and seconds, and whether every merge ran.
    """
    rows = []
    for name, llama in depths.items():
        models = checkpoints(folder, name, llama)
        for method, job in jobs.items():
            path = folder / "recipes" / f"{name}-{method}.yaml"
            recipe = write_recipe(path, job.recipe(models, ours=True))
            for cap in caps:
                shutil.rmtree(out := folder / "out", ignore_errors=True)
                option = ["--max-memory", cap] if cap else []
                command = [*ours, str(recipe), str(out), *option]
                sample = process(command, folder / "log.txt")
                say(f"  {name} {method} {cap or 'default'}: {sample.peak / 1e9:.2f} GB")
                row = {"parameters": llama.parameters, "method": method, "cap": cap}
                usage = {"peak_bytes": sample.peak, "seconds": sample.seconds}
                rows.append(row | ({"failure": sample.failure} if sample.failure else usage))
        shutil.rmtree(folder / name)
        shutil.rmtree(folder / "out", ignore_errors=True)
    _print(rows)
    draw(rows, picture)
    return {"good": not any("failure" in row for row in rows), "memory": rows}


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the peaks in a table, one column for each size."""
    sizes = sorted({row["parameters"] for row in rows})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        text = row["failure"] if "failure" in row else f"{row['peak_bytes'] / 1e9:.2f}"
        cells.setdefault((row["method"], row["cap"]), {})[row["parameters"]] = text
    header = ("peak GB", "--max-memory", *(f"{size / 1e6:.0f} M" for size in sizes))
    body = [(m, cap or "default", *(c[size] for size in sizes)) for (m, cap), c in cells.items()]
    print_table([header, *body])


def draw(rows: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draws peak memory against model size, one panel for each memory limit.

    The dashed line is the size of one model on disk.

    Args:
      rows: The rows of the record.
      picture: The .png file to write.
    """
    from sail_jax.drawing import style

    caps = list(dict.fromkeys(row["cap"] for row in rows))
    size = {"width": 3.4, "height": 3.6, "sharey": True}
    fig, axes = style.figure(1, len(caps), **size)
    for ax, cap in zip(axes[0], caps, strict=True):
        at_cap = [row for row in rows if row["cap"] == cap and "failure" not in row]
        for i, method in enumerate(dict.fromkeys(row["method"] for row in at_cap)):
            line = [
                (r["parameters"] / 1e6, r["peak_bytes"] / 1e9)
                for r in at_cap
                if r["method"] == method
            ]
            dash = "-" if i < len(style.PALETTE) else ":"
            ax.plot(*zip(*line, strict=True), dash, marker="o", ms=4, label=method)
        x = sorted({row["parameters"] / 1e6 for row in rows})
        ax.plot(x, [2e-3 * v for v in x], color=style.FAINT, ls="--", lw=1, label="one input file")
        ax.set_title(f"--max-memory {cap}" if cap else "default memory")
        ax.set_xlabel("parameters (millions)")
        ax.set_ylim(bottom=0)
    axes[0, 0].set_ylabel("peak resident memory (GB)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    disk.write_atomic(picture, style.png(fig))
