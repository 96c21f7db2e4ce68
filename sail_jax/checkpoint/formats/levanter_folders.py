"""Checkpoints of Levanter: an array of TensorStore for each leaf, in folders like the tree."""

from pathlib import Path

from sail_jax.checkpoint.formats import stores
from sail_jax.merging.tensors import Tensor

MARK = "metadata.json"


def read_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Opens the arrays of a checkpoint of Levanter; they are read when they are asked for.

    Args:
      folder: The folder of a step, or one below it, such as "model".

    Returns:
      The arrays by path, with "/" between keys, and empty metadata. None if the folder is not one
      of Levanter's: it has no metadata.json, nor has the folder above it.

    Raises:
      CheckpointError: If an array is damaged.
    """
    if not any((place / MARK).is_file() for place in (folder, folder.parent)):
        return None
    found = stores.listed(folder.resolve())
    tensors: dict[str, Tensor] = {}
    for driver in sorted({driver for _, driver in found.values()}):
        names = {name: key for name, (key, its) in found.items() if its == driver}
        tensors |= stores.opened(folder.resolve(), names, driver)
    return ({name: tensors[name] for name in found}, {}) if found else None
