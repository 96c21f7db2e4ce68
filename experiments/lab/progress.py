"""What the terminal sees of a run: each stage as it starts, and what it took."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from sail_jax.cli.progress import say as say  # what runs say in between


class Stage(Protocol):
    """A part of a run by its name, computed once: `compute()`, or with `folder` `compute(path)` of
    a directory that outlives a kill, and of None where nothing is stored."""

    def __call__(
        self, name: str, compute: Callable[..., Mapping[str, Any]], *, folder: bool = False
    ) -> dict[str, Any]: ...


def reporting(stage: Stage, *, stream: TextIO | None = None) -> Stage:
    """The same stage, telling its name as it starts and its seconds (or `kept`) when it is done.

    What keeps a folder is long, and tells of itself in between: its lines are whole.
    """

    def reported(
        name: str, compute: Callable[..., Mapping[str, Any]], *, folder: bool = False
    ) -> dict[str, Any]:
        computed = False

        def noted(*where: Any) -> Mapping[str, Any]:
            nonlocal computed
            computed = True
            return compute(*where)

        end, again = ("\n", f"  {name}:") if folder else ("", "")
        say(f"  {name} ...", stream=stream, end=end)
        start = time.perf_counter()
        try:
            # a stage that has no folders to give need not know of them
            result = stage(name, noted, folder=True) if folder else stage(name, noted)
        except BaseException:
            say(f"{again} stopped", stream=stream)
            raise
        took = f"{time.perf_counter() - start:.1f} s" if computed else "kept"
        say(f"{again} {took}", stream=stream)
        return result

    return reported
