"""Levanter's checkpoints: one TensorStore array per leaf, in folders that mirror the tree."""

from pathlib import Path

from sail_jax.checkpoint.formats import stores
from sail_jax.merging.tensors import Tensor

MARK = "metadata.json"


def read_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Opens the arrays of a Levanter checkpoint without reading their entries.

    Args:
      folder: The folder of a step, or one below it, such as "model".

    Returns:
      The arrays by path, with "/" between keys, and empty metadata. None if neither the folder nor
      its parent has Levanter's metadata.json.

    Raises:
      CheckpointError: If an array is damaged.
    """
    if not any((place / MARK).is_file() for place in (folder, folder.parent)):
        return None
    found = stores.listed(folder.resolve())
    tensors: dict[str, Tensor] = {}
    for driver in sorted({*found.values()}):
        names = {key: key for key, its in found.items() if its == driver}
        tensors |= stores.opened(folder.resolve(), names, driver)
    return ({name: tensors[name] for name in found}, {}) if found else None
