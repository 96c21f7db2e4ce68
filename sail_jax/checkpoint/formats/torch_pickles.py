"""PyTorch's zip checkpoints (.bin, .pt), read without PyTorch and without running their pickle.

The standard library's unpickler reads the pickle, reduced to the opcodes of plain data. The few
PyTorch names that are allowed stand for functions and types of this module; every other name is
refused. So the stream cannot import, call or build anything.

The unpickler is the Python implementation. The C implementation hashes every key of a stream:
tuples nested a million deep crash it, and tuples that contain their predecessor twice never finish.
It also allocates its memo for any index in the stream.
"""

import io
import math
import pickle
from collections.abc import Callable, Iterable, Iterator
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
from sail_jax.checkpoint.formats.nesting import joined
from sail_jax.checkpoint.formats.zips import Member, Views, inflate, members
from sail_jax.checks import storage
from sail_jax.merging.tensors import Tensor

# Plain data, the memo, persistent ids (storages), and calls of the stand-ins below. Everything else
# in the pickle language, such as building instances of classes, is left out.
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.STACK_GLOBAL),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
    *(pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.BINBYTES, pickle.SHORT_BINBYTES),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.BINPERSID, pickle.REDUCE, pickle.BUILD),
)
_STORAGES = {
    **{"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"},
    **{"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"},
    **{"Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128"},
}
_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}
# Limits on what a small file can make this process copy or allocate. No tensor has this many axes,
# and no function this many arguments.
_AXES = 64
_ARGUMENTS = 16
# The largest number of bytes of a tensor that repeats entries of its storage.
_REPEATED = 1 << 30
# The largest number of bytes read for all tensors together, as a multiple of the file's size.
# Models tie a few weights, and some use one layer many times.
_SHARED = 64
# The largest number of reads of a pickle, one or two for each of its instructions. An instruction
# of one byte makes a list of 70. A tensor takes about 50 reads, and 2^23 a few seconds.
_READS = 1 << 23


class _Stream(io.BytesIO):
    """A pickle that can be read only a limited number of times."""

    left = _READS

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"its pickle has more than {_READS} parts")
        return super().read(size)


class _Dict(dict[str | int, object]):
    """A dictionary of the stream. Its keys are only text and integers.

    Other keys are refused before they are hashed, because hashing nested tuples may never end.
    """

    __slots__ = ()

    def __setitem__(self, key: object, value: object) -> None:
        if not isinstance(key, str | int):
            raise ValueError(f"a key is a {type(key).__name__}, not text")
        super().__setitem__(key, value)


class _StorageType(NamedTuple):
    """A type of storage, such as `torch.FloatStorage`; the dtype is None if tensors state it."""

    dtype: np.dtype | None


class _Storage(NamedTuple):
    """A storage: its type, and the name of the member of the archive that contains its bytes."""

    dtype: np.dtype | None
    key: str


class _Strided(NamedTuple):
    """A tensor as PyTorch describes it: a strided view, in entries, of a storage."""

    key: str
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _ordered_dict() -> _Dict:
    """Stands for `collections.OrderedDict`."""
    return _Dict()


def _size(numbers: object) -> tuple[int, ...]:
    """Returns a shape or strides as a tuple; also stands for `torch.Size`.

    Its length is limited, because a stream could copy a long list many times.
    """
    if (
        not isinstance(numbers, list | tuple)
        or len(numbers) > _AXES
        or not all(type(n) is int and 0 <= n < 2**62 for n in numbers)
    ):
        raise ValueError("a tensor has an impossible offset, shape or stride")
    return tuple(numbers)


def _rebuild_parameter(tensor: object, *_: object) -> _Strided:
    """Stands for PyTorch's function of this name, and returns the tensor of a parameter."""
    if not isinstance(tensor, _Strided):
        raise ValueError("a parameter is not a tensor")
    return tensor


def _rebuild_tensor_v2(
    storage: object, offset: object, shape: object, strides: object, *_: object
) -> _Strided:
    """Stands for PyTorch's function of this name, for storages that have a type."""
    if not isinstance(storage, _Storage) or storage.dtype is None:
        raise ValueError("the storage of a tensor is missing, or has an unsupported type")
    (first,), sizes, steps = _size([offset]), _size(shape), _size(strides)
    if len(sizes) != len(steps):
        raise ValueError("a tensor has an impossible offset, shape or stride")
    return _Strided(storage.key, storage.dtype, first, sizes, steps)


