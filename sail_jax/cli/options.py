"""Common parts of all command lines: the parser, types of arguments, options and errors."""

import argparse
import contextlib
import math
import os
import pkgutil
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from sail_jax.checks import nearest
from sail_jax.cli.progress import Meter
from sail_jax.disk import StoreError

if TYPE_CHECKING:
    from sail_jax.checkpoint import RunOptions

T = TypeVar("T")


class UsageError(Exception):
    """Raised if the command line contains something unknown or invalid."""

    code = 2


class Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors that suggest the closest option.

    Args:
      command: The name of the command, after "sail-jax".
      about: The description in `--help`.
      example: The example at the end of `--help`, a command line.
      **options: Options of `argparse.ArgumentParser`.

    Attributes:
      latest: The last parser that read arguments (of the running command); None before.
    """

    latest: "ClassVar[Parser | None]" = None

    def __init__(
        self, command: str, about: str | None = None, example: str = "", **options: Any
    ) -> None:
        super().__init__(
            prog=f"sail-jax {command}", description=about, allow_abbrev=False, **options
        )
        self.example = example

    def format_help(self) -> str:
        """Formats the help, with the example at its end."""
        return super().format_help() + (f"\nexample:\n  {self.example}\n" if self.example else "")

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            option = message.partition(":")[0].split("/")[-1].removeprefix("argument ")
            message += f" (a value that starts with '-' is written {option}=-1)"
        # `argparse` itself would print the usage and exit.
        raise UsageError(f"{message}; see {self.prog} --help")

    def takes(self, option: str) -> bool:
        """Checks whether the command has this option."""
        return option in self._option_string_actions

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Reads the arguments of a command.

        Args:
          argv: The arguments after the name of the command.

        Returns:
          The values of the arguments by name.

        Raises:
          UsageError: If an argument or an option is unknown or missing, or a value is invalid.
        """
        Parser.latest = self
        # Options may come between the input and the output.
        args, unknown = self.parse_known_intermixed_args(argv)
        if not unknown:
            return args
        word = unknown[0]
        if not word.startswith("-"):
            raise UsageError(f"unexpected argument '{word}'")
        known = self._option_string_actions.items()
        shown = [option for option, action in known if action.help is not argparse.SUPPRESS]
        raise UsageError(f"unknown option '{word}'{nearest(word.split('=')[0], shown)}")


def flag(name: str, value: str) -> str:
    """Formats an argument of a Python function as an option of the command line.

    Args:
      name: The name of the argument.
      value: Its value, which is ignored.

    Returns:
      The option.

    >>> flag("allow_nonfinite", "True"), flag("rules", "...")
    ('--allow-nonfinite', '--spec')
    """
    options = {
        "rules": "spec", "select": "params", "write_as": "as", "shard_bytes": "shard-size"
    }  # fmt: skip
    return "--" + options.get(name, name).replace("_", "-")


MODULES = 300 << 20
"""Bytes of a process that has imported and opened what `grow`, `align`, `transplant` and `upcycle`
need before they can refuse a limit, as measured."""


def on_inputs(
    add_arguments: Callable[[Parser], None],
    run: Callable[[argparse.Namespace], None],
    least: int = 0,
) -> Callable[[Parser, Sequence[str]], int]:
    """Makes the `main` of a command that raises ValueErrors only for invalid user input.

    A ValueError becomes a `UsageError`. A `StoreError` passes unchanged.

    Args:
      add_arguments: Adds the command's arguments to the parser.
      run: Runs the command on the arguments.
      least: Bytes that the command requires before it can check a limit. A lower `max_memory` is
        refused at once.

    Returns:
      The function `main(parser, argv)`, which returns the exit code 0.
    """

    def main(parser: Parser, argv: Sequence[str]) -> int:
        add_arguments(parser)
        args = parser.read(argv)
        limit = getattr(args, "max_memory", None)
        if limit is not None and limit < least:
            raise UsageError(
                f"--max-memory: the program alone needs {least >> 20} MiB, got {limit >> 20} MiB"
            )
        try:
            run(args)
        # Many of them are ValueErrors, too.
        except StoreError:
            raise
        except ValueError as exc:
            raise UsageError(str(exc)) from exc
        return 0

    return main


