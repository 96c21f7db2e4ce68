"""PyTorch's zip checkpoints (.bin, .pt) without PyTorch, and without trusting their pickle.

The stream is walked opcode by opcode by a machine that knows plain data and five names of
PyTorch's; nothing is imported, called or built on behalf of the stream.
"""

import math
import pickletools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from sail_jax.checkpoint.formats.files import (
    DTYPES,
    MAX_HEADER,
    CheckpointError,
    File,
    LoadedTensor,
    StoredTensor,
    checked_shape,
    reading,
)
from sail_jax.checkpoint.formats.zips import Member, inflate, members
from sail_jax.merging.tensors import Tensor

__all__ = ["read_file"]

_STORAGES = {
    **{"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"},
    **{"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"},
    **{"Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128"},
}
_DTYPES = {"bool": "bool", "half": "float16", "float": "float32", "double": "float64"} | {
    name: name for name in DTYPES
}
_KNOWN = {
    *("collections.OrderedDict", "torch.Size", "torch._utils._rebuild_parameter"),
    *("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"),
    *("torch.storage.UntypedStorage", "torch.UntypedStorage"),
    *(f"torch.{kind}Storage" for kind in _STORAGES),
    *(f"torch.{name}" for name in _DTYPES),
}


class _Global(NamedTuple):
    name: str


class _Storage(NamedTuple):
    kind: str
    key: str


class _Strided(NamedTuple):
    storage: _Storage
    dtype: np.dtype | None
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_MARK = object()


class _Dict(dict[str | int, Any]):
    """A dictionary of the stream; other keys than text and numbers would need its code to hash."""

    def put(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | int):
            raise ValueError(f"a key is a {type(key).__name__}, not text")
        self[key] = value


