"""Trained networks, compared with theory on the same data sets.

These kinds are compared. Each has one more property of the network than the previous one:

  estimator  the end of training: alpha -> 0, t -> inf (`theory.deep_linear.estimators`)
  flow       gradient flow of rank one, alpha -> 0, at the time at which the network stopped
  narrow     descent of rank one, alpha -> 0, with the network's own rate and number of steps
  network    descent of the full layers

The difference between a network and its estimator is thus a sum of three parts: stopping time (flow
- estimator), learning rate (narrow - flow) and size of the initial weights (network - narrow). From
scratch, one layer starts at the network's own initial weights. For more than two layers no flow is
known.
"""

import numpy as np
import xarray as xr

from experiments.studies.shared.transfer_regions import FAR

KINDS = ("estimator", "flow", "narrow", "network")
PARTS = {
    "stopping time": ("flow", "estimator"),
    "learning rate": ("narrow", "flow"),
    "initial size α": ("network", "narrow"),
}


def gains(dataset: xr.Dataset, near: bool = False, of: str = "risk") -> xr.DataArray:
    """Computes the transferability of each trained network, and of the kinds compared with it.

    Args:
      dataset: The study's dataset, with trained networks.
      near: Whether to keep loads that are so close to n = d that means over draws do not exist.
      of: The variable with the risks, `risk` or `orthogonal_risk`.

    Returns:
      R_scratch - R_transfer `[network, kind, mode, cell_load, cell_theta, sigma]`; without `kind`
      for `orthogonal_risk`.
    """
    far = np.abs(dataset.cell_n - dataset.attrs["trained_d"]) >= FAR
    risk = dataset[of] if near else dataset[of].isel(cell_load=far.values)
    return risk.sel(way="scratch") - risk.sel(way=dataset.mode.values).rename(way="mode")


def parts(gains: xr.DataArray) -> dict[str, xr.DataArray]:
    """Splits the difference between networks and their estimators into three parts.

    Args:
      gains: The result of the function `gains`, or a selection of it that has all kinds.

    Returns:
      The parts by the names of `PARTS`; their sum is network - estimator.
    """
    return {
        name: gains.sel(kind=one, drop=True) - gains.sel(kind=other, drop=True)
        for name, (one, other) in PARTS.items()
    }
