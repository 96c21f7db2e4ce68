"""What all command lines have in common: the parser, types of arguments, options and errors."""

import argparse
import math
import os
import pkgutil
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sail_jax.checks import nearest
from sail_jax.disk import StoreError

__all__ = [
    "Parser",
    "UsageError",
    "add_certify",
    "add_copying",
    "add_offline",
    "add_params",
    "add_tables",
    "file",
    "flag",
    "function",
    "natural",
    "numbers",
    "on_inputs",
    "outcome",
    "run_options",
    "seed",
    "size",
]


class UsageError(Exception):
    """The command line asks for something that does not exist or does not fit."""

    code = 2


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the nearest known option.

    Args:
      command: The name of the command, after "sail-jax".
      about: What `--help` says that it does.
      **options: Options of `argparse.ArgumentParser`.
    """

    def __init__(self, command: str, about: str | None = None, **options: Any) -> None:
        super().__init__(
            prog=f"sail-jax {command}", description=about, allow_abbrev=False, **options
        )

    def error(self, message: str) -> NoReturn:
        # `argparse` itself would print the usage and end the process.
        raise UsageError(f"{message}; see {self.prog} --help")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Reads the arguments of a command.

        Args:
          argv: The arguments after the name of the command.

        Returns:
          The values of the arguments by name.

        Raises:
          UsageError: If an argument or an option is unknown or missing, or a value does not fit.
        """
        # An option may stand between the input and the output.
        args, unknown = self.parse_known_intermixed_args(argv)
        if not unknown:
            return args
        word = unknown[0]
        if not word.startswith("-"):
            raise UsageError(f"unexpected argument '{word}'")
        hint = nearest(word.split("=")[0], self._option_string_actions)
        raise UsageError(f"unknown option '{word}'{hint}")


def flag(name: str, value: str) -> str:
    """Spells an argument of the library as an option of the command line.

    >>> flag("allow_nonfinite", "True"), flag("rules", "...")
    ('--allow-nonfinite', '--spec')
    """
    options = {"rules": "spec", "select": "params", "write_as": "as"}
    return "--" + options.get(name, name).replace("_", "-")


def on_inputs(
    add_arguments: Callable[[Parser], None], run: Callable[[argparse.Namespace], int]
) -> Callable[[Parser, Sequence[str]], int]:
    """Makes the `main` of a command whose ValueErrors are all about what the user gave.

    Such an error becomes a `UsageError`. A `StoreError` passes as it is.

    Args:
      add_arguments: Adds the command's arguments to the parser.
      run: Runs the command on the arguments, and returns its exit code.

    Returns:
      The function `main(parser, argv)`, which returns the exit code.
    """

    def main(parser: Parser, argv: Sequence[str]) -> int:
        add_arguments(parser)
        args = parser.read(argv)
        try:
            return run(args)
        # Many of them are ValueErrors, too.
        except StoreError:
            raise
        except ValueError as exc:
            raise UsageError(str(exc)) from exc

    return main


UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def size(text: str) -> int:
    """Reads a number of bytes, such as 500M, 1.5GB or 2GiB.

    Args:
      text: The number with its unit: k, M, G (powers of 1000) or Ki, Mi, Gi (powers of 1024), in
        upper or lower case, with or without B; bytes without a unit.

    Returns:
      The bytes, rounded down.

    Raises:
      ArgumentTypeError: If the text is no such number, or 0.

    >>> size("1.5GB"), size("2 GiB"), size("4096")
    (1500000000, 2147483648, 4096)
    """
    # Fifteen digits are enough for any memory, and can be converted whatever they are.
    match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([kmg]i?|)b?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ArgumentTypeError(f"expected a size such as 500MB or 2GiB, got '{text}'")
    return int(float(match[1]) * UNITS[match[2]])


