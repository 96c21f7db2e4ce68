"""Starts a command: from the first line of `main` on, a signal ends it with one line."""

from collections.abc import Sequence

from sail_jax.cli import stopping


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    An error that the user can put right is one line on stderr. Any other exception is raised, and
    keeps its traceback.

    Args:
      argv: The command and its arguments. None means those of the process: `main` then also handles
        the signals that stop it, and tunes the garbage collector and the allocator.

    Returns:
      The exit code: 0 if all is well, 1 if a claim or a run failed or an output could not be
      written, 2 for bad usage, 130 if interrupted.
    """
    # Nothing is imported above that a signal may come before: modules that are broken off while
    # they are imported end in tracebacks, or worse.
    if argv is None:
        stopping.leave_on_signals()
    from sail_jax.cli.dispatch import run

    return run(argv)
