"""A whole phase diagram from one factorisation per data set, compared with training networks.

Times the grid of `transfer_phase` (after compilation), and gradient descent on a two-layer network
at a few points of it, with the same data. Also prints the difference between the risks of the two.
"""

import argparse
import statistics
import time
from math import pi
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench._measuring import add_repeats, device, times
from experiments.studies.transfer_phase.config import Config
from experiments.studies.transfer_phase.run import simulate
from sail_jax.cli.options import Parser, UsageError, natural
from theory import deep_linear as dl
from theory import problems
from theory.deep_linear import networks


def _trained_risk(x, noise, theta: float, sigma: float) -> tuple[float, float]:
    """Trains a two-layer network by gradient descent, and returns its risk and the seconds.

    It is trained with two step sizes, and the results are extrapolated to gradient flow. An error
    of order rate^2 remains.
    """
    beta_s, beta_t = problems.tasks(x.shape[1], theta)
    y = x @ beta_t + sigma * noise
    weights = networks.small_weights(jax.random.key(1), x.shape[1], 2, 1e-3)
    start, betas = time.perf_counter(), []
    for rate in (0.04, 0.02):
        pretrained = networks.pretrain(weights, beta_s, rate, round(40 / rate))
        trained = networks.fine_tune(pretrained.weights, x, y, rate, round(150 / rate))
        betas.append(networks.predictor(trained.weights))
    risk = float(problems.risk(2 * betas[1] - betas[0], beta_t))
    return risk, time.perf_counter() - start


def options(parser: Parser) -> None:
    """Adds the options of the benchmark."""
    add = parser.add_argument
    add("--d", type=natural, default=500, help="input dimension")
    add("--draws", type=natural, default=20, help="data sets")
    add_repeats(parser, 5, "timed repetitions")
    add("--points", type=natural, default=3, help="points trained by gradient descent")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Prints the results, and returns the record."""
    try:
        config = Config(d=args.d, draws=args.draws)
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    grid = times(lambda: simulate(config), args.repeats)
    points = config.loads * config.thetas * len(config.sigmas) * (2 + len(config.depths))
    print(device())
    print(
        f"grid: d = {config.d}, {config.draws} draws, {config.loads} loads x {config.thetas} "
        f"thetas x {len(config.sigmas)} sigmas, scratch + linear transfer + fine-tuning at "
        f"L = {', '.join(f'{depth:g}' for depth in config.depths)}: {points} risks per draw"
    )
    print(f"  {grid}")
    sigma, seconds, worst = config.sigmas[-1], [], 0.0
    with jax.enable_x64(True):
        for i, theta in enumerate(np.linspace(pi / 8, 3 * pi / 8, args.points)):
            n = int(config.d * (0.3 + 0.4 * i / max(args.points - 1, 1)))
            key_x, key_noise = jax.random.split(jax.random.key(i))
            x, noise = jax.random.normal(key_x, (n, config.d)), jax.random.normal(key_noise, (n,))
            # The result of the factorisation for the same data set.
            at = dl.nested_overlaps(x, noise, jnp.eye(config.d, 2), [n])
            exact = float(at.fine_tune(theta, sigma, 2)[0])
            trained, took = _trained_risk(x, noise, theta, sigma)
            seconds.append(took)
            worst = max(worst, abs(trained / exact - 1))
            print(
                f"  gradient descent, L = 2, n = {n}, theta = {theta:.3f}: {took:.1f} s, "
                f"risk {trained:.6f}, factorisation {exact:.6f}"
            )
    trainings = config.draws * config.loads * config.thetas * len(config.sigmas)
    peer = statistics.mean(seconds) * trainings
    print(
        f"agreement: largest relative difference {worst:.1e}\n"
        f"ratio: fine-tuning L = 2 alone by gradient descent would take {peer / 3600:.0f} h for "
        f"{trainings} networks, {peer / grid.median:.0f} times as long as the whole grid"
    )
    return {"grid": grid.record(), "training": seconds, "networks": trainings, "apart": worst}
