"""Exact dynamics of two-layer linear networks, compared with gradient descent on the same network.

Times the exact trajectory of a wide network at many times, and whole phase diagrams from closed
forms. Each is compared with the time that gradient descent would take for the same points.
"""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench._measuring import add_repeats, device, times
from experiments.lab.config import varied
from experiments.studies.overtraining_linear.config import PRESETS
from experiments.studies.overtraining_linear.run import closed_forms, simulate
from sail_jax import linalg
from sail_jax.cli.options import Parser, natural
from theory import two_layer as tl
from theory.two_layer import networks


def _trajectory(d: int, points: int, repeats: int) -> dict[str, float]:
    """Times the exact trajectory of a network of width d, and steps of gradient descent."""
    key = jax.random.key(0)
    u, v = (linalg.orthogonal(k, d) for k in jax.random.split(key))
    sigma = jnp.linspace(1, 0.1, d)
    target, start = (u * sigma) @ v.T, tl.Layers(0.1 * u, 0.1 * v.T)
    # Times are 0.4 apart, and 2 sigma_1 0.4 < 1: the solver needs one step from each to the next.
    at = jnp.linspace(0, 0.4 * points, points)

    def run():
        return tl.trajectory(*start, target, at).loss

    took = times(run, repeats)
    print(f"exact trajectory, d = {d}, {points} times to t = {float(at[-1]):g}: {took}")
    rate, steps = 0.02, 100
    descend = partial(networks.descend, start, target, rate, steps)
    step = times(descend, 1).median / steps
    descended = descend()
    exact = tl.trajectory(*start, target, [rate * steps])
    gap = float(jnp.linalg.norm(tl.theta(descended) - exact.product[0]) / jnp.linalg.norm(target))
    total = step * float(at[-1]) / rate
    print(
        f"ratio: gradient descent at rate {rate} takes {step * 1e3:.1f} ms per step, {total:.0f} s "
        f"to the end, {total / took.median:.1f} times as long; at t = {rate * steps:g} it is "
        f"{gap:.1e} |A| away from the flow"
    )
    return {**took.record(), "descent": total}


def _diagrams(repeats: int) -> dict[str, dict[str, float]]:
    """Times the phase diagrams of `overtraining_linear`, and trainings of single networks."""
    record = {}
    for name in ("perturbation", "learning_rate", "anchor", "misalignment"):
        config = PRESETS[name]
        took = times(partial(closed_forms, config), repeats)
        record[name] = took.record()
        print(f"diagram {name}, {config.points} x {config.points} points: {took}")
    config = varied(PRESETS["anchor"], networks={"seeds": 2})
    key, sigma = jax.random.key(0), config.tasks.spectrum()
    networks_trained = config.networks.seeds * np.prod(config.networks.cells)
    each = times(partial(simulate, config, key, sigma), 1).median / networks_trained
    median = times(partial(closed_forms, config), repeats).median
    print(
        f"ratio: {config.points**2} networks by stochastic gradient descent, {each:.3f} s each, "
        f"would take {each * config.points**2:.0f} s, {each * config.points**2 / median:.0f} times "
        "as long as the closed forms"
    )
    return record


def options(parser: Parser) -> None:
    """Adds the options of the benchmark."""
    add = parser.add_argument
    add("--d", type=natural, default=512, help="width")
    add("--times", type=natural, default=1000, help="points along time")
    add_repeats(parser, 3, "timed repetitions")
    add("--x64", action="store_true", help="the trajectory in float64")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Prints the results, and returns the record."""
    print(device())
    with jax.enable_x64(args.x64):
        trajectory = _trajectory(args.d, args.times, args.repeats)
    return {"trajectory": trajectory, "diagrams": _diagrams(args.repeats)}
