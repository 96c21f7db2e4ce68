"""Starts a command. From the first line of `main` on, a signal ends the process with one line."""

from collections.abc import Sequence

from sail_jax.cli import stopping


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    An error that the user can fix is printed as one line on stderr. Any other exception is raised
    with its traceback.

    Args:
      argv: The command and its arguments. With None, `main` reads the arguments of the process,
        handles its signals, and tunes the garbage collector and the allocator.

    Returns:
      The exit code: 0 for success, 1 if a claim or a run failed or an output could not be written,
      2 for bad usage, 130 if interrupted.
    """
    # Nothing slow is imported above, because a signal during the import of a module ends in a
    # traceback, or worse.
    if argv is None:
        stopping.leave_on_signals()
    from sail_jax.cli.dispatch import run

    return run(argv)
