"""Executes the operations of commands that write a checkpoint, and prints their results."""

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sail_jax.cli.kernels import as_here, compiled_for
from sail_jax.cli.options import run_options
from sail_jax.cli.progress import Meter, fitted, say, show

if TYPE_CHECKING:
    from sail_jax.checkpoint.operations.results import Result
    from sail_jax.checkpoint.operations.running import Ready

    R = TypeVar("R", bound=Result)


def admit_last(out: str, args: Namespace) -> None:
    """Checks the output of a command on any number of inputs, where it is the last path.

    Args:
      out: The last path.

    Raises:
      CheckpointError: If it exists and is not replaced. The message mentions that it may be an
        input, with the output missing.
    """
    from sail_jax.checkpoint import CheckpointError
    from sail_jax.checkpoint.formats.folders import admit, taken

    if not taken(Path(out)):
        return
    try:
        admit(Path(out), (), args.resume, args.force)
    except CheckpointError as error:
        hint = f"The last path is the output: if {out} is an input, write the output after it"
        raise CheckpointError(f"{error}. {hint}") from error


def tell(done: "Result") -> None:
    """Prints the notes on an output, and its path."""
    tell_notes(done)
    show(outcome(done))


def tell_notes(done: "Result", shortened: Callable[[str], str] = str) -> None:
    """Prints the notes on an output.

    Args:
      shortened: Shortens a note. Notes that are equal afterwards are printed once.
    """
    for note in dict.fromkeys(map(shortened, done.notes)):
        say(fitted(f"note: {note}"))


def carry_out(
    args: Namespace,
    operation: "Callable[..., R]",
    told: "Callable[[R], None]" = tell,
    inputs: Iterable[str | Path] | None = None,
) -> None:
    """Carries out an operation here or on a cluster, and prints its result.

    Args:
      operation: Called with the options of the `run`.
      told: Prints the result. For a part of an output, one line is printed instead.
      inputs: Checkpoints for which programs are compiled quickly if they are small; None to compile
        as usual.
    """
    from sail_jax import cluster  # imported here: `--help` needs none of it

    compiled = contextlib.nullcontext
    if inputs is not None:
        compiled = partial(compiled_for, [*inputs], offline=args.offline)
    around = partial(as_here, compiled)
    # A local cluster inherits the environment, so it starts within the context.
    with (
        Meter(args.quiet) as meter,
        compiled(),
        cluster.connected(getattr(args, "on", None), around=around) as workers,
    ):
        chosen = run_options(args, meter)
        if chosen.on is not None:
            chosen = replace(chosen, on=workers)
        done = operation(run=chosen)
    if getattr(args, "part", None) is not None:
        show(outcome(done, part=args.part))
    else:
        told(done)


def outcome(done: "Result", where: object = None, part: tuple[int, int] | None = None) -> str:
    """Formats the last line of merging, growing and aligning, about the output.

    Args:
      done: The result of the operation.
      where: The start of the line; None for the output path.
      part: The part that was made; None for the whole output.

    Returns:
      One line. It also states whether an earlier call had finished the output.
    """
    where = done.out if where is None else where
    if part is not None:
        number, count = part
        how = f"in {done.seconds:.1f} s; when all are, --join makes the output"
        how = "as part of an output that was finished before" if done.unchanged else how
        return f"{where}: part {number} of {count} is complete, {how}"
    if done.unchanged:
        return f"{where}: already finished, with these {done.tensors} tensors"
    from sail_jax.checkpoint.sources.requantised import summary

    coded = summary(done.requantized)
    return f"{where}: {done.tensors} tensors in {done.seconds:.1f} s{coded and '; '}{coded}"


def show_shares(part: tuple[int, int] | None, ready: "Ready[Any]") -> None:
    """Prints what each part of an output reads and writes, if a part is requested.

    Args:
      part: The requested part; None to print nothing.
      ready: The operation.

    Raises:
      CheckpointError: If the output has fewer files than parts.
    """
    if part is None:
        return
    from sail_jax.checkpoint.operations import running
    from sail_jax.checks import storage

    shares = running.shares(ready, part[1])
    spans = [
        f"{verb} {storage(min(sizes))} to {storage(max(sizes))}"
        for verb, sizes in zip(("reads", "writes"), zip(*shares, strict=True), strict=True)
    ]
    show(f"{part[1]} parts: each {' and '.join(spans)}")
