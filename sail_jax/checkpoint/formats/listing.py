"""Determines which files of a folder form a checkpoint, by their names alone."""

import fnmatch
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.table import Format, suffixes

INDEX = ".index.json"
SHARD = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})(\.\w+)", re.DOTALL)
"""The name of one of several files: the stem, its number, the number of files, and the suffix."""
_TOKENIZER = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens*", "added_tokens*", "chat_template*"),
    *("*.model", "*.tiktoken", "*.jinja"),
)


def stored() -> tuple[str, ...]:
    """Lists the suffixes of tensor files and of their indexes."""
    return (INDEX, ".h5", *suffixes())


def is_extra(name: str) -> bool:
    """Checks whether a file without tensors belongs to a checkpoint.

    >>> is_extra("tokenizer.json"), is_extra("model.safetensors.index.json"), is_extra("model.py")
    (True, False, False)
    """
    return (name.endswith(".json") or of_tokenizer(name)) and not name.endswith(stored())


def of_tokenizer(name: str) -> bool:
    """Checks whether a file belongs to the tokenizer.

    Args:
      name: The name of the file.

    Returns:
      Whether it does.
    """
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _TOKENIZER)


def weights(folder: str | Path, names: Sequence[str], format: Format, usual: str) -> list[str]:
    """Chooses the files of one format in a folder: the usual file, else an index, else all files.

    Args:
      folder: The folder, for messages.
      names: The names of its files.
      format: The format.
      usual: The usual name of such a file.

    Returns:
      The names of the files; an index stands for the files that it lists. Empty if the folder has
      no such file.

    Raises:
      CheckpointError: If there are several indexes, or several files that are a whole checkpoint.
    """
    suffix, usual_index = Path(usual).suffix, usual + INDEX
    alike = [
        name
        for name in names
        if name.endswith(suffix) and not name.startswith(".") and name not in format.not_weights
    ]
    indexes = [name for name in names if name.endswith(suffix + INDEX)]
    for name in (usual, usual_index):
        if name in (*alike, *indexes):
            return [name]
    if len(indexes) > 1:
        raise CheckpointError(f"{folder} holds several indexes: choose one of {', '.join(indexes)}")
    if indexes or format.sharded or len(alike) < 2:
        return indexes or alike
    raise CheckpointError(f"{folder} holds several checkpoints: choose one of {', '.join(alike)}")


def check_shards(path: str | Path, files: Iterable[str]) -> None:
    """Checks that a set of files is complete, such as "x-00001-of-00003" to "x-00003-of-00003".

    Args:
      path: The folder or the index, for messages.
      files: The names of the existing files.

    Raises:
      CheckpointError: If some are missing.
    """
    found: dict[tuple[str, ...], set[str]] = {}
    for file in files:
        if match := SHARD.fullmatch(file):
            stem, number, count, suffix = match.groups()
            found.setdefault((stem, count, suffix), set()).add(number)
    for (stem, count, suffix), numbers in found.items():
        if len(numbers) != int(count):
            raise CheckpointError(
                f"{path} has {len(numbers)} of the {int(count)} files {stem}-*-of-{count}{suffix}"
            )
