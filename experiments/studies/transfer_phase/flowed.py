"""Fine-tuning by gradient flow, solved numerically, without a formula for its limit.

`run` averages the estimator of fine-tuning, which has the same scale c as the closed form. Here the
predictor of a balanced network follows its differential equation from the source task on. At these
small dimensions it takes seconds.
"""

from functools import partial
from math import pi

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.shared import transfer_regions as regions
from experiments.studies.transfer_phase.config import Config
from theory import deep_linear as dl
from theory import problems

D = 24
DRAWS = 12
COUNTS = np.arange(3, D - regions.FAR + 1, 4)  # of samples; closer to d the flow takes too long
ANGLES = 7
TIME = 200.0  # at unit rate; the slowest direction has a rate of about (1 - sqrt(n/d))^2 = 0.01


def flowed(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Computes the transferability of fine-tuning from its gradient flow, at the largest noise.

    Args:
      config: The config. Only its seed, noise and depths are used: two layers if they are among the
        depths, else the last finite depth.
      stage: The stage function, which computes or restores the parts of the run.

    Returns:
      `flow_gain` (flow_draw, flow_load, flow_theta): the risk of the minimum-norm least-squares
      fit, the limit of training from scratch, minus the risk of the fine-tuned network on the same
      data. `flow_theory` is the closed form, a limit. The attributes have dimension, noise and
      depth. It is empty without a finite depth.
    """
    depths = [depth for depth in config.depths if np.isfinite(depth)]
    if "fine_tuning" not in config.modes or not depths:
        return xr.Dataset()
    depth, sigma = float(2 if 2 in depths else depths[-1]), float(max(config.sigmas))
    theta = np.linspace(0, pi / 2, ANGLES)
    with jax.enable_x64(True):
        # Different from the draws of the averaged estimator and of the trained networks.
        key = jax.random.fold_in(jax.random.key(config.seed), 2)
        compute = partial(_computed, key, theta, sigma, depth)
        gain = stage("gradient flows", compute)["gain"]
        theory = dl.transferability(
            "fine_tuning", n=COUNTS[:, None], d=D, theta=theta, sigma=sigma, depth=depth
        )
    grid = ("flow_load", "flow_theta")
    return xr.Dataset(
        {"flow_gain": (("flow_draw", *grid), gain), "flow_theory": (grid, np.asarray(theory))},
        {"flow_load": COUNTS / D, "flow_theta": theta},
        {"flow_d": D, "flow_sigma": sigma, "flow_depth": depth, "flow_time": TIME},
    )


def _computed(key: jax.Array, *about) -> dict[str, np.ndarray]:
    return jax.tree.map(np.asarray, _gains(key, *about))


@partial(jax.jit, static_argnums=3)
def _gains(key: jax.Array, theta: jax.Array, sigma: float, depth: float) -> dict[str, jax.Array]:
    """Computes R_scratch - R_fine_tuned [draw, load, angle]."""
    rows = int(COUNTS.max())

    def at(key: jax.Array, n: jax.Array, theta: jax.Array) -> jax.Array:
        # Every load has the same shape: the other rows are 0, and X^T X / rows equals the usual X^T
        # X / n.
        scale = jnp.where(jnp.arange(rows) < n, jnp.sqrt(rows / n), 0.0)
        sample = problems.draw(key, rows, D, theta, sigma)
        x, y = scale[:, None] * sample.x, scale * sample.y
        tuned = dl.fine_tuning_flow(x, y, sample.beta_s, jnp.array([TIME]), depth)[0]
        scratch = dl.scratch_fit(x, y)
        return problems.risk(scratch, sample.beta_t) - problems.risk(tuned, sample.beta_t)

    # All angles of a data set share their inputs and their noise.
    over_angles = jax.vmap(at, (None, None, 0))
    keys = jax.random.split(key, (DRAWS, len(COUNTS)))
    over_loads = jax.vmap(over_angles, (0, 0, None))
    return {"gain": jax.vmap(over_loads, (0, None, None))(keys, jnp.asarray(COUNTS), theta)}
