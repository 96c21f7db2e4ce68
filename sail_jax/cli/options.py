"""What all command lines have in common: the parser, types of arguments, options and errors."""

import argparse
import contextlib
import math
import os
import pkgutil
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from sail_jax.checks import nearest
from sail_jax.cli.progress import Meter, show
from sail_jax.disk import StoreError

if TYPE_CHECKING:
    from sail_jax.checkpoint import RunOptions
    from sail_jax.checkpoint.operations.results import Result
    from sail_jax.checkpoint.operations.running import Ready
    from sail_jax.checkpoint.sources.requantised import Requantisation

T = TypeVar("T")


class UsageError(Exception):
    """The command line asks for something that does not exist or does not fit."""

    code = 2


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the nearest known option.

    Args:
      command: The name of the command, after "sail-jax".
      about: What `--help` prints that it does.
      example: A line that runs it, at the end of `--help`.
      **options: Options of `argparse.ArgumentParser`.

    Attributes:
      latest: The parser that read arguments last, that of the command that runs; None before.
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
        """The help, with the example at its end."""
        return super().format_help() + (f"\nexample:\n  {self.example}\n" if self.example else "")

    def error(self, message: str) -> NoReturn:
        # `argparse` itself would print the usage and end the process.
        raise UsageError(f"{message}; see {self.prog} --help")

    def takes(self, option: str) -> bool:
        """Whether the command has this option."""
        return option in self._option_string_actions

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Reads the arguments of a command.

        Args:
          argv: The arguments after the name of the command.

        Returns:
          The values of the arguments by name.

        Raises:
          UsageError: If an argument or an option is unknown or missing, or a value does not fit.
        """
        Parser.latest = self
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

    Args:
      name: The name of the argument.
      value: Its value, which is left out.

    Returns:
      The option.

    >>> flag("allow_nonfinite", "True"), flag("rules", "...")
    ('--allow-nonfinite', '--spec')
    """
    options = {
        "rules": "spec", "select": "params", "write_as": "as", "shard_bytes": "shard-size"
    }  # fmt: skip
    return "--" + options.get(name, name).replace("_", "-")


def on_inputs(
    add_arguments: Callable[[Parser], None], run: Callable[[argparse.Namespace], None]
) -> Callable[[Parser, Sequence[str]], int]:
    """Makes the `main` of a command whose ValueErrors are all about what the user gave.

    Such an error becomes a `UsageError`. A `StoreError` passes as it is.

    Args:
      add_arguments: Adds the command's arguments to the parser.
      run: Runs the command on the arguments.

    Returns:
      The function `main(parser, argv)`, which returns the exit code 0.
    """

    def main(parser: Parser, argv: Sequence[str]) -> int:
        add_arguments(parser)
        args = parser.read(argv)
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
    """Makes the reader of an option's value.

    Args:
      parse: Makes the value of a text; a ValueError if it cannot.
      holds: What has to be true of the value.
      expected: What the message says was expected.

    Returns:
      The function that `argparse` calls with the text.

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
    """A whole number in decimal digits alone."""
    if not text.isdecimal():
        raise ValueError
    return int(text)


def _several(text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    return tuple(float(part) for part in text.split(","))


UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def _bytes(text: str) -> int:
    """A number with its unit: k, M, G or Ki, Mi, Gi, in upper or lower case, with or without B.

    >>> _bytes("1.5GB"), _bytes("2 GiB"), _bytes("4096")
    (1500000000, 2147483648, 4096)
    """
    # Fifteen digits are enough for any memory, and can be converted whatever they are.
    match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([kmg]i?|)b?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ValueError
    return int(float(match[1]) * UNITS[match[2]])


size = reader(_bytes, lambda n: n >= 0, "a size such as 500MB or 2GiB")
natural = reader(_decimal, lambda n: n >= 1, "a whole number from 1")
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
    """Reads KEY=VALUE with the value in YAML; "2x" stays text.

    Args:
      text: The value of the option.

    Returns:
      The key and the value.

    Raises:
      ArgumentTypeError: If there is no key, or the value is not YAML.

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
    if os.path.isdir(text):
        raise ArgumentTypeError(f"expected a file; {text} is a folder")
    # pathlib would raise an error for what is too long to be a path.
    if not os.path.isfile(text):
        raise ArgumentTypeError(f"{text} is missing or not a plain file")
    return Path(text)


def add_input(parser: Parser, name: str, metavar: str, what: str, **options: Any) -> None:
    """Adds the argument that names a checkpoint to read.

    Args:
      parser: The parser of the command.
      name: The argument of the command's function in Python.
      metavar: What the usage calls it.
      what: What its help calls it, such as "the checkpoint to grow".
      **options: Further options of `add_argument`.
    """
    where = "a folder, a file of tensors, or a name on the Hub"
    parser.add_argument(name, metavar=metavar, help=f"{what}: {where}", **options)


def add_output(parser: Parser, what: str, **options: Any) -> None:
    """Adds the argument OUT.

    Args:
      parser: The parser of the command.
      what: What its help calls the output, such as "the merge".
      **options: Further options of `add_argument`.
    """
    where = "a folder, or a .safetensors or .npz file"
    parser.add_argument(
        "out", metavar="OUT", type=Path, help=f"where {what} is written: {where}", **options
    )


def add_seed(parser: Parser, what: str, default: int | None = None) -> None:
    """Adds --seed.

    Args:
      parser: The parser of the command.
      what: What is drawn under it.
      default: The value without the option; None where the function that is called has 0 itself.
    """
    about = f"seed of {what}; default: 0"
    parser.add_argument("--seed", metavar="N", type=seed, default=default, help=about)