def _rebuild_tensor_v3(storage: object, *about: object) -> _Strided:
    """Stands for PyTorch's function of this name, for untyped storages."""
    offset, shape, strides, _, _, dtype, *_ = about
    if not isinstance(storage, _Storage) or not isinstance(dtype, np.dtype):
        raise ValueError("the storage or the type of a tensor is missing")
    return _rebuild_tensor_v2(storage._replace(dtype=dtype), offset, shape, strides)


_STAND_INS = {
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": _size,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch.storage.UntypedStorage": _StorageType(None),
    "torch.UntypedStorage": _StorageType(None),
    **{f"torch.{kind}Storage": _StorageType(DTYPES[name]) for kind, name in _STORAGES.items()},
    **{f"torch.{name}": dtype for name, dtype in DTYPES.items()},
    **{f"torch.{alias}": DTYPES[name] for alias, name in _ALIASES.items()},
}


class _Dispatch(dict[int, Callable[[Any], None]]):
    """The unpickler's methods by opcode; any other opcode is refused."""

    def __missing__(self, opcode: int) -> Callable[[Any], None]:
        raise ValueError(f"the opcode {bytes([opcode])!r} is not allowed in a checkpoint")


class _Unpickler(pickle._Unpickler):
    """The standard library's unpickler for plain data.

    For any stream, its stack holds only numbers, text, bytes, lists, tuples and stand-ins.
    """

    stack: list[object]
    append: Callable[[object], None]
    read: Callable[[int], bytes]

    def find_class(self, module: str, name: str) -> object:
        if f"{module}.{name}" not in _STAND_INS:
            name = f"{module}.{name}"[:100]
            raise CheckpointError(f"the pickle uses '{name}', which a checkpoint does not need")
        return _STAND_INS[f"{module}.{name}"]

    def persistent_load(self, pid: object) -> _Storage:
        match pid:
            case ("storage", _StorageType(dtype), str(key), str(), int()):
                return _Storage(dtype, key)
        raise ValueError("a persistent id is not a storage")

    def load_frame(self) -> None:
        """Skips the length of a frame, so that all reads use the stream's own `read`."""
        self.read(8)

    def load_empty_dictionary(self) -> None:
        self.append(_Dict())

    def load_reduce(self) -> None:
        """Calls a stand-in.

        It may have few arguments only, because a stream could copy a long tuple many times.
        """
        if not isinstance(self.stack[-1], tuple) or len(self.stack[-1]) > _ARGUMENTS:
            raise ValueError("a function is called with wrong arguments")
        pickle._Unpickler.load_reduce(self)  # type: ignore[attr-defined]

    def load_build(self) -> None:
        """Drops the attributes that a stream gives to a dictionary or a parameter."""
        self.stack.pop()
        if not isinstance(self.stack[-1], _Dict | _Strided):
            raise ValueError("state is given to an object without state")

    dispatch = _Dispatch({code: pickle._Unpickler.dispatch[code] for code in b"".join(_OPCODES)})
    dispatch[pickle.FRAME[0]] = load_frame
    dispatch[pickle.EMPTY_DICT[0]] = load_empty_dictionary
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.BUILD[0]] = load_build


