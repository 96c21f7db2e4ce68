"""One dataset of the results of all points of a grid."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from sail_jax.disk import StoreError

OWN = "own_"
"""The beginning of the new name of a study's dimension or variable that has the name of an axis."""
AT = "_values"
"""The end of the new name of a dimension's coordinate that is not the same at all points."""
_PROVENANCE = {"experiment", "config", "seed", "versions", "device", "device_count"}
_PROVENANCE |= {"started", "wall_seconds"}


def combined(
    axes: Mapping[str, Sequence[Any]], points: Sequence[xr.Dataset], about: Mapping[str, str]
) -> xr.Dataset:
    """Combines the results of all points of a grid.

    Variables get the axes as their first dimensions. A coordinate that is the same at all points
    stays as it is; others get the axes, too. If the coordinate of a dimension differs between
    points, it is called "NAME_values", and the dimension has no other. A dimension or variable of
    the study with the name of an axis becomes "own_NAME".

    Args:
      axes: The values of each axis.
      points: The result of each point. The last axis varies fastest.
      about: The meaning of each axis, for labels; empty if it is not known.

    Returns:
      The dataset. Its attribute "axes" names the axes, separated by ", ". Its attribute "left_out"
      names variables that do not have the same form at all points. They are left out.

    Raises:
      StoreError: If all variables are left out.
    """
    points = [_renamed(point, axes) for point in points]
    points = _without_own_positions(points)
    names = list(dict.fromkeys(name for point in points for name in point.variables))
    same = [name for name in names if len({_form(point, name) for point in points}) == 1]
    sizes = tuple(map(len, axes.values()))
    variables: dict[Any, xr.Variable] = {}
    coordinates: dict[Any, xr.Variable] = {
        axis: xr.Variable(
            axis, np.asarray(values), {"long_name": about[axis]} if about[axis] else {}
        )
        for axis, values in axes.items()
    }
    for name in same:
        every = [point.variables[name] for point in points]
        is_coordinate = name in points[0].coords
        if is_coordinate and all(one.equals(every[0]) for one in every):
            coordinates[name] = every[0]
            continue
        values = np.stack([one.values for one in every]).reshape(*sizes, *every[0].shape)
        joined = xr.Variable((*axes, *every[0].dims), values, every[0].attrs)
        (coordinates if is_coordinate else variables)[name] = joined
    if not variables:
        raise StoreError(
            "no variable has the same dimensions at all points of the sweep, so there is no common "
            "result; the results of the points stay in their folders"
        )
    attributes = {**_common(points), "axes": ", ".join(axes)}
    if left_out := [str(name) for name in names if name not in same]:
        attributes["left_out"] = ", ".join(left_out)
    return xr.Dataset(variables, coordinates, attributes)


def _renamed(point: xr.Dataset, axes: Mapping[str, Any]) -> xr.Dataset:
    """Renames dimensions and variables of a study that have the name of an axis."""
    taken = {*point.dims, *point.variables}
    return point.rename({axis: f"{OWN}{axis}" for axis in axes if axis in taken})


def _without_own_positions(points: Sequence[xr.Dataset]) -> list[xr.Dataset]:
    """Renames coordinates of dimensions that are not the same at all points."""
    first = points[0]
    moved = [
        dim
        for dim in first.dims
        if dim in first.coords
        and not all(
            dim in point.coords and point.variables[dim].equals(first.variables[dim])
            for point in points
        )
    ]
    return [
        point.drop_vars(here).assign_coords(
            {f"{dim}{AT}": (dim, point.variables[dim].values, point[dim].attrs) for dim in here}
        )
        for point in points
        for here in [[dim for dim in moved if dim in point.coords]]
    ]


def _common(points: Sequence[xr.Dataset]) -> dict[str, Any]:
    """Returns the attributes of a study that are the same at all points."""
    return {
        key: value
        for key, value in points[0].attrs.items()
        if key not in _PROVENANCE and all(_equal(point.attrs.get(key), value) for point in points)
    }


def _form(point: xr.Dataset, name: Any) -> Any:
    """Returns what must be equal for values to be stacked; None if there is no such variable."""
    if name not in point.variables:
        return None
    variable = point.variables[name]
    kind = "number" if variable.dtype.kind in "biuf" else "text"
    return variable.dims, variable.shape, kind, name in point.coords


def _equal(a: Any, b: Any) -> bool:
    """Compares values of attributes, which may be arrays."""
    return type(a) is type(b) and np.array_equal(a, b)
