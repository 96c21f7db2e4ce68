"""Orbax checkpoints, read and written array by array.

The reader accepts the output of StandardCheckpointer and PyTreeCheckpointer, and an item or a step
of a CheckpointManager. Orbax's description lists the arrays, and TensorStore reads them. A tree may
therefore contain any nested containers. Orbax itself is not imported.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from sail_jax import disk
from sail_jax.checkpoint.formats import stores
from sail_jax.checkpoint.formats.files import (
    MAX_HEADER,
    CheckpointError,
    explained,
    reading,
    strict_json,
)
from sail_jax.checkpoint.formats.layout import Layout, Wanted, staged
from sail_jax.checkpoint.formats.nesting import joined, nested
from sail_jax.merging.tensors import Tensor

MARK = "_METADATA"
STATE = "_CHECKPOINT_METADATA"
_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
# Orbax also writes times here. Without them, equal outputs have equal bytes.
_FINISHED = {
    "item_handlers": _HANDLER,
    "metrics": {},
    "performance_metrics": {},
    "init_timestamp_nsecs": 1,
    "commit_timestamp_nsecs": 1,
    "custom_metadata": {},
}
_NUMBERED = re.compile(r"(?:(.*)[_-])?(\d{1,18})", re.DOTALL)
_OF_DICT = 2
_STAGE = "tensors"
# Names of the item that contains the network: orbax's own, MaxText's and Tunix's.
_USUAL = ("default", "items", "model_params")
_WITHOUT_ARRAY = ("string", "None", "Dict", "List", "Tuple", "NamedTuple")


def numbered(name: str) -> tuple[str, int] | None:
    """Reads the step in the name of a folder, such as "1000", "step-1000" or "ckpt_1000".

    Args:
      name: The name of the folder, without its parents.

    Returns:
      The text before the number, and the number. None if the name does not end in a number, or the
      folder is still being written.
    """
    match = _NUMBERED.fullmatch(name)
    return None if match is None or temporary(name) else (match[1] or "", int(match[2]))


def temporary(name: str) -> bool:
    """Checks whether a folder's name marks a checkpoint that is still being written."""
    return name.startswith((".", "tmp")) or ".orbax-checkpoint-tmp" in name


def _find(folder: Path) -> Path | None:
    """Returns the folder of the one orbax item in a folder, or None if there is none.

    If there are several items, the first one in `_USUAL` is used.
    """
    if (folder / MARK).is_file():
        return folder
    items = {
        p.name: p
        for p in sorted(folder.iterdir())
        if (p / MARK).is_file() and not temporary(p.name) and not numbered(p.name)
    }
    usual = next((items[name] for name in _USUAL if name in items), None)
    if len(items) > 1 and usual is None:
        raise CheckpointError(
            f"{folder} holds several orbax items: choose one of {', '.join(items)}"
        )
    return usual or next(iter(items.values()), None)


def read_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Opens the arrays of an orbax checkpoint without reading their entries.

    Args:
      folder: The folder of an item, or of a step of a CheckpointManager.

    Returns:
      The arrays and numbers by path, with "/" between keys, and empty metadata. Text and empty
      containers are left out. None if the folder is not an orbax checkpoint.

    Raises:
      CheckpointError: If its description is damaged, it contains several items without a usual
        name, a path occurs twice, or a dtype is not one of `DTYPES`.
    """
    if (item := _find(folder)) is None:
        return None
    path = item.resolve()
    about = strict_json(disk.read_bytes(path / MARK, MAX_HEADER), path / MARK)
    names: dict[str, str] = {}
    with reading(path / MARK):
        for entry in about["tree_metadata"].values():
            keys = [str(key["key"]) for key in entry["key_metadata"]]
            value = entry["value_metadata"]
            # None, empty containers and text are stored without an array.
            if value.get("skip_deserialize") or value["value_type"] in _WITHOUT_ARRAY:
                continue
            name = ""
            for key in keys:
                name = joined(name, "/", key)
            if name in names:
                raise CheckpointError(f"{path}: the path '{name}' is repeated")
            names[name] = ".".join(keys)
        driver = "zarr3" if about.get("use_zarr3") else "zarr"
        missing_is_zero = not about.get("store_array_data_equal_to_fill_value")
    return stores.opened(path, names, driver, missing_is_zero=missing_is_zero), {}


def admit(names: Iterable[str]) -> None:
    """Checks that orbax can store leaves under these paths.

    Orbax joins the keys of a path by ".", so "a/b.c" and "a.b/c" would collide.

    Args:
      names: Paths with "/" between keys.

    Raises:
      CheckpointError: If the paths do not form a tree, or two of them collide in orbax.
    """
    nested(names)
    joined: dict[str, str] = {}
    for name in names:
        other = joined.setdefault(name.replace("/", "."), name)
        if other != name:
            raise CheckpointError(f"'{name}' and '{other}' are the same path to orbax")


def layout(
    tensors: Wanted, name: str, metadata: Mapping[str, str], shard_bytes: int | None
) -> Layout:
    """Lays out a stage with all tensors, because a library packs and places them.

    Args:
      tensors: The dtype and shape of each tensor, by path.
      name: Not used: orbax names its own files.
      metadata: Must be empty, because orbax cannot store it.
      shard_bytes: Not used: orbax chooses the sizes of its files.

    Returns:
      The layout of the stage, with the function that makes orbax's folder from it.

    Raises:
      CheckpointError: If there is metadata, or orbax cannot store leaves under these paths.
    """
    if metadata:
        raise CheckpointError("orbax cannot store metadata")
    admit(tensors)
    stage = staged(tensors, _STAGE)

    def convert(folder: Path, out: Path) -> None:
        def entries(key: str, first: int, last: int) -> np.ndarray:
            return stage.entries(folder, key, tensors[key][0], first, last)

        write_folder(out, tensors, entries)

    return stage._replace(convert=convert)


def write_folder(
    path: Path, arrays: Wanted, entries: Callable[[str, int, int], np.ndarray]
) -> None:
    """Writes arrays as nested dictionaries, as orbax's StandardCheckpointer stores them.

    Args:
      path: The folder to write, which must not exist yet.
      arrays: The dtype and shape of each leaf, by path with "/" between keys.
      entries: Returns some entries of a leaf, flat: `entries(name, first, last + 1)`.

    Raises:
      CheckpointError: If the paths do not form a tree, or the folder cannot be written.
    """
    admit(arrays)
    described = {}
    for name in arrays:
        keys = name.split("/")
        described[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": _OF_DICT} for key in keys],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
    about = {
        "tree_metadata": described,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    names = {name.replace("/", "."): name for name in arrays}
    wanted = {key: arrays[name] for key, name in names.items()}
    stores.write(path.absolute(), wanted, lambda key, *some: entries(names[key], *some))
    with explained("write", path):
        (path / MARK).write_text(json.dumps(about))
        (path / STATE).write_text(json.dumps(_FINISHED))