def read_file(file: File) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads the description of a PyTorch checkpoint; the bytes of tensors stay in the file.

    Args:
      file: The archive.

    Returns:
      The tensors by name, with "." between the keys of nested dictionaries, and empty metadata. If
      the checkpoint has a "state_dict", as trainers write it, only its tensors are read. Everything
      else is left out.

    Raises:
      CheckpointError: If the file is not a zip archive (PyTorch before 1.6 wrote others), contains
        no PyTorch checkpoint, is damaged, or its pickle uses more than plain data.
    """
    if file.bytes_at(0, min(4, file.size)) != b"PK\3\4":
        raise CheckpointError(
            f"{file.path} is not a zip archive; PyTorch's format before 1.6 is not supported: "
            "load it with PyTorch and save it again"
        )
    # torch.save puts everything under one folder of any name, hence "/data.pkl".
    entries, _ = members(file)
    pickles = [name for name in entries if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(f"{file.path} holds no data.pkl: it is not a PyTorch checkpoint")
    if entries[pickles[0]].size > MAX_HEADER:
        raise CheckpointError(
            f"{file.path} is damaged: its pickle has more than {MAX_HEADER} bytes"
        )
    root = pickles[0].removesuffix("data.pkl")
    order = entries.get(f"{root}byteorder")
    swap = order is not None and bytes(inflate(file, order, 0, 3)) == b"big"
    tensors: dict[str, Tensor] = {}
    views: list[tuple[_Strided, Member]] = []
    unpacked, loads = Views(file), dict[_Strided, Callable[[], np.ndarray]]()
    with reading(file.path):
        try:
            stream = _Stream(inflate(file, entries[pickles[0]]).data)
            # Texts written by Python 2 may be any bytes, all of which latin-1 decodes.
            tree = _Unpickler(stream, encoding="latin-1").load()
        except CheckpointError as exc:
            raise CheckpointError(f"{file.path} is refused: {exc}") from None
        if not isinstance(tree, _Dict):
            raise ValueError("expected a dictionary of tensors")
        for name, strided in _tensors(tree.get("state_dict", tree), "", set()):
            if name in tensors:
                raise ValueError(f"the name '{name}' is repeated")
            member = entries.get(f"{root}data/{strided.key}")
            if member is None:
                raise ValueError(f"the bytes of '{name}' are missing")
            tensors[name] = _tensor(file, name, strided, member, swap, unpacked, loads)
            views.append((strided, member))
    _check_work(file, views)
    return tensors, {}


def _tensors(node: object, at: str, seen: set[int]) -> Iterator[tuple[str, _Strided]]:
    """Yields the tensors in nested dictionaries with their names."""
    if isinstance(node, _Strided):
        yield at, node
    elif isinstance(node, _Dict):
        # The memo allows a stream to use one dictionary in many places, and traversing all of them
        # might never end.
        if id(node) in seen:
            raise ValueError("it contains a dictionary twice, or within itself")
        seen.add(id(node))
        for key, child in node.items():
            yield from _tensors(child, joined(at, ".", key), seen)


def _extent(view: _Strided) -> tuple[int, int, int]:
    """Returns the first byte of a view in its storage, the bytes to its last one, and its size."""
    numel, itemsize = math.prod(view.shape), view.dtype.itemsize
    # The last entry of a strided view has the largest offset, since strides are not negative.
    steps = zip(view.shape, view.strides, strict=True)
    span = 1 + sum((n - 1) * step for n, step in steps) if numel else 0
    return view.offset * itemsize, span * itemsize, numel * itemsize


def _check_work(file: File, views: Iterable[tuple[_Strided, Member]]) -> None:
    """Refuses views that repeat their storages far more often than models do."""
    work, at, storages = 0, ("", 0), dict[str, int]()
    for view, member in views:
        first, span, size = _extent(view)
        work += max(span, size)
        storages[view.key] = member.size
        if member.deflated:
            # Reading starts at the beginning, unless the view follows the previous one.
            work += first - (at[1] if at[0] == view.key and at[1] <= first else 0)
            at = (view.key, first + span)
    kept = sum(storages.values())
    # Packed storages may be much larger than the file, and a few views of each are normal.
    most = max(_SHARED * file.size, 4 * kept, _REPEATED)
    if work > most:
        raise CheckpointError(
            f"{file.path}: its tensors are views of {storage(kept)} and would need "
            f"{storage(work)} of reads; the limit is {storage(most)}"
        )


def _tensor(
    file: File,
    name: str,
    strided: _Strided,
    member: Member,
    swap: bool,
    unpacked: Views,
    loads: dict[_Strided, Callable[[], np.ndarray]],
) -> Tensor:
    """Checks a strided view against its storage, and makes a tensor of it."""
    dtype = strided.dtype
    shape = checked_shape(strided.shape, dtype.itemsize, f"{file.path}: '{name}'")
    first, span, size = _extent(strided)
    if first + span > member.size:
        raise ValueError(f"'{name}' reaches beyond the {member.size} bytes of its storage")
    # A stride of 0 repeats entries: a small file could describe a tensor of any size.
    if size > max(span, _REPEATED):
        raise ValueError(f"'{name}' repeats {span} bytes until they are {size}")
    # Contiguous: each stride is the row-major stride, where an axis has more than one entry. Only
    # then, and if the storage is not packed, can entries be read in place.
    wanted, contiguous = math.prod(shape), True
    for n, step in zip(shape, strided.strides, strict=True):
        wanted //= max(n, 1)
        contiguous &= n <= 1 or step == wanted
    if contiguous and not member.deflated:
        return StoredTensor(name, dtype, shape, file, [(member.offset + first, size)], swap)

    def load() -> np.ndarray:
        flat = unpacked.read(member, first, span).view(dtype)
        if swap:
            flat.byteswap(inplace=True)
        strides = [step * dtype.itemsize for step in strided.strides]
        # The entries are read as raw bytes, because NumPy does not know the name "<f1" of
        # float8_e5m2 in ml_dtypes.
        raw = flat.view(f"V{dtype.itemsize}")
        return np.lib.stride_tricks.as_strided(raw, shape, strides, writeable=False).view(dtype)

    # Equal views share a function, which identifies them as one tensor.
    same = loads.setdefault(strided, load)
    return LoadedTensor(name, dtype, shape, file.called, same, span)
