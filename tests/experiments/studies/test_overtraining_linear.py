"""Phase diagrams of overtraining: limits of the theory, and networks compared with theory."""

import numpy as np
import pytest
import xarray as xr
from tiny_runs import tiny_run

from experiments.lab import registry
from experiments.lab.config import varied
from experiments.studies.overtraining_linear.findings import best_times
from experiments.studies.overtraining_linear.run import closed_forms
from theory.two_layer import fine_tuning, inflection_index, modes

ol = registry.load("overtraining_linear")

SMALL = {
    "points": 40,
    "tasks": {"d": 3, "decay": 0.7, "tau": 4.0},
    "networks": {"cells": (2, 3), "seeds": 2, "batch": 32},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "anchor",
        "learning_rate",
        "perturbation",
        "sensitivity",
        "trade_off",
    ],
)
def test_networks_follow_the_closed_forms(name):
    """Error model: O(rate) of the steps and O(1/sqrt(batch)) of the batches, which vanish as
    networks converge: 5 % of the largest loss."""
    config = varied(
        ol.presets[name],
        **SMALL | {"tasks": {**SMALL["tasks"], "kept": 0, "ratio": 2.5}},
        tuning={"rate": 0.003},
    )
    dataset = ol.run(config)
    theory = dataset.tuned_theory.interp(x=dataset.cell_x.values, row=dataset.cell_row.values)
    gap = np.abs(dataset.tuned_mean.values - theory.values).max()
    assert gap < 0.05 * float(dataset.tuned_theory.max())
    assert list(ol.plot(dataset)) == [name]


@pytest.mark.slow
def test_the_end_of_pre_training_is_the_last_stage():
    """After all modes are learned, the loss is that of the last plateau."""
    config = varied(ol.presets["anchor"], **SMALL, tuning={"steps": 20_000})
    sigma = config.tasks.spectrum()
    for row in (0, -1):
        anchor = np.linspace(*config.rows, config.points)[row]
        expected = fine_tuning.pretraining_losses(sigma, config.tasks.target(sigma), anchor)[-1]
        found = closed_forms(config)["loss"][row, -1]
        # e^{-4 sigma_d t} at t = 1.5 tau / sigma_d is 4e-11, times the distance it starts from
        assert found == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.slow
def test_noise_moves_the_inflection_where_definition_4_2_puts_it():
    """The best time lies within the stage that learns mode r: after it passed half its height, and
    before the next one does."""
    small = SMALL | {"tasks": {**SMALL["tasks"], "tau": 12.0}}
    config = varied(ol.presets["default"], **small, rows=(0.42, 0.9))
    tasks = config.tasks
    sigma, times = tasks.spectrum(), tasks.times(tasks.spectrum(), config.points)
    found = closed_forms(config)["inflection"]
    for gamma, time in zip(np.linspace(*config.rows, config.points), found, strict=True):
        r = inflection_index(sigma, tasks.d, gamma, first=0)
        assert r is not None
        if r == 0:
            assert time < tasks.tau / sigma[0]
            continue
        stages = modes.crossing_time(sigma / 2, np.exp(-2 * tasks.tau), sigma)
        step = times[1] / times[0]
        # Other modes are not at rest, which moves the best time by the time scale 1/(2 sigma) of a
        # mode: a share 1/tau of the time tau/(2 sigma) at which it is learned.
        slack = step * (1 + 1 / tasks.tau)
        assert time > stages[r - 1] / slack
        assert r == tasks.d or time < stages[r] * slack


def _trained(loss, std=0.0):
    """Mean losses of networks [row, time] at times 1, 2, 3, ..."""
    loss = np.asarray(loss, float)
    return xr.Dataset(
        {
            "loss_mean": (("cell_row", "cell_x"), loss),
            "loss_std": (("cell_row", "cell_x"), np.full(loss.shape, std)),
        },
        {"cell_x": np.arange(loss.shape[1]) + 1.0},
        {"seeds": 4},
    )


def test_the_best_time_of_networks_is_that_of_their_losses():
    best, low, high = best_times(_trained([[5, 3, 1, 2, 6], [5, 4, 3, 2, 1]]))
    np.testing.assert_array_equal([best[0], low[0], high[0]], [3, 2, 4])
    # If the loss decreases to the end, pre-training did not hurt.
    assert np.isnan([best[1], low[1], high[1]]).all()


def test_a_best_time_is_known_to_the_nearest_times_that_are_clearly_worse():
    """The error of a difference is sqrt(2) std / sqrt(4 seeds): 1.41 for 2."""
    best, low, high = best_times(_trained([[5, 3, 1, 2, 6]], std=2.0))
    np.testing.assert_array_equal([best[0], low[0], high[0]], [3, 2, 5])
    _, low, high = best_times(_trained([[1.1, 1.2, 1, 1.3, 1.1]], std=2.0))
    assert (low[0], high[0]) == (1, 5)  # the whole range


def _map_lines(dataset):
    """Returns the lines on the map of the networks, after checks of that of the closed form."""
    name = dataset.attrs["diagram"]
    left, middle = ol.plot(dataset)[name].axes[:2]
    if name == "misalignment":
        assert len(left.collections) == 2  # the map, and one line
        return [c.get_paths()[0].vertices[:, 0] for c in middle.collections[-2:]]
    assert [line.get_linestyle() for line in left.lines] == ["--"]
    dashed, solid = middle.lines[:2]
    assert (dashed.get_linestyle(), solid.get_linestyle()) == ("--", "-")
    return [dashed.get_xdata(), solid.get_xdata()]


@pytest.mark.slow
def test_the_networks_map_has_the_best_time_of_the_networks():
    """Theory's is dashed on both maps; what was measured is moved, and its line alone follows."""
    dataset = tiny_run("overtraining_linear").dataset
    times = np.arange(dataset.sizes["cell_x"])
    lines = []
    for best in (0, 1):
        moved = dataset.assign(loss_mean=0 * dataset.loss_mean + np.abs(times - best) + 1)
        dashed, solid = _map_lines(moved)
        np.testing.assert_array_equal(solid, dataset.cell_x.values[best])
        lines.append(dashed)
    np.testing.assert_array_equal(*lines)


def test_the_networks_map_has_the_costs_of_the_networks():
    x = np.linspace(0, 1, 5)
    cost = 0.002 * x * np.ones((5, 1))  # at 1e-3 where x is 1/2
    cells, named = ("cell_row", "cell_x"), {"long_name": "axis"}
    data = {"loss_theory": (("row", "x"), cost), "loss_mean": (cells, 0.8 * cost)}
    dataset = xr.Dataset(
        {**data, "loss_std": (cells, cost)},
        {"x": ("x", x, named), "row": ("row", x, named), "cell_x": x, "cell_row": x},
        {"diagram": "misalignment", "seeds": 4},
    )
    dashed, solid = _map_lines(dataset)
    np.testing.assert_allclose(dashed, 0.5)
    np.testing.assert_allclose(solid, 0.625)
