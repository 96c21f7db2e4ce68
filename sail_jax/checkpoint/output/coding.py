"""Writes weights in codes of FP8, as a sink between the executor and the writer.

A scale is the largest entry of its block divided by 448. So a block must be complete before its
first code is known. Entries come in runs, in any order. Complete blocks are coded immediately. The
other entries wait in strips: all columns of the rows that share a scale. A strip too large for
memory waits in an unnamed file.
"""

import contextlib
import json
import math
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from sail_jax.checkpoint.formats.files import CheckpointError, explained
from sail_jax.checkpoint.formats.quantized import Layout
from sail_jax.checkpoint.output.writer import ERRORS, Writer
from sail_jax.checkpoint.sources.dequantised import values_of
from sail_jax.checkpoint.sources.requantised import CodingError, Requantisation
from sail_jax.merging.tensors import Shape
from sail_jax.merging.work import Work

_F8 = np.dtype(ml_dtypes.float8_e4m3fn)
_LARGEST = np.float32(448)
# The number of entries that are coded at once. Their intermediate results fit in the cache of a
# core.
_BLOCK = 1 << 17
# The largest number of bytes of a strip that waits in memory.
_STRIP = 8 << 20

HELD = _STRIP + 64 * _BLOCK
"""Bytes held for each worker."""


def codes_of(values: np.ndarray) -> np.ndarray:
    """Rounds numbers to float8_e4m3fn, to nearest with ties to even, clipped at 448.

    ml_dtypes rounds one number at a time, and converts numbers beyond 448 to NaN.

    Args:
      values: Finite numbers in float32.

    Returns:
      The codes as bytes, of the same shape.
    """
    bits = np.minimum(np.abs(values), _LARGEST).view(np.uint32)
    # Three bits of the significand are kept. The added term carries into them if the number is
    # rounded up.
    whole = bits >> np.uint32(20)
    whole &= np.uint32(1)
    whole += bits
    whole += np.uint32(0x7FFFF)
    whole >>= np.uint32(20)
    whole -= np.uint32((127 - 7) << 3)
    # Below 2^-6 codes count steps of 2^-9, to which adding 2^14 rounds.
    steps = (bits.view(np.float32) + np.float32(1 << 14)).view(np.uint32)
    codes = np.where(bits < np.uint32((127 - 6) << 23), steps, whole).astype(np.uint8)
    codes &= np.uint8(0x7F)
    codes |= (values.view(np.uint32) >> np.uint32(24)).astype(np.uint8) & np.uint8(0x80)
    return codes


class _Waiting:
    """An incomplete strip."""

    def __init__(self, size: int, dtype: np.dtype, folder: Path) -> None:
        self.missing, self._dtype = size, dtype
        small = size * dtype.itemsize <= _STRIP
        self._array = np.empty(size, dtype) if small else None
        # If the file briefly has a name, a later run removes files of this name.
        self._file = None if small else tempfile.TemporaryFile(dir=folder, prefix="data.")  # noqa: SIM115 - `close` does

    def put(self, entries: np.ndarray, at: int) -> None:
        """Takes entries."""
        self.missing -= entries.size
        if self._array is not None:
            self._array[at : at + entries.size] = entries
        elif self._file is not None:
            self._file.seek(at * self._dtype.itemsize)
            self._file.write(np.ascontiguousarray(entries).view(np.uint8).data)

    def get(self, at: int, count: int) -> np.ndarray:
        """Returns entries."""
        if self._file is None:
            assert self._array is not None
            return self._array[at : at + count]
        out = np.empty(count, self._dtype)
        self._file.seek(at * self._dtype.itemsize)
        if self._file.readinto(out.view(np.uint8).data) != out.nbytes:
            raise OSError("a temporary file was cut short")
        return out

    def close(self) -> None:
        """Frees the file."""
        if self._file is not None:
            self._file.close()


