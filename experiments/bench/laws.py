"""Closed forms and exact samplers, compared with the simulations that they replace.

Times the kappa equation of the deterministic equivalents on a grid of loads and ridges, the risk
along training time, and exact draws of risks. Each is compared with the cost of the same numbers by
least squares and by gradient descent, on one data set after another.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench._measuring import add_repeats, device, once, times
from sail_jax.cli.options import Parser, natural
from theory import deep_linear as dl
from theory import problems
from theory.deep_linear import covariance, networks


def _report(name: str, job: Callable[[], object], repeats: int, count: int, unit: str) -> float:
    """Times a job and prints its rate; returns the seconds per item."""
    took = times(job, repeats)
    print(f"{name}: {took}; {count / took.median:.3g} {unit}/s")
    return took.median / count


def options(parser: Parser) -> None:
    """Adds the options of the benchmark."""
    add = parser.add_argument
    add("--d", type=natural, default=500, help="input dimension")
    add("--draws", type=natural, default=1_000_000, help="exact draws")
    add_repeats(parser, 5, "timed repetitions")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Prints the results, and returns the record."""
    d, draws, repeats = args.d, args.draws, args.repeats
    n, theta, sigma = d // 2, 0.7, 0.2
    print(f"{device()}; d = {d}, n = {n}")

    s = covariance.power_law(d, 0.8)
    loads = jnp.linspace(0.05, 2, 100) * d
    ridges = jnp.geomspace(1e-3, 1, 100)
    beta2 = jnp.ones(d) / d

    @jax.jit
    def equivalents(loads, ridges):
        return covariance.equivalent(s, loads[:, None], ridges).risk(beta2, sigma)

    kappa = _report(
        "kappa and risk, 100 loads x 100 ridges",
        lambda: equivalents(loads, ridges),
        repeats,
        10_000,
        "points",
    )
    times = jnp.geomspace(0.1, 1e3, 100)
    flow = _report(
        "risk at 100 training times",
        lambda: dl.flow_risk(s, jnp.sqrt(beta2), n=n, sigma=sigma, times=times),
        repeats,
        100,
        "times",
    )
    law = dl.scratch_law(n=n, d=d, sigma=sigma)
    scratch_draws = jax.jit(lambda key: law.sample(key, draws))
    keys = iter(jax.random.split(jax.random.key(0), 100))
    scratch = _report(
        "exact draws of the scratch risk",
        lambda: scratch_draws(next(keys)),
        repeats,
        draws,
        "draws",
    )
    tuned_draws = jax.jit(
        lambda key: dl.overlaps_law(key, n=n, d=d, draws=draws).fine_tune(theta, sigma, 2)
    )
    tuned = _report(
        "exact draws of the fine-tuned risk",
        lambda: tuned_draws(next(keys)),
        repeats,
        draws,
        "draws",
    )

    fit = jax.jit(lambda x, y: problems.risk(dl.scratch_fit(x, y), jnp.zeros(d)))
    weights = networks.small_weights(jax.random.key(1), d, 2, 1e-3)
    solved, trained = [], []
    for key in jax.random.split(jax.random.key(2), 4):
        sample = problems.draw(key, n, d, theta, sigma)
        x, y = sample.x, sample.y
        solved.append(once(partial(fit, x, y)))
        trained.append(once(partial(networks.fine_tune, weights, x, y, 0.02, 5_000)))
    # The first of each compiles.
    one_fit, one_training = (float(statistics.median(v[1:])) for v in (solved, trained))
    print(f"one data set: least squares {one_fit:.3f} s, two-layer network {one_training:.2f} s")
    rows = {"kappa": kappa, "training time": flow, "scratch draw": scratch, "tuned draw": tuned}
    for name, ours in rows.items():
        count = 1 if name.endswith("draw") else 20
        print(
            f"ratio, {name}: one point takes {ours:.2g} s; {count} data set{'s' * (count > 1)} "
            f"take {count * one_fit / ours:.2g} times as long by least squares, "
            f"{count * one_training / ours:.2g} times by gradient descent"
        )
    ratio = np.asarray(scratch_draws(jax.random.key(3))).mean() / float(
        dl.scratch_risk(n=n, d=d, sigma=sigma)
    )
    print(f"agreement: mean of the scratch draws / closed form - 1 = {ratio - 1:.1e}")
    return {"seconds": rows, "least_squares": one_fit, "training": one_training}
