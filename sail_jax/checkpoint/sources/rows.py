"""A tensor whose rows lie elsewhere: cropped, padded, permuted or averaged, read on demand."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np

from sail_jax.merging.tensors import OnDemand, Tensor, held

__all__ = ["FILL", "ZERO", "Rows", "head_rows"]

ZERO, FILL = -1, -2
"""Instead of a part's number: a row of zeros; the mean of all rows that are no FILL rows."""

_CHUNK = 1 << 20


class Rows(OnDemand):
    """Row i is row `row[i]` of `parts[part[i]]`, zeros (ZERO), or the mean of the others (FILL).

    parts: tensors of equal shape but for axis 0. means: rows i that are the mean of several (part,
    row) instead. dtype: the parts' where it is one, else float32. Reads what is asked for, in
    runs of consecutive rows; a mean is taken in float64 and cast once.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        part: np.ndarray,
        row: np.ndarray,
        means: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    ):
        self.parts, self.means = tuple(parts), dict(means or {})
        part, row = np.array(part, np.int64), np.array(row, np.int64)
        for i in self.means:
            part[i], row[i] = len(self.parts), i
        dtypes = {tensor.dtype for tensor in self.parts}
        dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
        shape = (len(part), *self.parts[0].shape[1:])
        source = " and ".join(dict.fromkeys(tensor.source for tensor in self.parts))
        super().__init__(self.parts[0].name, dtype, shape, source)
        self.width = math.prod(self.shape[1:])
        new = (np.diff(part) != 0) | ((part[1:] >= 0) & (np.diff(row) != 1))
        starts = np.concatenate([[0], np.flatnonzero(new) + 1]) if len(part) else np.array([0])
        # runs of rows that lie together where they come from: (first row, part, row there)
        self.runs = [(int(i), int(part[i]), int(row[i])) for i in starts] if len(part) else []
        self.starts = [run[0] for run in self.runs]
        self._fills, self._mean = FILL in part, None

    @property
    def needs(self) -> int:
        """Bytes that the parts hold while they are read."""
        return sum(map(held, self.parts))

    def form(self) -> np.ndarray | None:
        """The mean of all rows that are no FILL rows, if there are FILL rows: one row, kept."""
        if self._fills and self._mean is None:
            self._mean = self._mean_of_all()
        return self._mean

    def fill(self, formed: np.ndarray | None, out: np.ndarray, start: int) -> None:
        done = 0
        while done < out.size:
            at = (start + done) // self.width
            which = bisect_right(self.starts, at) - 1
            first, part, row = self.runs[which]
            last = self.starts[which + 1] if which + 1 < len(self.runs) else self.shape[0]
            stop = min(out.size, last * self.width - start)
            piece, offset = out[done:stop], start + done - first * self.width
            if part == ZERO:
                piece[...] = 0
            elif part == FILL:
                column = (offset + np.arange(piece.size)) % self.width
                assert formed is not None
                piece[...] = formed[column].astype(self.dtype)
            elif part == len(self.parts):
                self._means(piece, start + done)
            else:
                self._copy(self.parts[part], piece, row * self.width + offset)
            done = stop

    def _copy(self, tensor: Tensor, out: np.ndarray, start: int) -> None:
        if tensor.dtype == self.dtype:
            return tensor.read(out, start)
        for at in range(0, out.size, _CHUNK):
            buffer = np.empty(min(_CHUNK, out.size - at), tensor.dtype)
            tensor.read(buffer, start + at)
            out[at : at + buffer.size] = buffer.astype(self.dtype)

    def _means(self, out: np.ndarray, start: int) -> None:
        done = 0
        while done < out.size:
            at, offset = divmod(start + done, self.width)
            piece = out[done : done + self.width - offset]
            total = np.zeros(piece.size, np.float64)
            for part, row in self.means[at]:
                buffer = np.empty(piece.size, self.parts[part].dtype)
                self.parts[part].read(buffer, row * self.width + offset)
                total += buffer.astype(np.float64)
            piece[...] = (total / len(self.means[at])).astype(self.dtype)
            done += piece.size

    def _mean_of_all(self) -> np.ndarray:
        total, rows = np.zeros(self.width, np.float64), 0
        step = max(1, _CHUNK // max(1, self.width))
        ends = [*self.starts[1:], self.shape[0]]
        for (first, part, _), last in zip(self.runs, ends, strict=True):
            if part == FILL:
                continue
            rows += last - first
            for at in range(first, last, step):
                buffer = np.empty((min(step, last - at), self.width), self.dtype)
                self.fill(None, buffer.reshape(-1), at * self.width)
                total += buffer.astype(np.float64).sum(0)
        return total / max(rows, 1)


def head_rows(tensor: Tensor, rows: int, rest: Tensor | None = None) -> Rows:
    """The first `rows` rows of `tensor`; those it lacks are those of the same number of `rest`."""
    index = np.arange(rows)
    part = (index >= tensor.shape[0]).astype(np.int64)
    return Rows((tensor,) if rest is None else (tensor, rest), part, index)
