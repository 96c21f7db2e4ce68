"""The safetensors format: eight bytes of length, a JSON header, then the bytes of all tensors.

It is read as strictly as its specification requires: no gaps, no overlaps, no repeated names
(https://huggingface.co/docs/safetensors).
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sail_jax.checkpoint.formats.files import (
    DTYPES,
    MAX_HEADER,
    CheckpointError,
    File,
    StoredTensor,
    checked_shape,
    contained,
    reading,
    strict_json,
)
from sail_jax.checkpoint.formats.layout import Layout, Region, Wanted
from sail_jax.merging.tensors import Tensor

_CODES = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16"},
    **{"U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64", "C64": "complex64"},
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
    **{"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
}
_NAMES = {DTYPES[name]: code for code, name in _CODES.items()}


def read_file(file: File) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads the header of a safetensors file; the bytes of tensors stay in the file.

    Args:
      file: The file.

    Returns:
      The tensors by name, in the order of their bytes, and the metadata of the header.

    Raises:
      CheckpointError: If the header is damaged, a dtype is unknown, or the tensors do not cover the
        rest of the file exactly once.
    """
    path = file.path
    length = int.from_bytes(file.bytes_at(0, 8), "little")
    if length > MAX_HEADER or length > file.size - 8:
        raise CheckpointError(
            f"{path} is truncated or damaged: its header claims {length} bytes of {file.size}"
        )
    text = file.bytes_at(8, length)
    if not text.startswith(b"{"):
        raise CheckpointError(f"{path} is damaged: its header is not a JSON object")
    header = strict_json(text, path)
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path} is damaged: its metadata must be text by name")
    entries = [(_entry(path, name, about), name) for name, about in header.items()]
    end, tensors = 0, {}
    # In the order of their bytes, each tensor must begin where the previous one ends. This check
    # rules out gaps and overlaps. An empty tensor begins where it ends, and is sorted before its
    # neighbour.
    for (start, stop, dtype, shape), name in sorted(entries, key=lambda entry: entry[0][:2]):
        if start != end:
            fault = "overlaps the tensor before it" if start < end else "leaves a gap before it"
            raise CheckpointError(f"{path} is damaged: '{name}' {fault} (bytes {start} to {stop})")
        end = stop
        run = (8 + length + start, stop - start)
        tensors[name] = StoredTensor(name, dtype, shape, file, [run])
    if 8 + length + end != file.size:
        raise CheckpointError(
            f"{path} is truncated or damaged: its tensors end at byte {8 + length + end}, but the "
            f"file ends at {file.size}"
        )
    return tensors, metadata


def _entry(path: Path, name: str, about: Any) -> tuple[int, int, np.dtype, tuple[int, ...]]:
    """Returns the first and last byte, dtype and shape in an entry of the header, checked."""
    match about:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [start, stop]}:
            pass
        case _:
            raise CheckpointError(f"{path} is damaged: '{name}' without dtype, shape or offsets")
    # `type` instead of `isinstance`, because true counts as 1.
    if len(about) != 3 or type(start) is not int or type(stop) is not int:
        raise CheckpointError(f"{path} is damaged: '{name}' is described by {sorted(about)}")
    if code not in _CODES:
        raise CheckpointError(f"{path}: '{name}' has the unsupported dtype {code[:40]!r}")
    if not 0 <= start <= stop < 2**62:
        raise CheckpointError(f"{path} is damaged: '{name}' lies at bytes {start} to {stop}")
    dtype = DTYPES[_CODES[code]]
    return start, stop, dtype, checked_shape(shape, dtype.itemsize, f"{path}: '{name}'")


def read_index(file: File) -> dict[str, list[str]]:
    """Reads the index (`*.index.json`) of a sharded checkpoint: the tensors of each file.

    Args:
      file: The index.

    Returns:
      The names of tensors by file name, both in the order of the index.

    Raises:
      CheckpointError: If the index is damaged, too large or empty, or refers to a file that is
        missing or lies outside its folder.
    """
    path = file.path
    if file.size > MAX_HEADER:
        raise CheckpointError(f"{path} is damaged: it has {file.size} bytes")
    weights = strict_json(file.bytes_at(0, file.size), path).get("weight_map")
    valid = isinstance(weights, dict) and all(isinstance(v, str) for v in weights.values())
    if not valid or not weights:
        raise CheckpointError(f"{path}: 'weight_map' (a file for each tensor) is missing or wrong")
    shards: dict[str, list[str]] = {}
    for name, shard in weights.items():
        shards.setdefault(shard, []).append(name)
    for shard in shards:
        with reading(path):
            contained(path.parent, shard)
    return shards


def layout(
    tensors: Wanted, name: str, metadata: Mapping[str, str], shard_bytes: int | None
) -> Layout:
    """Lays out one safetensors file, or several shards with an index.

    Args:
      tensors: The dtype and shape of each tensor, by name.
      name: The name of the file. The name of a shard contains a number, and the name of the index
        ends in ".index.json".
      metadata: Text by key, for the header of each file.
      shard_bytes: The largest number of bytes of tensors in a file; a larger tensor gets its own
        shard. None for one file.

    Returns:
      The layout of the output itself.

    Raises:
      CheckpointError: If safetensors does not support a dtype, or a header would be too long.
    """
    shards: list[dict[str, int]] = [{}]
    for key, (dtype, shape) in tensors.items():
        if dtype not in _NAMES:
            raise CheckpointError(f"'{key}': safetensors cannot hold {dtype}")
        size = math.prod(shape) * dtype.itemsize
        # An empty shard accepts a tensor of any size.
        full = sum(shards[-1].values()) + size if shards[-1] and shard_bytes else 0
        if full > (shard_bytes or 0):
            shards.append({})
        shards[-1][key] = size
    stem = name.removesuffix(".safetensors")
    sharded = len(shards) > 1
    regions, fixed, sizes, weights = {}, [], {}, {}
    for i, shard in enumerate(shards, 1):
        file = f"{stem}-{i:05}-of-{len(shards):05}.safetensors" if sharded else name
        # Some releases of transformers refuse files without this entry.
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
        end = 0
        for key, size in shard.items():
            dtype, shape = tensors[key]
            header[key] = {
                **{"dtype": _NAMES[dtype], "shape": list(shape)},
                "data_offsets": [end, end + size],
            }
            end += size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        # Spaces, which JSON ignores, align the tensors to a multiple of eight bytes.
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER:
            raise CheckpointError(f"{file}: its header would have {len(text)} bytes; use shards")
        first = 8 + len(text)
        fixed.append((file, 0, len(text).to_bytes(8, "little") + text))
        sizes[file] = first + end
        for key, size in shard.items():
            start = first + header[key]["data_offsets"][0]
            regions[key] = [Region(file, start, size)]
            weights[key] = file
    if sharded:
        total = sum(sum(shard.values()) for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        text = (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
        sizes[f"{name}.index.json"] = len(text)
        fixed.append((f"{name}.index.json", 0, text))
    return Layout(regions, fixed, sizes)
