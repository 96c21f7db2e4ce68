"""A hash of a merge's computation, `Merge.identity`, which differs between computations.

Interrupted work continues only if its merge is still the same. A merge contains numbers and
functions, and functions change with the program. Neither their names nor their own code reveal all
changes. For example, `transforms.drop` stays the same when `random_bits.mix` changes, which it
calls through two other functions. The hash therefore follows references from functions, within this
package and within the user's package.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import jax
import numpy as np

_CONSTANT = (bool, int, float, complex, str, bytes, type(None))
_ARRAY = (jax.Array, np.ndarray, np.generic)
_HERE = __name__.partition(".")[0]


def digest(*parts: Any) -> str:
    """Computes a hash of known values, 64 hexadecimal digits, the same in every process.

    For a function, it covers the code and everything that the code refers to in its own package or
    in this one: functions, methods of classes, constants. It does not cover other packages, or
    functions that are looked up at run time. Callers therefore compare versions, too.
    """
    return hashlib.sha256(repr(_plain(parts)).encode()).hexdigest()


def _plain(x: Any) -> Any:
    """Converts a part of a merge to values with the same `repr` in every process."""
    if type(x) in _CONSTANT:
        return repr(x)
    if isinstance(x, _ARRAY):
        array = np.asarray(x)
        return [str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()]
    if isinstance(x, Mapping):
        return [list(map(_plain, entry)) for entry in x.items()]
    if isinstance(x, tuple | list):
        return list(map(_plain, x))
    if isinstance(x, functools.partial):
        return ["partial", *map(_plain, (x.func, x.args, x.keywords))]
    if isinstance(x, type):
        return _named(x)
    if dataclasses.is_dataclass(x):
        values = [_plain(getattr(x, field.name)) for field in dataclasses.fields(x)]
        return [_reached(type(x)), *values]
    if isinstance(function := _unwrapped(x), FunctionType):
        cells = [_plain(cell.cell_contents) for cell in function.__closure__ or ()]
        defaults = _plain((function.__defaults__, function.__kwdefaults__))
        return [_reached(function), cells, defaults]
    return [_reached(type(x)), _plain(vars(x))] if hasattr(x, "__dict__") else repr(x)


def _named(x: Any) -> str:
    """Returns the name of a function or a class, with its module."""
    return f"{x.__module__}.{x.__qualname__}"


def _unwrapped(x: Any) -> Any:
    """Returns the function within decorators, such as `jax.jit` and `property`, or a method."""
    if isinstance(x, functools.cached_property):
        return _unwrapped(x.func)
    for name in ("__wrapped__", "__func__", "fget"):
        if (inner := getattr(x, name, None)) is not None:
            return _unwrapped(inner)
    return x


_FOUND: dict[Any, str] = {}
"""Results of `_reached`, by class or by code and globals; functions are made again and again."""


def _reached(start: Any) -> str:
    """Returns the name of a function or a class, with a hash of its code and everything it uses."""
    key = start if isinstance(start, type) else (start.__code__, id(start.__globals__))
    if key not in _FOUND:
        packages = {_HERE, start.__module__.partition(".")[0]}
        records, todo = dict[str, Any](), [start]
        while todo:
            x = todo.pop()
            name = _named(x)
            if name not in records and name.partition(".")[0] in packages:
                records[name] = []
                for value in _methods(x) if isinstance(x, type) else _uses(x, records[name]):
                    todo += _followed(value, records[name])
        found = repr(sorted(records.items())).encode()
        _FOUND[key] = f"{_named(start)} {hashlib.sha256(found).hexdigest()}"
    return _FOUND[key]


def _methods(x: type) -> Iterator[Any]:
    """Yields the functions of a class, and the classes that it extends."""
    yield from x.__bases__
    yield from (value for _, value in sorted(vars(x).items()))


def _uses(function: FunctionType, record: list[Any]) -> Iterator[Any]:
    """Records the code of a function, and yields everything that the code refers to."""
    codes = [function.__code__]
    for code in codes:
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
        # File and line numbers are omitted, because they do not affect the behaviour.
        constants = [c for c in code.co_consts if not isinstance(c, CodeType)]
        record.append([code.co_code.hex(), code.co_names, list(map(_ordered, constants))])
    names = sorted({name for code in codes for name in code.co_names})
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            # `random_bits.mix` is two names; the second probably belongs to the first, a module.
            yield from (vars(value)[other] for other in names if other in vars(value))
        elif value is not None:
            yield value


def _ordered(x: Any) -> Any:
    """Sorts the sets in a constant of code, so that their order is the same in every process."""
    if isinstance(x, frozenset):
        return ["set", *sorted(map(repr, x))]
    return [_ordered(value) for value in x] if isinstance(x, tuple) else repr(x)


def _followed(x: Any, record: list[Any]) -> Iterator[Any]:
    """Yields the functions and classes in a value, and records its constants."""
    function = _unwrapped(x)
    if isinstance(x, type) or isinstance(function, FunctionType):
        yield x if isinstance(x, type) else function
    elif isinstance(x, _CONSTANT):
        record.append(repr(x))
    elif isinstance(x, _ARRAY):
        record.append(_plain(x))
    elif isinstance(x, tuple):
        for value in x:
            yield from _followed(value, record)
    elif isinstance(x, MappingProxyType):
        for key, value in x.items():
            record.append(repr(key))
            yield from _followed(value, record)
    elif dataclasses.is_dataclass(x):
        yield type(x)
        for field in dataclasses.fields(x):
            yield from _followed(getattr(x, field.name), record)
