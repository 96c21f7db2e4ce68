"""Progress of a run on the terminal: each stage as it starts, and how long it took."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from sail_jax.cli.progress import say as say  # what runs say in between


class Stage(Protocol):
    """Computes a named part of a study, or reads it back if it was computed before.

    A study's `run(config, stage)` wraps its costly parts in calls of such a function.
    `store.Run.stage` keeps results on disk; `stages.direct` keeps nothing.

    Args:
      name: The name of the part, different from all others of the run.
      compute: Computes the part: a dictionary of arrays, or of such dictionaries. It is called with
        no argument, or with one if `folder` is true.
      folder: Whether `compute` is given a directory that outlives the process, to keep there what
        it needs to go on from after a kill. It is given None where nothing is stored.

    Returns:
      The arrays, as NumPy's.
    """

    def __call__(
        self, name: str, compute: Callable[..., Mapping[str, Any]], *, folder: bool = False
    ) -> dict[str, Any]: ...


def reporting(stage: Stage, *, stream: TextIO | None = None) -> Stage:
    """Wraps a stage function so that it reports each stage on the terminal.

    It prints the name when a stage starts, and when it is done the seconds that it took, or "kept"
    if it was read back. A stage with a folder is a long one and prints lines of its own in between,
    so each of its reports is a whole line.

    Args:
      stage: The stage function.
      stream: Where the reports go; None for stderr.

    Returns:
      A stage function with the same results.
    """

    def reported(
        name: str, compute: Callable[..., Mapping[str, Any]], *, folder: bool = False
    ) -> dict[str, Any]:
        computed = False

        def noted(*where: Any) -> Mapping[str, Any]:
            """Computes, and notes that nothing was read back."""
            nonlocal computed
            computed = True
            return compute(*where)

        end, again = ("\n", f"  {name}:") if folder else ("", "")
        say(f"  {name} ...", stream=stream, end=end)
        start = time.perf_counter()
        try:
            # A stage that has no folders to give need not know of them.
            result = stage(name, noted, folder=True) if folder else stage(name, noted)
        except BaseException:
            say(f"{again} stopped", stream=stream)
            raise
        took = f"{time.perf_counter() - start:.1f} s" if computed else "kept"
        say(f"{again} {took}", stream=stream)
        return result

    return reported
