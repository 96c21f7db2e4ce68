"""Exact dynamics of two-layer linear networks, compared with gradient descent on the same network.

Times the exact trajectory of a wide network at many times, and whole phase diagrams from closed
forms. Each is compared with the time that gradient descent would take for the same points.
"""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.grid import median_time
from experiments.lab.config import varied
from experiments.studies.overtraining_linear.config import PRESETS
from experiments.studies.overtraining_linear.run import closed_forms, simulate
from sail_jax.cli.options import Parser, natural
from theory import two_layer as tl
from theory.two_layer import networks


def _trajectory(d: int, points: int, repeats: int) -> None:
    """Times the exact trajectory of a network of width d, and steps of gradient descent."""
    key = jax.random.key(0)
    u, v = (jax.random.orthogonal(k, d) for k in jax.random.split(key))
    sigma = jnp.linspace(1, 0.1, d)
    target, start = (u * sigma) @ v.T, tl.Layers(0.1 * u, 0.1 * v.T)
    # Times are 0.4 apart, and 2 sigma_1 0.4 < 1: the solver needs one step from each to the next.
    times = jnp.linspace(0, 0.4 * points, points)

    def run():
        return tl.trajectory(*start, target, times).loss

    first, median, low, high = median_time(run, repeats)
    print(
        f"exact trajectory, d = {d}, {points} times to t = {float(times[-1]):g}: {median:.1f} s "
        f"({low:.1f} to {high:.1f}; {first:.1f} s with compilation)"
    )
    rate, steps = 0.02, 100
    jax.block_until_ready(networks.descend(start, target, rate, steps))  # compiles
    began = time.perf_counter()
    descended = jax.block_until_ready(networks.descend(start, target, rate, steps))
    step = (time.perf_counter() - began) / steps
    exact = tl.trajectory(*start, target, [rate * steps])
    gap = float(jnp.linalg.norm(tl.theta(descended) - exact.product[0]) / jnp.linalg.norm(target))
    total = step * float(times[-1]) / rate
    print(
        f"ratio: gradient descent at rate {rate} takes {step * 1e3:.1f} ms per step, {total:.0f} s "
        f"to the end, {total / median:.1f} times as long; at t = {rate * steps:g} it is "
        f"{gap:.1e} |A| away from the flow"
    )


def _diagrams(repeats: int) -> None:
    """Times the phase diagrams of `overtraining_linear`, and trainings of single networks."""
    for name in ("perturbation", "learning_rate", "anchor", "misalignment"):
        config = PRESETS[name]
        first, median, low, high = median_time(lambda c=config: closed_forms(c), repeats)
        print(
            f"diagram {name}, {config.points} x {config.points} points: {median:.2f} s "
            f"({low:.2f} to {high:.2f}; {first:.1f} s with compilation)"
        )
    config = varied(PRESETS["anchor"], networks={"seeds": 2})
    key, sigma = jax.random.key(0), config.tasks.spectrum()
    simulate(config, key, sigma)  # compiles
    began = time.perf_counter()
    simulate(config, key, sigma)
    took = (time.perf_counter() - began) / (config.networks.seeds * np.prod(config.networks.cells))
    _, median, *_ = median_time(lambda: closed_forms(config), repeats)
    print(
        f"ratio: {config.points**2} networks by stochastic gradient descent, {took:.3f} s each, "
        f"would take {took * config.points**2:.0f} s, {took * config.points**2 / median:.0f} times "
        "as long as the closed forms"
    )


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Runs the benchmark and prints what it finds.

    Args:
      parser: The parser of the command, to which options are added.
      argv: The arguments of the command.

    Returns:
      The exit status, 0.

    Raises:
      UsageError: If an argument is unknown or does not fit.
    """
    parser.add_argument("--d", type=natural, default=512, help="width")
    parser.add_argument("--times", type=natural, default=1000, help="points along time")
    parser.add_argument("--repeats", type=natural, default=3, help="timed repetitions")
    parser.add_argument("--x64", action="store_true", help="the trajectory in float64")
    args = parser.read(argv)
    print(f"device: {jax.devices()[0].device_kind}, jax {jax.__version__}")
    with jax.enable_x64(args.x64):
        _trajectory(args.d, args.times, args.repeats)
    _diagrams(args.repeats)
    return 0
