"""Figures of the phase diagrams of transfer."""

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from tiny_runs import tiny_run

from experiments.lab import registry, store
from experiments.lab.config import varied
from experiments.studies.transfer_phase import plots
from experiments.studies.transfer_phase.config import PRESETS
from theory import deep_linear as dl


@pytest.mark.slow
@pytest.mark.parametrize("rounded", [0.0, 1e-16])
def test_where_the_line_is_drawn_transfer_changes_sign(rounded):
    """Also of results whose ends of no region are equal but for rounding."""
    dataset = tiny_run("transfer_phase").dataset.copy()
    dataset["linear_upper"] = dataset.linear_upper + rounded
    drawn = 0
    for sigma in dataset.sigma.values:
        _, ax = plt.subplots()
        plots._draw_boundary(ax, dataset.sel(sigma=sigma), "linear")
        gamma, theta = np.concatenate([line.get_xydata() for line in ax.lines]).T
        plt.close()
        with jax.enable_x64(True):
            gain = np.asarray(dl.transferability_limit("linear", gamma, theta, sigma))
        # The slope of the risk is that of sigma^2 / (1 - gamma); loads are rounded to some eps.
        assert np.all(np.abs(gain) < 1e-12 * (1 + (sigma / (1 - gamma)) ** 2))
        drawn += gamma.size
    assert drawn > 100


@pytest.mark.slow
def test_noises_of_any_number_of_digits_are_drawn(tmp_path):
    config = varied(PRESETS["tiny"], sigmas=(0.2, 0.5), modes=("linear",), draws=2)
    study = registry.load("transfer_phase")
    with store.Run.open(tmp_path, study.name, config) as run:
        _, figures = store.complete(run, study, config)
    assert {"linear_transfer", "linear_transfer_sigma0_2"} <= figures.keys()
    assert (tmp_path / "linear_transfer_sigma0_2.png").exists()
