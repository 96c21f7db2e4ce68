"""Trained networks, and what theory says of the very same data sets, from its limit on.

The kinds that are compared:

  estimator  where training ends: alpha -> 0, t -> inf (`theory.deep_linear.estimators`)
  flow       gradient flow of rank one, alpha -> 0, at the time at which the network stopped
  narrow     descent of rank one, alpha -> 0, with the network's own rate and number of steps
  network    descent of the full layers

so that what sets a network apart from its estimator is a sum of three parts: stopping time (flow -
estimator), learning rate (narrow - flow), size of the initial weights (network - narrow).
From scratch, one layer begins where the network does, and more than two have no flow that is known.
"""

from typing import TYPE_CHECKING

import numpy as np

from experiments.studies.transfer_phase.regions import FAR

if TYPE_CHECKING:
    import xarray as xr

KINDS = ("estimator", "flow", "narrow", "network")
PARTS = {
    "stopping time": ("flow", "estimator"),
    "learning rate": ("narrow", "flow"),
    "initial size α": ("network", "narrow"),
}


def gains(dataset: "xr.Dataset") -> "xr.DataArray":
    """Transferability `[network, kind, mode, cell_gamma, cell_theta, sigma]`, but for loads
    too near n = d."""
    far = np.abs(dataset.cell_n - dataset.attrs["trained_d"]) >= FAR
    risk = dataset.risk.isel(cell_gamma=far.values)
    return risk.sel(way="scratch") - risk.sel(way=dataset.mode.values).rename(way="mode")


def parts(gains: "xr.DataArray") -> "dict[str, xr.DataArray]":
    """What sets networks apart from their estimators, as a sum of three."""
    return {
        name: gains.sel(kind=one, drop=True) - gains.sel(kind=other, drop=True)
        for name, (one, other) in PARTS.items()
    }
