"""Sweeps on several devices give the same results as on one."""

import subprocess
import sys
import textwrap

import jax
import many_devices
import numpy as np
import pytest

from experiments.lab import registry
from experiments.lab.sweep import over_devices

# Allowed differences: rounding in float64, amplified by descent; relu_transfer trains in float32
# (eps 1.2e-7) for hundreds of steps.
SWEPT = {
    "transfer_phase": 1e-9,
    "transfer_factors": 1e-9,
    "relu_transfer": 1e-5,
    "overtraining_linear": 1e-9,
}
WHERE = """
    import sys
    import jax, numpy as np
    import experiments.lab.sweep as shared
    from experiments.lab.sweep import over_devices, sweep

    count = int(sys.argv[1])
    shared.cores = lambda: count  # nothing here waits for LAPACK
    assert jax.local_device_count() == count
    where = over_devices(lambda x, y: {"x": x + y, "at": 0 * x + jax.lax.axis_index("points")})
    for n in range(1, 14):
        each = -(-n // count)  # points of a device
        if n == each:  # one device: there is no axis
            continue
        found = where(np.arange(n), 10)
        assert found["x"].tolist() == list(range(10, 10 + n)), found
        assert found["at"].tolist() == [k // each for k in range(n)], (n, found)
        if n % count == 0:
            assert found["x"].sharding.device_set == set(jax.devices()), n
    sizes = []
    def noted(points):
        sizes.append(len(points))
        return {"x": points}
    assert sweep(noted, np.arange(11), chunk=2)["x"].tolist() == list(range(11))
    whole = count * -(-2 // count)
    assert sizes == [whole] * (11 // whole) + [11 % whole] * (11 % whole > 0), sizes
"""
ON_FOUR = """
    import sys
    import jax, numpy as np
    from experiments.lab import registry

    assert jax.local_device_count() == 4
    name, preset, out = sys.argv[1:]
    study = registry.load(name)
    with jax.enable_x64(True):
        dataset = study.run(study.presets[preset])
    np.savez(out, **{k: v.values for k, v in dataset.items() if v.dtype.kind == "f"})
"""


def _run(program, devices, *args):
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, args)]
    subprocess.run(command, env=many_devices.environment(devices), check=True, timeout=300)


@pytest.mark.soak
@pytest.mark.parametrize("devices", [3, *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 4))])
def test_points_lie_on_all_devices_and_come_back_in_order(devices):
    _run(WHERE, devices, devices)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        pytest.param("overtraining_linear", "tiny", marks=pytest.mark.soak),
        pytest.param("transfer_phase", "tiny", marks=pytest.mark.soak),
        pytest.param("transfer_phase", "tiny_networks", marks=pytest.mark.soak),
        pytest.param("transfer_factors", "tiny", marks=pytest.mark.soak),
        pytest.param("relu_transfer", "tiny", marks=pytest.mark.soak),
    ],
)
def test_a_sweep_on_four_devices_is_that_on_one(name, preset, tmp_path):
    _run(ON_FOUR, 4, name, preset, tmp_path / "four.npz")
    study = registry.load(name)
    with jax.enable_x64(True):
        one, four = study.run(study.presets[preset]), np.load(tmp_path / "four.npz")
    assert four.files
    for variable in four.files:
        a, b = four[variable], one[variable].values
        np.testing.assert_allclose(a, b, rtol=SWEPT[name], atol=SWEPT[name], err_msg=variable)


def test_one_device_calls_the_function_itself():
    calls = []
    over_devices(lambda x: calls.append(type(x)))(np.zeros(3))
    assert calls == [np.ndarray]