def reader(
    parse: Callable[[str], T], holds: Callable[[T], bool], expected: str
) -> Callable[[str], T]:
    """Makes the function that parses an option's value.

    Args:
      parse: Converts the text; raises a ValueError if it cannot.
      holds: Checks the value.
      expected: The description of valid values in the error message.

    Returns:
      The function from text to value, for `argparse`.

    >>> reader(float, lambda x: 0 < x <= 1, "a number above 0, up to 1")("0.9")
    0.9
    """

    def read(text: str) -> T:
        with contextlib.suppress(ValueError):
            if holds(value := parse(text)):
                return value
        raise ArgumentTypeError(f"expected {expected}, got '{text}'")

    return read


def _decimal(text: str) -> int:
    """Parses a whole number that consists of decimal digits only."""
    if not text.isdecimal():
        raise ValueError
    return int(text)


def _several(text: str) -> tuple[float, ...]:
    """Parses numbers separated by commas."""
    return tuple(float(part) for part in text.split(","))


UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def _bytes(text: str) -> int:
    """Parses a size with its unit: k, M, G, Ki, Mi or Gi in either case, with or without B.

    >>> _bytes("1.5GB"), _bytes("2 GiB"), _bytes("4096")
    (1500000000, 2147483648, 4096)
    """
    # Fifteen digits are enough for any memory and convert safely.
    match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([kmg]i?|)b?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ValueError
    return int(float(match[1]) * UNITS[match[2]])


size = reader(_bytes, lambda n: n >= 0, "a size such as 500MB or 2GiB")
natural = reader(_decimal, lambda n: n >= 1, "a whole number >= 1")
seed = reader(_decimal, lambda n: n < 2**31, "an integer from 0 to 2^31 - 1")
positive = reader(float, lambda x: 0 < x < 1e6, "a positive number")
numbers = reader(
    _several,
    lambda values: all(0 < x < math.inf for x in values),
    "positive numbers such as 0.1,0.4",
)
weights = reader(
    _several, lambda values: all(map(math.isfinite, values)), "numbers such as 0.2,0.3,0.5"
)


def entry(text: str) -> tuple[str, object]:
    """Reads KEY=VALUE. The value is YAML; "2x" stays text.

    Args:
      text: The value of the option.

    Returns:
      The key and the value.

    Raises:
      ArgumentTypeError: If the key is missing, or the value is not valid YAML.

    >>> entry("snr_db=20"), entry("hidden_size=2x")
    (('snr_db', 20), ('hidden_size', '2x'))
    """
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ArgumentTypeError(f"expected KEY=VALUE, got '{text}'")
    from sail_jax.checkpoint.recipe.declared import plain
    from sail_jax.checkpoint.recipe.yaml_tree import RecipeError, compose

    try:
        return key, plain(compose(value, key))
    except RecipeError as error:
        raise ArgumentTypeError(f"{error}, in '{value}'") from error


def function(text: str) -> Callable[..., Any]:
    """Imports the function in MODULE:FUNCTION.

    Importing runs the module, which may be in the working directory, as for `python -m`.

    Args:
      text: The module and the name in it.

    Returns:
      The function.

    Raises:
      ArgumentTypeError: If the text has another form, the import fails, or the object is not
        callable.
    """
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text):
        raise ArgumentTypeError(f"expected MODULE:FUNCTION, or no value at the end, got '{text}'")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        value = pkgutil.resolve_name(text)
    # The user's module may raise any exception during its import.
    except Exception as error:
        raise ArgumentTypeError(f"{text}: {type(error).__name__}: {error}") from error
    if not callable(value):
        raise ArgumentTypeError(f"{text} is not a function, but {type(value).__name__}")
    return value


