"""Sweeps on several devices give what they give on one."""

import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from experiments.lab import registry
from experiments.lab.sweep import over_devices

# How far apart: roundings of float64, which descents amplify; relu_transfer trains in float32 (eps
# 1.2e-7) for hundreds of steps.
SWEPT = {
    "transfer_phase": 1e-9,
    "transfer_factors": 1e-9,
    "relu_transfer": 1e-5,
    "overtraining_linear": 1e-9,
}
ON_FOUR = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from experiments.lab import registry
    from experiments.lab.sweep import over_devices

    assert jax.local_device_count() == 4
    where = over_devices(lambda x, y: {"at": 0 * x + y * jax.lax.axis_index("points")})
    for n, wanted in ((8, [0, 0, 1, 1, 2, 2, 3, 3]), (6, [0, 0, 0, 1, 1, 1]), (4, [0, 1, 2, 3])):
        found = where(np.zeros(n), 1)["at"]
        assert found.tolist() == wanted, found
    plain = over_devices(lambda x, y: {"at": x + y})
    assert plain(np.arange(5), 1)["at"].tolist() == [1, 2, 3, 4, 5]
    name, out = sys.argv[1:]
    module = registry.load(name)
    with jax.enable_x64(True):
        dataset = module.run(module.presets["tiny"])
    np.savez(out, **{k: v.values for k, v in dataset.items() if v.dtype.kind == "f"})
"""


@pytest.mark.parametrize("name", SWEPT)
def test_a_sweep_on_four_devices_is_that_on_one(name, tmp_path):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(ON_FOUR), name, tmp_path / "four.npz"]
    subprocess.run(command, env=os.environ | flags, check=True, timeout=300)
    module = registry.load(name)
    with jax.enable_x64(True):
        one, four = module.run(module.presets["tiny"]), np.load(tmp_path / "four.npz")
    assert four.files
    for variable in four.files:
        a, b = four[variable], one[variable].values
        np.testing.assert_allclose(a, b, rtol=SWEPT[name], atol=SWEPT[name], err_msg=variable)


def test_one_device_calls_the_function_itself():
    calls = []
    over_devices(lambda x: calls.append(type(x)))(np.zeros(3))
    assert calls == [np.ndarray]
