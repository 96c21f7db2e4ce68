"""What command lines have in common: their parser, texts and what they mean, one way for errors."""

import argparse
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
    "add_tables",
    "file",
    "natural",
    "on_inputs",
    "outcome",
    "run_options",
    "seed",
    "size",
    "with_flags",
]


class UsageError(Exception):
    """The command line asks for something that does not exist; one line, exit code 2."""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ours: one line, with the nearest known option."""

    def __init__(self, command: str, about: str | None = None, **options: Any) -> None:
        super().__init__(
            prog=f"sail-jax {command}", description=about, allow_abbrev=False, **options
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """What the arguments say; UsageError for those that are unknown."""
        # an option may stand between the input and the output
        args, unknown = self.parse_known_intermixed_args(argv)
        if not unknown:
            return args
        word = unknown[0]
        if not word.startswith("-"):
            raise UsageError(f"unexpected argument '{word}'")
        hint = nearest(word.split("=")[0], self._option_string_actions)
        raise UsageError(f"unknown option '{word}'{hint}")


def with_flags(message: str) -> str:
    """A message of the library, which names arguments, as users of the command line say them.

    >>> with_flags("max_memory: a needs 9 MiB, or allow_nonfinite=True, or rules=...")
    '--max-memory: a needs 9 MiB, or --allow-nonfinite, or --spec'
    """

    def flag(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return "--" + {"rules": "spec"}.get(name, name).replace("_", "-")

    return re.sub(r"\b([a-z_]+)=(?:True\b|\.\.\.)|\b(max_memory)\b", flag, message)


def on_inputs(
    add_arguments: Callable[[Parser], None], run: Callable[[argparse.Namespace], int]
) -> Callable[[Parser, Sequence[str]], int]:
    """The `main` of a command whose every ValueError is about what the user gave: one line, not a
    traceback."""

    def main(parser: Parser, argv: Sequence[str]) -> int:
        add_arguments(parser)
        args = parser.read(argv)
        from sail_jax.checkpoint.engine.executor import MergeError

        try:
            return run(args)
        except StoreError:
            raise
        except MergeError as exc:
            raise StoreError(str(exc)) from exc
        except ValueError as exc:
            raise UsageError(str(exc)) from exc

    return main


UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def size(text: str) -> int:
    """Bytes from a text like 500M, 1.5GB or 2GiB.

    >>> size("1.5GB"), size("2 GiB"), size("4096")
    (1500000000, 2147483648, 4096)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?|)b?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ArgumentTypeError(f"expected a size such as 500MB or 2GiB, got '{text}'")
    return int(float(match[1]) * UNITS[match[2]])


def natural(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a whole number from 1, got '{text}'")
    return int(text)


def seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**31:
        raise ArgumentTypeError(f"expected an integer from 0 to 2^31 - 1, got '{text}'")
    return int(text)


def function(text: str) -> Callable[..., Any]:
    """MODULE:FUNCTION, imported; modules may lie in the working directory, as for `python -m`."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text):
        raise ArgumentTypeError(f"expected MODULE:FUNCTION, or nothing at the end, got '{text}'")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        value = pkgutil.resolve_name(text)
    except Exception as error:  # the module is the user's: whatever it does when it is imported
        raise ArgumentTypeError(f"{text}: {type(error).__name__}: {error}") from error
    if not callable(value):
        raise ArgumentTypeError(f"{text} is no function, but {type(value).__name__}")
    return value


def file(text: str) -> Path:
    """The path of a file that is to be read."""
    if not os.path.isfile(text):  # pathlib would raise for what is too long to be a path
        raise ArgumentTypeError(f"{text} is missing or not a plain file")
    return Path(text)


def add_tables(parser: Any, checkpoint: str) -> None:
    """The options of commands that need to know which spaces tensors live in."""
    add = parser.add_argument
    add("--config", metavar="FILE", type=Path, help=f"instead of {checkpoint}/config.json")
    add("--spec", metavar="FILE", type=file, help="which spaces the tensors live in (YAML, JSON)")


def add_certify(parser: Any) -> None:
    """Whether outputs are compared before and after, and what computes them. Code that a user names
    is run, so the command line is the only place to name it: no file that is read can."""
    add = parser.add_argument
    add(
        "--certify", metavar="MODULE:FUNCTION", nargs="?", const=True, type=function,
        help="compare outputs: by our forward pass, or by FUNCTION(tensors, config)",
    )  # fmt: skip
    add("--no-certify", dest="certify", action="store_false", help="default: if both are small")


def add_copying(parser: Any) -> None:
    """The options of commands that read checkpoints and write one."""
    add = parser.add_argument
    add("--resume", action="store_true", help="continue this command where it was interrupted")
    add("--max-memory", metavar="SIZE", type=size, help="of the process, such as 2GB")
    add("--threads", metavar="N", type=natural, help="default: one per core, at most 8")
    add("--format", metavar="NAME", help="of the output, such as orbax or npz")
    add("--shard-size", metavar="SIZE", type=size, default=5 * 10**9, help="default: 5GB")
    add("--allow-nonfinite", action="store_true", help="go on with NaN and infinities")
    add("--allow-pickle", action="store_true", help="read PyTorch's .bin, without running it")
    add("--quiet", action="store_true", help="no progress")


def outcome(done: Any, tensors: int) -> str:
    """The line on an output that merging, growing or aligning ends with."""
    if done.unchanged:
        return f"{done.out}: finished before, and holds these {tensors} tensors"
    return f"{done.out}: {tensors} tensors in {done.seconds:.1f} s"


def run_options(args: Any, progress: Any = None) -> Any:
    """The `RunOptions` of what `add_copying` and --resume say."""
    from sail_jax.checkpoint import RunOptions

    return RunOptions(
        resume=args.resume, max_memory=args.max_memory, threads=args.threads,
        allow_nonfinite=args.allow_nonfinite, allow_pickle=args.allow_pickle, format=args.format,
        shard_bytes=args.shard_size, progress=progress,
    )  # fmt: skip
