"""One page on which two theories can be explored: computed in Python, looked up in the browser."""

from pathlib import Path

import jax

from experiments.lab.progress import reporting
from experiments.lab.store import direct
from experiments.pages.explorer import pretraining, transfer
from sail_jax import disk
from sail_jax.cli.progress import show
from sail_jax.provenance import provenance

__all__ = ["main"]

MISSING = (
    "explore needs Bokeh, which is not installed; install it with: pip install 'sail-jax[explore]'"
)


def main(out: str | Path, *, seed: int, quick: bool) -> int:
    """Computes the tables and writes the page.

    Args:
      out: The file; it may replace an earlier explorer, nothing else.
      seed: Seed of the simulated data sets.
      quick: Whether the grids are coarse.

    Returns:
      0, the exit code.

    Raises:
      RefusedError: If Bokeh is missing or the file cannot be written; before any work.
    """
    try:
        from experiments.pages.explorer import view
    except ModuleNotFoundError as exc:
        if (exc.name or "").split(".")[0] != "bokeh":
            raise
        raise disk.RefusedError(MISSING) from exc
    out = Path(out)
    _admit(out, f'content="{view.GENERATOR}"'.encode())
    transfers = transfer.TINY if quick else transfer.Grid()
    pretrained = pretraining.TINY if quick else pretraining.Grid()
    stage = reporting(direct)
    first = transfer.compute(transfers, jax.random.key(seed), stage)
    second = pretraining.compute(pretrained, stage)
    about = {**provenance()["versions"], "seed": str(seed)}
    page = view.render((transfers, first), (pretrained, second), about).encode()
    disk.write_atomic(out, page)
    show(f"Look at {out} ({len(page) / 1e6:.1f} MB)")
    return 0


def _admit(out: Path, mark: bytes) -> None:
    """A page may replace one of its kind, nothing else."""
    if out.exists() and (out.is_dir() or mark not in disk.read_bytes(out, 1 << 30)[:4000]):
        raise disk.RefusedError(f"{out} exists and is no explorer; choose another --out")
    if not out.parent.is_dir():
        raise disk.RefusedError(f"{out.parent} is not a directory; choose another --out")
    disk.probe(out.parent)