def file(text: str) -> Path:
    """Reads the path of an input file.

    Args:
      text: The path.

    Returns:
      The path.

    Raises:
      ArgumentTypeError: If the path is not a plain file.
    """
    if os.path.isdir(text):
        raise ArgumentTypeError(f"expected a file; {text} is a folder")
    # pathlib would raise an error for texts that are too long to be a path.
    if not os.path.isfile(text):
        raise ArgumentTypeError(f"{text} is missing or not a plain file")
    return Path(text)


def add_input(parser: Parser, name: str, metavar: str, what: str, **options: Any) -> None:
    """Adds an argument for an input checkpoint.

    Args:
      name: The argument of the command's function in Python.
      metavar: Its label in the usage line.
      what: Its description in the help, such as "the checkpoint to grow".
      **options: Further options of `add_argument`.
    """
    where = "a folder, a file of tensors, or a name on the Hub"
    parser.add_argument(name, metavar=metavar, help=f"{what}: {where}", **options)


def add_output(parser: Parser, what: str, **options: Any) -> None:
    """Adds the argument OUT.

    Args:
      what: The output's description in the help, such as "the merge".
      **options: Further options of `add_argument`.
    """
    where = "a folder, or a .safetensors or .npz file"
    parser.add_argument(
        "out", metavar="OUT", type=Path, help=f"output path of {what}: {where}", **options
    )


def add_seed(parser: Parser, what: str, default: int | None = None) -> None:
    """Adds --seed.

    Args:
      what: What the seed determines.
      default: The value without the option; None if the called function itself defaults to 0.
    """
    about = f"seed of {what}; default: 0"
    parser.add_argument("--seed", metavar="N", type=seed, default=default, help=about)


def add_set(parser: Parser) -> None:
    """Adds --set, which sets options of a method."""
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        type=entry,
        default=[],
        help="set an option of the method",
    )


def add_tables(parser: Parser, checkpoint: str) -> None:
    """Adds --config and --spec, which define the spaces of a checkpoint's tensors.

    Args:
      checkpoint: The checkpoint's label in the help, such as "CKPT".
    """
    add = parser.add_argument
    add(
        "--config",
        metavar="FILE",
        type=Path,
        help=f"a configuration that replaces {checkpoint}/config.json",
    )
    add(
        "--spec",
        metavar="FILE",
        type=file,
        help="a YAML or JSON file with the spaces of the tensors' axes",
    )


def add_certify(parser: Parser) -> None:
    """Adds --certify and --no-certify: whether and how to compare outputs before and after.

    --certify MODULE:FUNCTION runs code. It is accepted only on the command line, never from a file.
    """
    add = parser.add_argument
    add(
        "--certify", metavar="MODULE:FUNCTION", nargs="?", const=True, type=function,
        help="run both networks on probe inputs and compare their outputs, with the forward pass "
        "of a known architecture or with your FUNCTION(tensors, config)",
    )  # fmt: skip
    add(
        "--no-certify",
        dest="certify",
        action="store_false",
        help="do not run the networks; by default they run if both are small",
    )


def add_strict(parser: Parser) -> None:
    """Adds --strict, for commands that read recipes."""
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse recipes with settings that have no effect; by default a note is printed",
    )


def add_copying(parser: Parser) -> None:
    """Adds the options of commands that read checkpoints and write one, such as --resume."""
    add = parser.add_argument
    add("--resume", action="store_true", help="continue this command after an interruption")
    add(
        "--force",
        action="store_true",
        help="replace an output folder that sail-jax wrote and nobody changed; the old folder "
        "stays until the new one is complete",
    )
    add("--keep-old", action="store_true", help="keep what --force replaces, as OUT.old")
    add(
        "--max-memory",
        metavar="SIZE",
        type=size,
        help="limit the memory of the process, for example to 2GB",
    )
    add(
        "--threads",
        metavar="N",
        type=natural,
        help="worker threads; default: one per core, at most 8",
    )
    add(
        "--format",
        metavar="NAME",
        help="format of the output, such as orbax or npz; default: from the name OUT",
    )
    add(
        "--shard-size",
        dest="shard_bytes",
        metavar="SIZE",
        type=size,
        default=argparse.SUPPRESS,
        help="largest size of one file of a sharded output; default: 5GB",
    )
    add_params(parser)
    add(
        "--requantize",
        choices=("fp8",),
        help="write FP8 weights, in the scheme of the input that provides config.json",
    )
    add("--allow-nonfinite", action="store_true", help="accept NaN and infinities")
    add(
        "--allow-pickle",
        action="store_true",
        help="read PyTorch's .bin files; their pickles are parsed, never run",
    )
    add_offline(parser)
    add("--quiet", action="store_true", help="hide the progress")