def _machine(data: bytes) -> Any:
    """What the pickle stands for, as plain data and the records above."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def marked() -> list[Any]:
        at = max(i for i, item in enumerate(stack) if item is _MARK)
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def put(items: list[Any]) -> None:
        if not isinstance(stack[-1], _Dict) or len(items) % 2:
            raise ValueError("items are set on what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            stack[-1].put(key, value)

    def extend(items: list[Any]) -> None:
        if type(stack[-1]) is not list:
            raise ValueError("items are appended to what is no list")
        stack[-1].extend(items)

    opcodes: Any = pickletools.genops(data)
    for opcode, arg, _ in opcodes:
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                stack.append(_MARK)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                stack.append(arg)
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8":
                stack.append(arg)
            case "SHORT_BINSTRING" | "BINSTRING" | "SHORT_BINBYTES" | "BINBYTES":
                stack.append(arg)
            case "EMPTY_DICT":
                stack.append(_Dict())
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE":
                stack.append(tuple(marked()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                if len(stack) < count:
                    raise ValueError("the stack is empty")
                items = tuple(stack[-count:])
                del stack[-count:]
                stack.append(items)
            case "SETITEM":
                items = [stack.pop(), stack.pop()][::-1]
                put(items)
            case "SETITEMS":
                put(marked())
            case "APPEND":
                item = stack.pop()
                extend([item])
            case "APPENDS":
                extend(marked())
            case "BINPUT" | "LONG_BINPUT":
                memo[arg] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[arg])
            case "GLOBAL":
                stack.append(_global(".".join(arg.split(" "))))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_global(f"{module}.{name}"))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "REDUCE":
                args, function = stack.pop(), stack.pop()
                stack.append(_reduce(function, args))
            case "BUILD":  # attributes of a dictionary or a parameter: not ours to keep
                stack.pop()
                if not isinstance(stack[-1], _Dict | _Strided):
                    raise ValueError("state is given to what has none")
            case "STOP":
                return stack.pop()
            case other:
                raise ValueError(f"the opcode {other} has no place in a checkpoint")
    raise ValueError("the pickle does not end")


def _global(name: str) -> _Global:
    if name not in _KNOWN:
        raise CheckpointError(f"the pickle wants '{name[:100]}', which a checkpoint does not need")
    return _Global(name)


def _storage(identity: Any) -> _Storage:
    match identity:
        case ("storage", _Global(kind), str(key), str(), int()) if "Storage" in kind:
            return _Storage(kind, key)
    raise ValueError("a persistent id is not a storage")


def _reduce(function: Any, args: Any) -> Any:
    name = function.name.rpartition(".")[2] if isinstance(function, _Global) else ""
    match name, args:
        case "OrderedDict", ():
            return _Dict()
        case "OrderedDict", ([*pairs],):
            found = _Dict()
            for pair in pairs:
                key, value = pair
                found.put(key, value)
            return found
        case "Size", ([*shape],):
            return tuple(shape)
        case "_rebuild_parameter", (_Strided() as tensor, *_):
            return tensor
        case "_rebuild_tensor_v2", (_Storage() as storage, offset, shape, strides, *rest):
            if len(rest) <= 3:
                return _strided(storage, None, offset, shape, strides)
        case "_rebuild_tensor_v3", (_Storage() as storage, offset, shape, strides, _, _, dtype, *_):
            if isinstance(dtype, _Global) and (kind := dtype.name.rpartition(".")[2]) in _DTYPES:
                return _strided(storage, DTYPES[_DTYPES[kind]], offset, shape, strides)
    raise ValueError(f"{name or 'what is no function'!r} is called with arguments it does not take")


def _strided(
    storage: _Storage, dtype: np.dtype | None, offset: Any, shape: Any, strides: Any
) -> _Strided:
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise ValueError("a tensor has an impossible offset, shape or stride")
    return _Strided(storage, dtype, offset, tuple(shape), tuple(strides))


def read_file(file: File) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of one file by name, nested dictionaries joined by "."; what is not a tensor is
    left out. Of a trainer's checkpoint the "state_dict"."""
    if file.bytes_at(0, min(4, file.size)) != b"PK\3\4":
        raise CheckpointError(
            f"{file.path} is not a zip archive: PyTorch's format before 1.6 is not read, "
            "load it there and save it again"
        )
    found, _ = members(file)
    pickles = [name for name in found if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(f"{file.path} holds no data.pkl: it is not a PyTorch checkpoint")
    if found[pickles[0]].size > MAX_HEADER:
        raise CheckpointError(
            f"{file.path} is damaged: its pickle has more than {MAX_HEADER} bytes"
        )
    root = pickles[0].removesuffix("data.pkl")
    order = found.get(f"{root}byteorder")
    swap = order is not None and bytes(inflate(file, order, 3)) == b"big"
    tensors: dict[str, Tensor] = {}
    with reading(file.path):
        try:
            tree = _machine(inflate(file, found[pickles[0]]).tobytes())
        except CheckpointError as exc:
            raise CheckpointError(f"{file.path} is refused: {exc}") from None
        if not isinstance(tree, _Dict):
            raise ValueError("expected a dictionary of tensors")
        for name, strided in _tensors(tree.get("state_dict", tree), "", set()):
            if name in tensors:
                raise ValueError(f"the name '{name}' is repeated")
            member = found.get(f"{root}data/{strided.storage.key}")
            if member is None:
                raise ValueError(f"the bytes of '{name}' are missing")
            tensors[name] = _tensor(file, name, strided, member, swap)
    return tensors, {}


def _tensors(node: Any, at: str, seen: set[int]) -> Iterator[tuple[str, _Strided]]:
    if isinstance(node, _Strided):
        yield at, node
    elif isinstance(node, _Dict):
        if id(node) in seen:
            raise ValueError("a dictionary lies in it twice, or in itself")
        seen.add(id(node))
        for key, child in node.items():
            yield from _tensors(child, f"{at}.{key}" if at else str(key), seen)


def _tensor(file: File, name: str, strided: _Strided, member: Member, swap: bool) -> Tensor:
    kind = strided.storage.kind.rpartition(".")[2].removesuffix("Storage")
    dtype = strided.dtype or DTYPES.get(_STORAGES.get(kind, ""))
    if dtype is None:
        raise ValueError(f"'{name}' has a storage of type {kind}, which is not read")
    shape = checked_shape(strided.shape, dtype.itemsize, f"{file.path}: '{name}'")
    numel, first = math.prod(shape), strided.offset * dtype.itemsize
    steps = zip(shape, strided.strides, strict=True)
    span = (1 + sum((n - 1) * step for n, step in steps)) * dtype.itemsize if numel else 0
    if first + span > member.size:
        raise ValueError(f"'{name}' reaches beyond the {member.size} bytes of its storage")
    wanted, contiguous = numel, True
    for n, step in zip(shape, strided.strides, strict=True):
        wanted //= max(n, 1)
        contiguous &= n <= 1 or step == wanted
    if contiguous and not member.deflated:
        run = (member.offset + first, numel * dtype.itemsize)
        return StoredTensor(name, dtype, shape, file, [run], swap)

    def load() -> np.ndarray:
        if member.deflated:
            data = inflate(file, member)[first : first + span].copy()
        else:
            data = file.array_at(member.offset + first, span)
        flat = data.view(dtype).byteswap() if swap else data.view(dtype)
        strides = [step * dtype.itemsize for step in strided.strides]
        return np.lib.stride_tricks.as_strided(flat, shape, strides, writeable=False)

    return LoadedTensor(name, dtype, shape, str(file.path), load)
