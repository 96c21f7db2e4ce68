"""Tables of numbers with named axes, as the explorer's page holds them."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

__all__ = ["Table", "table"]


class Table(NamedTuple):
    """Numbers over named axes.

    Attributes:
      axes: The names of the axes, as the page's controls have them.
      values: The numbers, one axis for each name.
    """

    axes: tuple[str, ...]
    values: Float32[np.ndarray, "*axes"]

    def at(self, **index: int) -> np.ndarray:
        """Takes positions on some axes, or leaves an axis that is not named whole.

        Args:
          index: Positions by the name of the axis; names that the table lacks do not matter.

        Returns:
          The values there.
        """
        return self.values[tuple(index.get(axis, slice(None)) for axis in self.axes)]


def table(axes: str, values: np.ndarray) -> Table:
    """Makes a table of what was computed in double precision.

    Args:
      axes: The names of the axes, with spaces between them.
      values: The numbers.

    Returns:
      The table, in single precision.

    Raises:
      ValueError: If there are more or fewer names than axes.
    """
    names = tuple(axes.split())
    if len(names) != np.ndim(values):
        raise ValueError(f"axes must name {np.ndim(values)} axes; got {axes!r}")
    return Table(names, np.ascontiguousarray(values, np.float32))