def _part(text: str) -> tuple[int, int]:
    """Parses a part in the form I/N.

    >>> _part("2/4")
    (2, 4)
    """
    number, count = map(_decimal, text.split("/"))
    return number, count


part = reader(_part, lambda p: 1 <= p[0] <= p[1] < 1e6, "I/N, such as 1/4 for the first of four")
seconds = reader(float, lambda x: 0 <= x < 1e9, "a number of seconds")


def add_on(group: "Parser | argparse._ArgumentGroup", what: str) -> None:
    """Adds --on, which gives independent work to a cluster.

    Args:
      group: The parser, or a group of its options.
      what: What the workers do, for the help.
    """
    from sail_jax.cluster import KINDS, is_address

    group.add_argument(
        "--on",
        metavar="CLUSTER",
        type=reader(str, is_address, KINDS),
        help=f"{what} on the workers of a Dask cluster: {KINDS}",
    )


def add_parts(parser: Parser) -> None:
    """Adds the options for an output that several processes make, such as --on and --part."""
    group = parser.add_argument_group("several processes, on a shared file system")
    add_on(group, "make the parts of OUT")
    add = group.add_argument
    add(
        "--part",
        metavar="I/N",
        type=part,
        help="make part I of N, some of the files of OUT; each part is a separate process, on the "
        "same host or another; --resume continues it",
    )
    add("--join", action="store_true", help="make OUT from its parts, once all are complete")
    add(
        "--wait",
        metavar="SECONDS",
        type=seconds,
        default=argparse.SUPPRESS,
        help="how long a part that needs statistics of other parts waits for them without a sign "
        "of life; default: 600",
    )


def add_offline(parser: Parser) -> None:
    """Adds --offline, which reads models on the Hub only from the cache."""
    parser.add_argument(
        "--offline",
        action="store_true",
        help="read org/name[@revision] only from the Hub's cache, without downloads",
    )


def add_params(parser: Parser) -> None:
    """Adds --params, which selects tensors of a checkpoint."""
    parser.add_argument(
        "--params",
        dest="select",
        metavar="GLOB",
        help="use only the tensors that match these patterns, such as 'params/*,batch_stats/*'; "
        "default: the weights of a training state, and all tensors of other checkpoints",
    )


def run_options(args: argparse.Namespace, progress: Meter | None = None) -> "RunOptions":
    """Makes the `RunOptions` of a command line, whose options have the names of its fields.

    Args:
      progress: The progress display; None for none.

    Returns:
      The options of the run.
    """
    from dataclasses import fields

    from sail_jax.checkpoint import RunOptions

    known = {field.name for field in fields(RunOptions)}
    chosen = {name: value for name, value in vars(args).items() if name in known}
    return RunOptions(**chosen, progress=progress)


def arguments(args: argparse.Namespace, *own: str) -> dict[str, Any]:
    """Collects the arguments for a command's Python function, which are the names of its options.

    Args:
      *own: Options that only the command itself uses. --quiet is one of them.

    Returns:
      The given values by name, without the values for `run_options`.
    """
    from dataclasses import fields  # imported here: it is slow, and `--help` needs none

    from sail_jax.checkpoint import RunOptions

    others = {*own, "quiet", *(field.name for field in fields(RunOptions))}
    return {k: v for k, v in vars(args).items() if v is not None and k not in others}
