"""Trained networks, compared with what theory says of the very same data sets.

These kinds are compared, each with one more property of the network than the one before:

  estimator  where training ends: alpha -> 0, t -> inf (`theory.deep_linear.estimators`)
  flow       gradient flow of rank one, alpha -> 0, at the time at which the network stopped
  narrow     descent of rank one, alpha -> 0, with the network's own rate and number of steps
  network    descent of the full layers

So the difference between a network and its estimator is a sum of three parts: stopping time (flow -
estimator), learning rate (narrow - flow) and size of the initial weights (network - narrow). From
scratch, one layer begins where the network does, and of more than two layers no flow is known.
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
    """Computes the transferability of each trained network, and of what it is compared with.

    Args:
      dataset: The study's dataset, with trained networks.
      near: Whether to keep loads that are too near n = d for means over draws to exist.
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
      gains: What the function `gains` returns, or a selection of it that has all kinds.

    Returns:
      The parts by the names of `PARTS`; their sum is network - estimator.
    """
    return {
        name: gains.sel(kind=one, drop=True) - gains.sel(kind=other, drop=True)
        for name, (one, other) in PARTS.items()
    }
