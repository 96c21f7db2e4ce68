"""Tensors with rows of other tensors, which are cropped, padded, permuted or averaged when read.

They are used for vocabularies: models with different tokenizers have embeddings with different
rows.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np

from sail_jax.checkpoint.sources.adapted import read_as
from sail_jax.merging.tensors import OnDemand, Tensor, held

ZERO, FILL = -1, -2
"""Used instead of a part's index. ZERO: a row of zeros. FILL: the mean of all rows except FILL."""

# The number of entries that are read at once.
_CHUNK = 1 << 20


class Rows(OnDemand):
    """A tensor made of rows of other tensors, zeros, or means.

    Row i is row `row[i]` of `parts[part[i]]`. Instead of the index of a part, ZERO stands for a row
    of zeros, and FILL for the mean of all rows except FILL rows. Only the requested rows are read,
    in runs of consecutive rows. Means are taken in float64 and rounded once.

    Attributes:
      parts: The tensors that provide the rows.
      means: The rows that are means, and their (part, row) pairs.
      width: Entries of a row.
      runs: Runs of consecutive rows in a part: (first row, part, row there).
      starts: The first row of each run.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        part: np.ndarray,
        row: np.ndarray,
        means: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    ):
        """Stores the arguments; reads nothing yet.

        Args:
          parts: Tensors with equal shapes except for axis 0. If they share a dtype, the rows have
            it; otherwise the rows are float32.
          part: For each row the index of its part, ZERO or FILL, `(n,)`.
          row: For each row its index in the part, `(n,)`; ignored for ZERO and FILL.
          means: For rows that are means: their (part, row) pairs, which replace `part` and `row`.
        """
        self.parts, self.means = tuple(parts), dict(means or {})
        part, row = np.array(part, np.int64), np.array(row, np.int64)
        # Means form a separate part in which each row is its own source, so they form runs like
        # other rows.
        for i in self.means:
            part[i], row[i] = len(self.parts), i
        dtypes = {tensor.dtype for tensor in self.parts}
        dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
        shape = (len(part), *self.parts[0].shape[1:])
        source = " and ".join(dict.fromkeys(tensor.source for tensor in self.parts))
        super().__init__(self.parts[0].name, dtype, shape, source)
        self.width = math.prod(self.shape[1:])
        # A run ends where the part changes, or the rows of a part are not consecutive.
        new = (np.diff(part) != 0) | ((part[1:] >= 0) & (np.diff(row) != 1))
        starts = np.concatenate([[0], np.flatnonzero(new) + 1]) if len(part) else np.array([0])
        self.runs = [(int(i), int(part[i]), int(row[i])) for i in starts] if len(part) else []
        self.starts = [run[0] for run in self.runs]
        self._fills, self._mean = FILL in part, None

    @property
    def needs(self) -> int:
        """The bytes that the parts require while they are read."""
        return sum(map(held, self.parts))

    def form(self) -> np.ndarray | None:
        """Computes the FILL row once.

        Returns:
          The row in float64, or None without FILL rows.
        """
        if self._fills and self._mean is None:
            self._mean = self._mean_of_all()
        return self._mean

    def fill(self, formed: np.ndarray | None, out: np.ndarray, start: int) -> None:
        done = 0
        while done < out.size:
            at = (start + done) // self.width
            # The run that contains row `at`; a read may begin and end within runs, and within rows.
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
                read_as(self.parts[part], piece, row * self.width + offset)
            done = stop

    def _means(self, out: np.ndarray, start: int) -> None:
        """Computes entries of rows that are means."""
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
        """Computes the mean of all rows except FILL rows, in float64."""
        total, rows = np.zeros(self.width, np.float64), 0
        step = max(1, _CHUNK // max(1, self.width))
        ends = [*self.starts[1:], self.shape[0]]
        for (first, part, _), last in zip(self.runs, ends, strict=True):
            if part == FILL:
                continue
            rows += last - first
            for at in range(first, last, step):
                buffer = np.empty((min(step, last - at), self.width), self.dtype)
                # None stands for the mean itself: FILL rows, which depend on it, are skipped here.
                self.fill(None, buffer.reshape(-1), at * self.width)
                total += buffer.astype(np.float64).sum(0)
        return total / max(rows, 1)


def head_rows(tensor: Tensor, rows: int, rest: Tensor | None = None) -> Rows:
    """Takes the first rows of a tensor; missing rows come from another tensor.

    Args:
      tensor: The tensor.
      rows: The number of rows.
      rest: The tensor that provides rows beyond the end of `tensor`. It may be None if there are
        none.

    Returns:
      The tensor of `rows` rows.
    """
    index = np.arange(rows)
    part = (index >= tensor.shape[0]).astype(np.int64)
    return Rows((tensor,) if rest is None else (tensor, rest), part, index)
