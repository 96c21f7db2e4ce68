"""A page to explore two theories, which evaluates the Python formulas in the browser."""

from pathlib import Path

import jax

from experiments.lab.progress import reporting
from experiments.lab.store import direct
from experiments.pages.explorer import simulated
from sail_jax import disk
from sail_jax.cli.progress import show
from sail_jax.lazy import listed
from sail_jax.provenance import provenance

__dir__ = listed(__name__)

__all__ = ["main"]

MISSING = (
    "explore needs Bokeh, which is not installed; install it with: pip install 'sail-jax[explore]'"
)


def main(out: str | Path, *, seed: int, quick: bool) -> int:
    """Simulates estimators on data sets and writes the page.

    Args:
      out: The file. It may replace an earlier explorer, but no other file.
      seed: The seed of the simulated data sets.
      quick: Whether to use few settings and few data sets.

    Returns:
      0, the exit code.

    Raises:
      RefusedError: If Bokeh is missing or the file cannot be written. It is raised before any work.
    """
    try:
        from experiments.pages.explorer import view
    except ModuleNotFoundError as exc:
        if (exc.name or "").split(".")[0] != "bokeh":
            raise
        raise disk.RefusedError(MISSING) from exc
    out = Path(out)
    _admit(out, f'content="{view.GENERATOR}"'.encode())
    grid = simulated.TINY if quick else simulated.Grid()
    estimates = simulated.compute(grid, jax.random.key(seed), reporting(direct))
    page = view.render(grid, estimates, {**provenance()["versions"], "seed": str(seed)}).encode()
    disk.write_atomic(out, page)
    show(f"Look at {out} ({len(page) / 1e6:.1f} MB)")
    return 0


def _admit(out: Path, mark: bytes) -> None:
    """Raises an error unless `out` is new or an earlier explorer."""
    if out.exists() and (out.is_dir() or mark not in disk.read_bytes(out, 1 << 30)[:4000]):
        raise disk.RefusedError(f"{out} exists and is not an explorer; choose another --out")
    if not out.parent.is_dir():
        raise disk.RefusedError(f"{out.parent} is not a directory; choose another --out")
    disk.probe(out.parent)