class _Weight:
    """A weight, which receives entries and passes on codes."""

    def __init__(
        self,
        work: Work,
        layout: Layout,
        powers: bool,
        put: Callable[[np.ndarray, int], None],
        folder: Path,
    ) -> None:
        self._name, self._dtype, self._put, self._folder = work.name, work.dtype, put, folder
        self._powers, self._lock = powers, threading.Lock()
        grid = layout.grid(work.shape)
        self._rows, self._columns = work.shape[-2:]
        if math.prod(grid) == 1:
            # Matrices that share one scale count as one matrix.
            self._rows = math.prod(work.shape[:-1])
        # The number of rows and columns that share a scale.
        self._high = min(layout.rows or self._rows, self._rows)
        self._wide = min(layout.columns or self._columns, self._columns)
        self.scales = np.ones(grid, layout.dtype)
        self._waiting: dict[int, _Waiting] = {}
        self._square = self._missed = self._largest = 0.0

    def error(self) -> CodingError:
        """Returns the difference between the codes and the entries."""
        relative = math.sqrt(self._missed / self._square) if self._square else 0.0
        return CodingError(relative, self._largest)

    def take(self, entries: np.ndarray, start: int) -> None:
        """Receives entries, and codes complete strips."""
        matrix, strip = self._rows * self._columns, self._high * self._columns
        with self._lock, explained("write", self._folder, kept=True):
            while entries.size:
                which, inside = divmod(start, matrix)
                number, offset = divmod(inside, strip)
                # The last strip of a matrix may have fewer rows.
                size = min(strip, matrix - number * strip)
                number += which * -(-matrix // strip)
                if offset or entries.size < size:
                    count = min(size - offset, entries.size)
                    self._keep(number, size, entries[:count], offset, start - offset)
                else:
                    full = min(entries.size, matrix - inside) // size
                    count, whole = full * size, entries
                    self._code(number, full, size, start, lambda at, n, x=whole: x[at : at + n])
                entries, start = entries[count:], start + count

    def _keep(self, number: int, size: int, entries: np.ndarray, offset: int, start: int) -> None:
        """Stores entries of a strip, which is coded when it is complete."""
        waiting = self._waiting.get(number)
        if waiting is None:
            waiting = self._waiting[number] = _Waiting(size, self._dtype, self._folder)
        waiting.put(entries, offset)
        if not waiting.missing:
            del self._waiting[number]
            with contextlib.closing(waiting):
                self._code(number, 1, size, start, waiting.get)

    def _code(
        self,
        number: int,
        count: int,
        size: int,
        start: int,
        get: Callable[[int, int], np.ndarray],
    ) -> None:
        """Writes the codes of strips of one size; `get` returns their entries."""
        edges = np.arange(0, self._columns, self._wide)
        scales = self.scales.reshape(-1, len(edges))
        at_once = max(1, _BLOCK // size)
        for first in range(0, count, at_once):
            strips = min(at_once, count - first)
            # Several strips at once, or several parts of one strip, which share its scales.
            length = strips * size
            step = length if size <= _BLOCK else max(1, _BLOCK // self._columns) * self._columns
            parts = [(at, min(step, length - at)) for at in range(0, length, step)]
            peaks: Any = np.float32(0)
            for at, n in parts:
                rows = np.abs(self._read(get, first * size + at, n, strips)).max(1)
                peaks = np.maximum(peaks, np.maximum.reduceat(rows, edges, axis=1))
            found = self._scaled(peaks)
            scales[number + first : number + first + strips] = found
            spread = np.repeat(found.astype(np.float32), self._wide, 1)[:, None, : self._columns]
            for at, n in parts:
                values = self._read(get, first * size + at, n, strips)
                codes = self._coded(values, spread)
                self._put(codes.reshape(-1).view(_F8), start + first * size + at)

    def _read(
        self, get: Callable[[int, int], np.ndarray], at: int, count: int, strips: int
    ) -> np.ndarray:
        """Returns entries in float32, as (strip, row, column)."""
        with np.errstate(over="ignore"):
            return get(at, count).astype(np.float32).reshape(strips, -1, self._columns)

    def _scaled(self, peaks: np.ndarray) -> np.ndarray:
        """Returns the scales of blocks from their largest entries; 1 for a block of zeros."""
        if not np.isfinite(peaks).all():
            raise CheckpointError(
                f"{self._name} has NaN or infinity, which FP8 (requantize) cannot store"
            )
        scales, dtype = peaks / _LARGEST, self.scales.dtype
        if self._powers:
            part, exponent = np.frexp(scales)
            scales = np.ldexp(np.float32(1), exponent - (part == 0.5))
        with np.errstate(over="ignore"):
            scales = scales.astype(dtype)
        if not np.isfinite(scales.astype(np.float32)).all():
            raise CheckpointError(
                f"{self._name}: its largest entry, {peaks.max():.4g}, needs a scale beyond {dtype}"
            )
        scales = np.where(scales == 0, ml_dtypes.finfo(dtype).smallest_subnormal, scales)
        return np.where(peaks == 0, np.ones((), dtype), scales).astype(dtype)

    def _coded(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Returns the codes of entries, and adds up their errors."""
        with np.errstate(over="ignore"):
            codes = codes_of(values / scales)
        wide = values.astype(np.float64).reshape(-1)
        self._square += float(wide @ wide)
        wide -= (values_of(_F8)[codes] * scales).reshape(-1)
        self._missed += float(wide @ wide)
        self._largest = max(self._largest, float(np.abs(wide).max(initial=0)))
        return codes


def wanted(
    works: Sequence[Work], codes: Requantisation | None
) -> dict[str, tuple[np.dtype, Shape]]:
    """Lists the tensors of an output. The scales of a weight follow its codes.

    Args:
      works: The work for each tensor.
      codes: The weights to write in codes; None for none.

    Returns:
      The dtype and shape of each tensor, by name.
    """
    tensors: dict[str, tuple[np.dtype, Shape]] = {}
    for work in works:
        layout = codes.layouts.get(work.name) if codes is not None else None
        tensors[work.name] = (work.dtype if layout is None else _F8, work.shape)
        if layout is not None:
            tensors[layout.scales_of(work.name)] = (layout.dtype, layout.grid(work.shape))
    return tensors


class Coding:
    """A sink that writes some weights in codes, and measures the errors of the codes.

    Attributes:
      finished: The names of finished tensors; those in codes also have scales and errors.
    """

    def __init__(self, writer: Writer, codes: Requantisation, works: Sequence[Work]) -> None:
        """Finds the tensors that an earlier run finished.

        Args:
          writer: The writer of the tensors that `wanted` lists.
          codes: The weights to write in codes. Its `errors` are filled.
          works: The work for each tensor.
        """
        self._writer, self._codes = writer, codes
        self._works = {work.name: work for work in works}
        self._weights: dict[str, _Weight] = {}
        self._lock = threading.Lock()
        noted = self._noted()
        # Nothing remains to be done if a run was killed after the output was renamed.
        whole = writer.unchanged and writer.finished == frozenset(wanted(works, codes))
        self.finished = frozenset(
            name
            for name in self._works
            if whole or (name in writer.finished and (name not in codes.layouts or name in noted))
        )
        codes.errors.update({n: x for n, x in noted.items() if n in self.finished})

    def _noted(self) -> dict[str, CodingError]:
        """Returns the errors that an earlier run recorded for its finished weights."""
        found = {}
        for line in self._writer.lines(ERRORS):
            # The last line of a run that was killed may be incomplete.
            with contextlib.suppress(ValueError, TypeError, KeyError):
                name, relative, largest = json.loads(line)
                layout = self._codes.layouts[name]
                if layout.scales_of(name) in self._writer.finished:
                    found[name] = CodingError(float(relative), float(largest))
        return found

    def _weight(self, name: str) -> _Weight:
        """Returns the weight with this name."""
        with self._lock:
            if name not in self._weights:

                def put(array: np.ndarray, start: int) -> None:
                    # A run may have been killed before it recorded the error.
                    if name not in self._writer.finished:
                        self._writer.write(name, array, start)

                self._weights[name] = _Weight(
                    self._works[name], self._codes.layouts[name], self._codes.scheme.powers, put,
                    self._writer.partial,
                )  # fmt: skip
            return self._weights[name]

    def write(self, name: str, array: np.ndarray, start: int = 0) -> None:
        """Takes entries of a tensor.

        Args:
          name: The tensor.
          array: The entries in row-major order, in the dtype of its work.
          start: The index of the first of them in the flat tensor.

        Raises:
          CheckpointError: As `Writer.write` does, and for entries that cannot be coded.
        """
        if name in self._codes.layouts:
            self._weight(name).take(array.reshape(-1), start)
        else:
            self._writer.write(name, array, start)

    def done(self, name: str) -> None:
        """Writes the scales of a tensor in codes, and records that it is finished.

        Args:
          name: The tensor.

        Raises:
          CheckpointError: As `Writer.done` does.
        """
        if name not in self._codes.layouts:
            self._writer.done(name)
            return
        weight, scale = self._weight(name), self._codes.layouts[name].scales_of(name)
        if scale not in self._writer.finished:
            self._writer.write(scale, weight.scales.reshape(-1))
        error = self._codes.errors[name] = weight.error()
        self._writer.note(ERRORS, json.dumps([name, *error]).encode())
        self._writer.done(scale)
        self._writer.done(name)
        del self._weights[name]