def add_set(parser: Parser) -> None:
    """Adds --set, which sets options of a method.

    Args:
      parser: The parser of the command.
    """
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        type=entry,
        default=[],
        help="set an option of the method",
    )


def add_tables(parser: Parser, checkpoint: str) -> None:
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


def add_certify(parser: Parser) -> None:
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


def add_copying(parser: Parser) -> None:
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
        help="write weights in FP8 again, in the scheme of the input that config.json comes from",
    )
    add("--allow-nonfinite", action="store_true", help="do not stop at NaN and infinities")
    add(
        "--allow-pickle",
        action="store_true",
        help="read PyTorch's .bin files; their pickles are parsed, never run",
    )
    add_offline(parser)
    add("--quiet", action="store_true", help="show no progress")


def _part(text: str) -> tuple[int, int]:
    """A part as I/N.

    >>> _part("2/4")
    (2, 4)
    """
    number, count = map(_decimal, text.split("/"))
    return number, count


part = reader(_part, lambda p: 1 <= p[0] <= p[1] < 1e6, "I/N, such as 1/4 for the first of four")
seconds = reader(float, lambda x: 0 <= x < 1e9, "a number of seconds")


def add_parts(parser: Parser) -> None:
    """Adds the options by which several processes make one output, such as --part.

    Args:
      parser: The parser of the command, which also has --plan.
    """
    group = parser.add_argument_group("several processes, in a file system that all of them see")
    add = group.add_argument
    add(
        "--part",
        metavar="I/N",
        type=part,
        help="make part I of N, some of the files of OUT; each part is a process of its own, "
        "perhaps on a host of its own, and --resume continues it",
    )
    add("--join", action="store_true", help="make OUT of its parts, when all of them are whole")
    add(
        "--wait",
        metavar="SECONDS",
        type=seconds,
        default=argparse.SUPPRESS,
        help="how long a part waits for others that give no sign of life, where it needs their "
        "statistics; default: 600",
    )
    add(
        "--processes",
        metavar="HOW",
        help="make a part in each of several processes, and join them: auto (SLURM, TPU pods), or "
        "HOST:PORT,COUNT,RANK",
    )


def show_shares(
    args: argparse.Namespace,
    ready: "Ready",
    visits: Mapping[str, int] = MappingProxyType({}),
    codes: "Requantisation | None" = None,
) -> None:
    """Prints what each part of an output reads and writes, if the command line asks for a part.

    Args:
      args: The arguments of the command line.
      ready: The operation.
      visits: How often the inputs of a tensor are read, by name; once for those not named.
      codes: What is written in codes.

    Raises:
      CheckpointError: If the output has fewer files than parts.
    """
    if args.part is None:
        return
    from sail_jax.checkpoint.operations import running
    from sail_jax.checks import storage

    count = args.part[1]
    shares = running.shares(ready, args.out, run_options(args), count, visits, codes)
    spans = [
        f"{verb} {storage(min(sizes))} to {storage(max(sizes))}"
        for verb, sizes in zip(("reads", "writes"), zip(*shares, strict=True), strict=True)
    ]
    show(f"{count} parts: each {' and '.join(spans)}")


def add_offline(parser: Parser) -> None:
    """Adds --offline, with which models on the Hub are read from the cache alone.

    Args:
      parser: The parser of the command.
    """
    parser.add_argument(
        "--offline",
        action="store_true",
        help="read org/name[@revision] from the cache of the Hub only; nothing is downloaded",
    )


def add_params(parser: Parser) -> None:
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


def outcome(done: "Result", where: object = None, part: tuple[int, int] | None = None) -> str:
    """Writes the line about the output that merging, growing and aligning end with.

    Args:
      done: What the operation returned.
      where: What the line begins with; None for the place of the output.
      part: Which part of it was made; None for all of it.

    Returns:
      One line, also about whether an earlier call had finished the output.
    """
    where = done.out if where is None else where
    if part is not None:
        number, count = part
        how = f"in {done.seconds:.1f} s; --join makes the output when all are"
        how = "as the output has it, which was finished before" if done.unchanged else how
        return f"{where}: part {number} of {count} is whole, {how}"
    if done.unchanged:
        return f"{where}: finished before, and holds these {done.tensors} tensors"
    from sail_jax.checkpoint.sources.requantised import summary

    coded = summary(done.requantized)
    return f"{where}: {done.tensors} tensors in {done.seconds:.1f} s{coded and '; '}{coded}"


def run_options(args: argparse.Namespace, progress: Meter | None = None) -> "RunOptions":
    """Makes the `RunOptions` of a command line: options are called as its fields are.

    Args:
      args: The arguments of the command line.
      progress: Told about progress; None for nobody.

    Returns:
      The options of the run.
    """
    from dataclasses import fields

    from sail_jax.checkpoint import RunOptions

    known = {field.name for field in fields(RunOptions)}
    chosen = {name: value for name, value in vars(args).items() if name in known}
    return RunOptions(**chosen, progress=progress)


def arguments(args: argparse.Namespace, *own: str) -> dict[str, Any]:
    """Collects the arguments of a command's function in Python: options are called as these are.

    Args:
      args: The arguments of the command line.
      *own: What only the command itself knows. So is --quiet.

    Returns:
      The values that were given, by name, without those of `run_options`.
    """
    from dataclasses import fields  # not above: it imports slowly, and `--help` needs none

    from sail_jax.checkpoint import RunOptions

    others = {*own, "quiet", "processes", *(field.name for field in fields(RunOptions))}
    return {k: v for k, v in vars(args).items() if v is not None and k not in others}
