"""The files of a checkpoint that contain no tensors, such as config.json."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sail_jax import disk
from sail_jax.checkpoint.formats.files import MAX_HEADER


def carried(file: str) -> bool:
    """Checks whether a non-tensor file of an input is copied to an output.

    Indexes of shards and records of training, alignment or growth are not copied, because they
    describe the input's files and not the output's.

    Args:
      file: The file's name, without its folder.

    Returns:
      True if the file is copied.
    """
    return not file.endswith(".index.json") and file not in (
        "align.json",
        "growth.json",
        "upcycling.json",
        "requantization.json",
        "trainer_state.json",
        "adapter_config.json",
    )


def config_of(extras: Mapping[str, Path | bytes], name: str = "config.json") -> dict[str, Any]:
    """Reads the JSON object in one of the plain files of a checkpoint.

    Args:
      extras: The files by name; each is a path, or the content itself.
      name: Which of the files.

    Returns:
      The object. It is an empty dictionary if the file does not exist.

    Raises:
      ValueError: If the file cannot be read, is too large, is not a JSON object, or exceeds what
        `disk.parsed` accepts.
    """
    if name not in extras:
        return {}
    path = name if isinstance(extras[name], bytes) else extras[name]
    try:
        config = disk.parsed(content(extras[name]))
    except (disk.StoreError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return config


CARD = "README.md"
"""The model card of a checkpoint."""


def licence_of(folder: Path) -> str:
    """Reads the licence of a checkpoint from the front matter of its model card.

    Args:
      folder: The folder of the checkpoint.

    Returns:
      The licence as the Hub writes it, such as "apache-2.0"; "" if none is stated.
    """
    try:
        card = disk.read_bytes(folder / CARD, 1 << 22).decode(errors="replace")
    except disk.StoreError:
        return ""
    front = re.match(r"---\s*\n(.*?)^---\s*$", card, re.S | re.M)
    stated = front and re.search(r"^license:\s*([\"']?)([\w.+-]{1,60})\1\s*$", front[1], re.M)
    return stated[2] if stated else ""


def content(extra: Path | bytes) -> bytes:
    """Reads one of the plain files of a checkpoint.

    Args:
      extra: Its path, or its content.

    Returns:
      The bytes.

    Raises:
      StoreError: If it cannot be read, or is larger than a header may be.
    """
    return extra if isinstance(extra, bytes) else disk.read_bytes(extra, MAX_HEADER)
