"""Values that the studies of transfer in deep linear networks reject."""

import pytest

import sail_jax
from experiments.lab import registry
from experiments.lab.config import varied
from sail_jax.deprecated import UNTIL


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
    """If this test fails, remove the former name from the code."""
    registry.load("transfer_phase")
    of = "experiments.studies.transfer_phase.config.Config"
    assert {f"{of}(gammas=)", f"{of}(modes='fine_tune')"} <= UNTIL.keys()
    until = {end for name, end in UNTIL.items() if name.startswith("experiments.")}
    release = tuple(map(int, sail_jax.__version__.split(".")[:2]))
    assert all(tuple(map(int, end.split("."))) > release for end in until)
