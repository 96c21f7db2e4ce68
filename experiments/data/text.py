"""Text that every installation has: the source of Python's own standard library."""

import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

VOCAB = 97  # 95 printable ASCII characters, the newline, and one for all others
HELD_OUT = 10  # every tenth module is kept from training


class Text(NamedTuple):
    """Characters as tokens: of the modules to learn from, and of those held out."""

    train: UInt8[np.ndarray, " train"]
    held_out: UInt8[np.ndarray, " held_out"]


def encode(source: bytes) -> UInt8[np.ndarray, " n"]:
    """Tokens 0 to 94 for the characters from space to ~, 95 for a newline, 96 for all others.

    >>> encode(b" a~\\n\\t").tolist()
    [0, 65, 94, 95, 96]
    """
    code = np.arange(256)
    table = np.where((code >= 32) & (code < 127), code - 32, 96)
    table[ord("\n")] = 95
    return table.astype(np.uint8)[np.frombuffer(source.replace(b"\r\n", b"\n"), np.uint8)]


def load() -> Text:
    """The top-level modules of the standard library in alphabetical order, every tenth held out.

    What it holds depends on the version of Python alone. Raises FileNotFoundError where the
    library comes without its source.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    modules = [path.read_bytes() for path in sorted(folder.glob("[a-z]*.py"))]
    if len(modules) < HELD_OUT:
        raise FileNotFoundError(f"{folder} holds no source of the standard library to learn from")
    held_out = modules[::HELD_OUT]
    del modules[::HELD_OUT]
    return Text(encode(b"".join(modules)), encode(b"".join(held_out)))