def natural(text: str) -> int:
    """Reads a whole number from 1.

    Args:
      text: The number in decimal digits.

    Returns:
      The number.

    Raises:
      ArgumentTypeError: If the text is no such number.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a whole number from 1, got '{text}'")
    return int(text)


def numbers(text: str) -> tuple[float, ...]:
    """Reads positive numbers with commas between them.

    Args:
      text: The numbers, such as "0.1,0.4".

    Returns:
      The numbers.

    Raises:
      ArgumentTypeError: If a part is no finite positive number.
    """
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 < x < math.inf for x in values):
        raise ArgumentTypeError(f"expected positive numbers such as 0.1,0.4, got '{text}'")
    return values


def seed(text: str) -> int:
    """Reads a seed: a whole number from 0 to 2^31 - 1.

    Args:
      text: The number in decimal digits.

    Returns:
      The number.

    Raises:
      ArgumentTypeError: If the text is no such number.
    """
    if not text.isdecimal() or int(text) >= 2**31:
        raise ArgumentTypeError(f"expected an integer from 0 to 2^31 - 1, got '{text}'")
    return int(text)


def function(text: str) -> Callable[..., Any]:
    """Imports the function that MODULE:FUNCTION names.

    The module is run. Modules may lie in the working directory, as for `python -m`.

    Args:
      text: The module and the name in it.

    Returns:
      The function.

    Raises:
      ArgumentTypeError: If the text has another form, the module cannot be imported, or what it
        names is not callable.
    """
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text):
        raise ArgumentTypeError(f"expected MODULE:FUNCTION, or nothing at the end, got '{text}'")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        value = pkgutil.resolve_name(text)
    # The module is the user's, and may raise anything when it is imported.
    except Exception as error:
        raise ArgumentTypeError(f"{text}: {type(error).__name__}: {error}") from error
    if not callable(value):
        raise ArgumentTypeError(f"{text} is no function, but {type(value).__name__}")
    return value


def file(text: str) -> Path:
    """Reads the path of a file that is to be read.

    Args:
      text: The path.

    Returns:
      The path.

    Raises:
      ArgumentTypeError: If no plain file is there.
    """
    # pathlib would raise an error for what is too long to be a path.
    if not os.path.isfile(text):
        raise ArgumentTypeError(f"{text} is missing or not a plain file")
    return Path(text)


def add_tables(parser: Any, checkpoint: str) -> None:
    """Adds --config and --spec, which say what spaces the tensors of a checkpoint live in.

    Args:
      parser: The parser of the command.
      checkpoint: What its help calls the checkpoint, such as "CKPT".
    """
    add = parser.add_argument
    add(
        "--config",
        metavar="FILE",
        type=Path,
        help=f"the configuration to use instead of {checkpoint}/config.json",
    )
    add(
        "--spec",
        metavar="FILE",
        type=file,
        help="a YAML or JSON file that says in which spaces the axes of the tensors live",
    )


def add_certify(parser: Any) -> None:
    """Adds --certify and --no-certify: whether outputs are compared before and after, and how.

    The code that --certify names is run. It can be named on the command line alone, so that no file
    that is read can name it.

    Args:
      parser: The parser of the command.
    """
    add = parser.add_argument
    add(
        "--certify", metavar="MODULE:FUNCTION", nargs="?", const=True, type=function,
        help="run both networks on probe inputs and compare their outputs; by the forward pass of "
        "a known architecture, or by your FUNCTION(tensors, config)",
    )  # fmt: skip
    add(
        "--no-certify",
        dest="certify",
        action="store_false",
        help="do not run the networks; by default they are run if both are small",
    )


def add_copying(parser: Any) -> None:
    """Adds the options of commands that read checkpoints and write one, such as --resume.

    Args:
      parser: The parser of the command.
    """
    add = parser.add_argument
    add("--resume", action="store_true", help="continue this command where it was interrupted")
    add(
        "--force",
        action="store_true",
        help="replace an output folder that sail-jax wrote and nobody changed; the old one stays "
        "until the new one is whole",
    )
    add(
        "--max-memory",
        metavar="SIZE",
        type=size,
        help="keep the memory of the process below this, such as 2GB",
    )
    add(
        "--threads",
        metavar="N",
        type=natural,
        help="worker threads; default: one for each core, at most 8",
    )
    add(
        "--format",
        metavar="NAME",
        help="format of the output, such as orbax or npz; default: told from the name OUT",
    )
    add(
        "--shard-size",
        metavar="SIZE",
        type=size,
        default=5 * 10**9,
        help="largest size of one file of a sharded output; default: 5GB",
    )
    add_params(parser)
    add("--allow-nonfinite", action="store_true", help="do not stop at NaN and infinities")
    add(
        "--allow-pickle",
        action="store_true",
        help="read PyTorch's .bin files; their pickles are parsed, never run",
    )
    add_offline(parser)
    add("--quiet", action="store_true", help="show no progress")


def add_offline(parser: Any) -> None:
    """Adds --offline, with which models on the Hub are read from the cache alone.

    Args:
      parser: The parser of the command.
    """
    parser.add_argument(
        "--offline",
        action="store_true",
        help="read org/name[@revision] from the cache of the Hub only; nothing is downloaded",
    )


def add_params(parser: Any) -> None:
    """Adds --params, which says which tensors of a checkpoint are worked on.

    Args:
      parser: The parser of the command.
    """
    parser.add_argument(
        "--params",
        dest="select",
        metavar="GLOB",
        help="take only the tensors that these patterns fit, such as 'params/*,batch_stats/*'; "
        "default: the weights of a state of training, and all tensors of anything else",
    )


def outcome(done: Any, tensors: int, where: object = None) -> str:
    """Writes the line about the output that merging, growing and aligning end with.

    Args:
      done: What the operation returned, with `out`, `seconds` and `unchanged`.
      tensors: How many tensors the output has.
      where: What the line begins with; None for the place of the output.

    Returns:
      One line, also about whether an earlier call had finished the output.
    """
    where = done.out if where is None else where
    if done.unchanged:
        return f"{where}: finished before, and holds these {tensors} tensors"
    return f"{where}: {tensors} tensors in {done.seconds:.1f} s"


def run_options(args: Any, progress: Any = None) -> Any:
    """Makes the `RunOptions` of the options that `add_copying` adds.

    Args:
      args: The arguments of the command line.
      progress: Told about progress, such as a `Meter`; None for nobody.

    Returns:
      The options of the run.
    """
    from sail_jax.checkpoint import RunOptions

    return RunOptions(
        resume=args.resume, max_memory=args.max_memory, threads=args.threads,
        allow_nonfinite=args.allow_nonfinite, allow_pickle=args.allow_pickle, offline=args.offline,
        format=args.format, shard_bytes=args.shard_size, select=args.select, progress=progress,
        force=args.force,
    )  # fmt: skip
