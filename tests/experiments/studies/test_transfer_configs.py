"""What the studies of transfer in deep linear networks refuse."""

from math import inf, nan

import pytest

import sail_jax
from experiments.lab import registry
from experiments.lab.config import varied
from sail_jax.deprecated import UNTIL


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("transfer_phase", {"d": 3}, "d must be at least 4; got 3"),
        ("transfer_phase", {"seed": -1}, "seed must be at least 0"),
        ("transfer_phase", {"thetas": 4}, r"thetas must be .*5.*; got 4"),
        ("transfer_phase", {"theta_max": 1.5}, r"theta_max must be .*1.*; got 1.5"),
        ("transfer_phase", {"thetas": 1}, "thetas must be at least 5"),
        ("transfer_phase", {"load_max": inf}, "load_max must be finite"),
        ("transfer_phase", {"sigmas": (0.2, 0.2)}, "sigmas must be .* all different"),
        ("transfer_phase", {"sigmas": (-0.1,)}, r"sigmas\[0\] must be at least 0"),
        ("transfer_phase", {"depths": (0.5,)}, r"depths\[0\] must be at least 1; got 0.5"),
        ("transfer_phase", {"depths": (nan,)}, r"depths\[0\] must be at least 1"),
        ("transfer_phase", {"modes": ("both",)}, r"modes\[0\] must be one of linear, fine_tuning"),
        ("transfer_phase", {"d": 20}, "the smallest load gives n = 0 samples"),
        ("transfer_phase", {"loads": 41}, "n = 500 is within 1 of d = 500"),
        ("transfer_phase", {"networks": {"d": 7}}, "networks.d must be at least 8; got 7"),
        ("transfer_phase", {"networks": {"layers": 0}}, "networks.layers must be at least 1"),
        ("transfer_phase", {"networks": {"alpha": -1e-5}}, "networks.alpha must be greater than 0"),
        ("transfer_phase", {"networks": {"rate": 0.0}}, "networks.rate must be greater than 0"),
        ("transfer_phase", {"networks": {"steps": 0}}, "networks.steps must be at least 1; got 0"),
        ("transfer_phase", {"networks": {"loss": -1.0}}, "networks.loss must be at least 0"),
        ("transfer_phase", {"networks": {"draws": 1}}, "networks.draws must be at least 2; got 1"),
        (
            "transfer_phase",
            {"networks": {"cells": (6, 1)}},
            r"networks.cells\[1\] must be at least 2; got 1",
        ),
        (
            "transfer_phase",
            {"train": True, "networks": {"cells": (5, 5)}},
            "n = 40 is within 1 of networks.d = 40",
        ),
        (
            "transfer_phase",
            {"train": True, "networks": {"cells": (20, 6)}},
            "the smallest load gives n = 2 samples",
        ),
        ("transfer_phase", {"train": True, "networks": {"rate": 0.1}}, "networks.rate must be at "),
        (
            "transfer_phase",
            {"train": True, "networks": {"steps": 800}},
            "networks.steps must be at least 898 for 2 layers of alpha = 1e-05 to leave 0",
        ),
        (
            "transfer_phase",
            {"train": True, "networks": {"layers": 3}},
            "networks.layers must be one of depths = 1, 2, 4; got 3",
        ),
        (
            "transfer_phase",
            {"train": True, "networks": {"layers": 1}},
            "networks.layers must be at least 2 for linear transfer",
        ),
        (
            "transfer_phase",
            {
                "train": True,
                "modes": ("fine_tuning",),
                "networks": {"layers": 1, "orthogonal": True},
            },
            "networks.layers must be at least 2 for networks.orthogonal; got 1",
        ),
        ("ridge_transfer", {"ns": (250, 4)}, r"ns\[1\] must be at least 5; got 4"),
        ("ridge_transfer", {"thetas": (0.1, 1.6)}, r"thetas\[1\] must be less than 1.57"),
        ("ridge_transfer", {"ridge_max": (0.5, 0.0)}, r"ridge_max\[1\] must be greater than 0"),
        ("ridge_transfer", {"sigma": -1.0}, "sigma must be at least 0"),
        ("ridge_transfer", {"ridges": 1}, "ridges must be at least 2"),
        ("several_sources", {"d": 40}, "d must be a multiple of 16; got 40"),
        ("several_sources", {"noises": (0.2, 0.1)}, "noises must be .* increasing"),
        ("transfer_factors", {"factor": "noise"}, "factor must be one of spectrum, time, source"),
        ("transfer_factors", {"values": (1.0, 0.0)}, "values must be .* increasing"),
        ("transfer_factors", {"values": (0.0, inf)}, "values must be finite exponents >= 0"),
        ("transfer_factors", {"factor": "time", "values": (-1.0,)}, "values must be times >= 0"),
        ("transfer_factors", {"factor": "source"}, "values must be loads > 0"),
        ("transfer_factors", {"theta": 3.2}, "theta must be at most 3.14"),
        ("transfer_factors", {"depth": 0}, "depth must be at least 1"),
        ("transfer_factors", {"loads": {"high": 0.0}}, "loads.high must be greater than 0"),
        ("transfer_factors", {"loads": {"low": 2.0}}, "loads.high must be above low = 2.0"),
        ("transfer_factors", {"loads": {"number": 200}}, "loads must give different n >= 3"),
        ("transfer_factors", {"loads": {"number": 15}}, "n = 160 is within 1 of d = 160"),
    ],
)
def test_bad_fields_are_named(name, change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        varied(registry.load(name).presets["default"], **change)


def test_former_fields_and_words_work_for_one_release():
    config = registry.load("transfer_phase").presets["tiny"]
    with pytest.warns(DeprecationWarning, match="field gammas is now loads"):
        assert varied(config, gammas=6).loads == 6
    with pytest.warns(DeprecationWarning, match="modes='fine_tune' is now 'fine_tuning'"):
        assert varied(config, modes=("fine_tune",)).modes == ("fine_tuning",)
    scales = type(registry.load("transfer_scales").presets["tiny"])
    with pytest.warns(DeprecationWarning, match="field gamma is now load"):
        assert scales(gamma=0.3).load == 0.3
    with pytest.raises(ValueError, match="gammas is now loads, expected only one"):
        varied(config, gammas=6, loads=7)


def test_no_former_field_outlives_its_release():
    """What is refused here goes: its line in the code, and this test passes again."""
    registry.load("transfer_phase")
    of = "experiments.studies.transfer_phase.config.Config"
    assert {f"{of}(gammas=)", f"{of}(modes='fine_tune')"} <= UNTIL.keys()
    until = {end for name, end in UNTIL.items() if name.startswith("experiments.")}
    release = tuple(map(int, sail_jax.__version__.split(".")[:2]))
    assert all(tuple(map(int, end.split("."))) > release for end in until)
