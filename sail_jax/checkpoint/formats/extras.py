"""The plain files beside the tensors of a checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sail_jax import disk
from sail_jax.checkpoint.formats.files import MAX_HEADER

__all__ = ["carried", "config_of"]


def carried(file: str) -> bool:
    """Whether a file beside the tensors goes along: indices and records of training speak of the
    input's files, not of the output's."""
    return not file.endswith(".index.json") and file not in (
        "align.json",
        "growth.json",
        "trainer_state.json",
        "adapter_config.json",
    )


def config_of(extras: Mapping[str, Path | bytes], name: str = "config.json") -> dict[str, Any]:
    """The JSON object in a file beside the tensors; ValueError, naming it, if it is none."""
    if name not in extras:
        return {}
    path = extras[name]
    try:
        data = path if isinstance(path, bytes) else disk.read_bytes(Path(path), MAX_HEADER)
        config = json.loads(data)
    except (disk.StoreError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return config
