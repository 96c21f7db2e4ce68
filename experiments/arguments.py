"""Arguments that commands share: what their texts mean, and the options of all that write."""

import re
from argparse import ArgumentTypeError
from typing import Any

__all__ = ["add_copying", "natural", "run_options", "seed", "size"]

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def size(text: str) -> int:
    """Bytes from a text like 500M, 1.5GB or 2GiB.

    >>> size("1.5GB"), size("2 GiB"), size("4096")
    (1500000000, 2147483648, 4096)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?|)b?", text.strip().lower())
    if found is None or float(found[1]) <= 0:
        raise ArgumentTypeError(f"expected a size such as 500MB or 2GiB, got '{text}'")
    return int(float(found[1]) * UNITS[found[2]])


def natural(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a whole number from 1, got '{text}'")
    return int(text)


def seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**31:
        raise ArgumentTypeError(f"expected an integer from 0 to 2^31 - 1, got '{text}'")
    return int(text)


def add_copying(parser: Any) -> None:
    """The options of commands that read checkpoints and write one."""
    add = parser.add_argument
    add("--max-memory", metavar="SIZE", type=size, help="of the process, such as 2GB")
    add("--threads", metavar="N", type=natural, help="default: one per core, at most 8")
    add("--format", metavar="NAME", help="of the output, such as orbax or npz")
    add("--shard-size", metavar="SIZE", type=size, default=5 * 10**9, help="default: 5GB")
    add("--allow-nonfinite", action="store_true", help="go on with NaN and infinities")
    add("--allow-pickle", action="store_true", help="read PyTorch's .bin, without running it")
    add("--quiet", action="store_true", help="no progress")


def run_options(args: Any, progress: Any = None) -> Any:
    """The `RunOptions` of what `add_copying` and --resume say."""
    from sail_jax.checkpoint import RunOptions

    return RunOptions(
        resume=args.resume, max_memory=args.max_memory, threads=args.threads,
        allow_nonfinite=args.allow_nonfinite, allow_pickle=args.allow_pickle, format=args.format,
        shard_bytes=args.shard_size, progress=progress,
    )  # fmt: skip
