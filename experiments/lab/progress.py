"""Progress of a run on the terminal: the name of each stage when it starts, and its duration."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sail_jax.cli.progress import say as say  # what runs say in between


class Stage(Protocol):
    """Computes one part of a study, or reads it back if it was computed before.

    A study's `run(config, stage)` wraps its costly parts in calls of such a function.
    `store.Run.stage` keeps results on disk; `stages.direct` keeps nothing.

    Args:
      name: The name of the part. Each part of a run has a different name.
      compute: Computes the part: a dictionary of arrays, or of such dictionaries. It is called
        without an argument, or with one if `folder` is true.
      folder: Whether `compute` receives a directory that outlives the process. It can store
        everything that it requires to continue after a kill there. It receives None if nothing is
        stored.

    Returns:
      The arrays, as NumPy arrays.
    """

    def __call__(
        self, name: str, compute: Callable[..., Mapping[str, Any]], *, folder: bool = False
    ) -> dict[str, Any]: ...


def reporting(stage: Stage) -> Stage:
    """Wraps a stage function so that it reports each stage on the terminal.

    The report contains the name when a stage starts, and its duration in seconds, or "kept" if it
    was read back, when it is done. A stage with a folder is long and prints lines in between, so
    each of its reports is a whole line.

    Args:
      stage: The stage function.

    Returns:
      A stage function with the same results.
    """

    def reported(
        name: str, compute: Callable[..., Mapping[str, Any]], *, folder: bool = False
    ) -> dict[str, Any]:
        computed = False

        def noted(*where: Any) -> Mapping[str, Any]:
            """Computes, and records that the stage was not read back."""
            nonlocal computed
            computed = True
            return compute(*where)

        end, again = ("\n", f"  {name}:") if folder else ("", "")
        say(f"  {name} ...", end=end)
        start = time.perf_counter()
        try:
            # A stage function without folders may omit this argument.
            result = stage(name, noted, folder=True) if folder else stage(name, noted)
        except BaseException:
            say(f"{again} stopped")
            raise
        took = f"{time.perf_counter() - start:.1f} s" if computed else "kept"
        say(f"{again} {took}")
        return result

    return reported


def announcing(stage: Stage, hears: Callable[[str], None]) -> Stage:
    """Wraps a stage function so that it passes on the name of each stage when the stage starts.

    Args:
      stage: The stage function.
      hears: Receives the names.

    Returns:
      A stage function with the same results.
    """

    def announced(
        name: str, compute: Callable[..., Mapping[str, Any]], *, folder: bool = False
    ) -> dict[str, Any]:
        hears(name)
        return stage(name, compute, folder=folder)

    return announced
