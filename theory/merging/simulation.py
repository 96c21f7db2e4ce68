"""Simulates training and merging of experts on random data, and measures every quantity.

`quadratic` computes the expectations of these draws in closed form.
"""

from typing import Any

import numpy as np
from jaxtyping import Array, Float

from sail_jax.checks import concrete
from theory.claims import generator
from theory.merging.quadratic import Quantities
from theory.merging.tasks import QuadraticTasks
from theory.problems import defined

# The number of runs trained together, such that their samples fit into the processor's cache.
TOGETHER = 5000

Runs = Float[np.ndarray, "N d r"]  # the runs last, so that every operation runs along them


@defined
def simulate(key: Array, tasks: QuadraticTasks, runs: int) -> Quantities:
    """Trains and merges experts on drawn data and measures all quantities, in NumPy.

    Each run draws the data of all tasks and their batches, trains every expert by SGD, and trains
    it again with its first sample replaced by a new one and the batches at the same positions. Runs
    are not averaged. Losses and gradients are sums over the drawn samples. Only F is an
    expectation.

    Args:
      key: Random key.
      tasks: The testbed, with concrete (not traced) numbers.
      runs: Number of independent runs, >= 1.

    Returns:
      The quantities in float64, with a leading axis `runs`.

    Raises:
      ValueError: If runs < 1.
      TypeError: If numbers of the testbed are traced.
    """
    if runs < 1:
        raise ValueError(f"runs must be >= 1; got {runs}")
    known = [concrete(getattr(tasks, name)) for name in tasks.__dataclass_fields__]
    if any(value is None for value in known):
        raise TypeError("the testbed is traced: simulate draws data with NumPy")
    rng = generator(key)
    parts = [_part(rng, tasks, min(TOGETHER, runs - at)) for at in range(0, runs, TOGETHER)]
    joined: list[Any] = [np.concatenate(values) for values in zip(*parts, strict=True)]
    return Quantities(*joined)


def _part(rng: np.random.Generator, tasks: QuadraticTasks, runs: int) -> Quantities:
    """Trains, merges and measures some runs."""
    h, c, start, w, n, b, steps = (
        np.asarray(getattr(tasks, name), float)
        for name in ("curvature", "centres", "start", "weights", "samples", "batch", "steps")
    )
    rate, noise = float(tasks.rate), float(tasks.noise)
    every = [
        _experts(rng, c[i], noise, int(n[i]), b[i], rate * h, int(steps[i]), start, runs)
        for i in range(len(c))
    ]
    x, twin = (np.stack([expert[k] for expert in every]) for k in range(2))
    data = [(expert[2], expert[3]) for expert in every]
    return _measure(h, c, start, w, noise, data, x, twin)


def _experts(
    rng: np.random.Generator,
    centre: Float[np.ndarray, " d"],
    noise: float,
    n: int,
    batch: float,
    pace: Float[np.ndarray, " d"],
    steps: int,
    start: Float[np.ndarray, " d"],
    runs: int,
) -> tuple[np.ndarray, ...]:
    """Trains the expert of one task, and its twin with another first sample.

    Returns both `(d, r)`, the samples `(n, d, r)` and the other first sample `(d, r)`.
    """
    z = centre[:, None] + noise * rng.standard_normal((n + 1, len(centre), runs))
    z, other = z[:-1], z[-1]
    both = np.broadcast_to(start[:, None], (2, *other.shape)).copy()  # the expert and its twin
    target, flat = np.empty_like(both), z.swapaxes(1, 2).reshape(-1, len(centre))
    # The twin has the same batches. Its targets differ by `swap` wherever the first sample is
    # drawn.
    swap, column = other - z[0], np.arange(runs)
    seen, first = z.mean(0), np.full(runs, 1 / n)
    for _ in range(steps):
        if np.isfinite(batch):
            # Drawing small integers takes half the time.
            place = rng.integers(n, size=(int(batch), runs), dtype=np.min_scalar_type(n))
            where = np.multiply(place, runs, dtype=np.intp) + column
            seen = flat.take(where, 0).sum(0).T / batch
            first = (place == 0).sum(0) / batch
        target[0] = seen
        np.multiply(first, swap, out=target[1])
        target[1] += seen
        both -= pace[:, None] * (both - target)
    return *both, z, other


def _measure(
    h: Float[np.ndarray, " d"],
    c: Float[np.ndarray, "N d"],
    start: Float[np.ndarray, " d"],
    w: Float[np.ndarray, " N"],
    noise: float,
    data: list[tuple[np.ndarray, np.ndarray]],
    x: Runs,
    twin: Runs,
) -> Quantities:
    """Measures all quantities of some runs, by sums over their samples."""
    curved, begin = h[:, None], start[:, None]

    def mixed(per_task: Any) -> np.ndarray:
        return np.tensordot(w, per_task, 1)

    def losses(at: Float[np.ndarray, "d r"]) -> Float[np.ndarray, "N r"]:
        """Computes f_i at one point of each run."""
        return np.stack([(curved * (at - z) ** 2).sum(1).mean(0) / 2 for z, _ in data])

    merged = begin + mixed(x - begin)
    means = np.stack([z.mean(0) for z, _ in data])
    attained, best = losses(merged).mean(0), losses(means.mean(0)).mean(0)
    gap = mixed(losses(np.broadcast_to(begin, merged.shape)) - losses(mixed(means)))
    gradients = [curved * (merged - z) for z, _ in data]  # of samples
    g = np.stack([of.mean(0) for of in gradients])
    spread = [((of - mean) ** 2).sum(1).mean(0) for of, mean in zip(gradients, g, strict=True)]
    apart = x - twin
    swapped = np.stack([other - z[0] for z, other in data])
    risk = (curved * ((merged - c[:, :, None]) ** 2 + noise**2)).sum(1).mean(0) / 2
    found: dict[str, Any] = {
        "risk": risk,
        "excess": risk - best,
        "generalisation": risk - attained,
        "optimisation": attained - best,
        "gradient": (g.mean(0) ** 2).sum(0),
        "surrogate_gradient": (mixed(g) ** 2).sum(0),
        "sample_gradient": np.mean([(of**2).sum(1).mean(0) for of in gradients], 0),
        "stability": ((w[:, None, None] * apart) ** 2).sum(1).mean(0),
        "local_stability": (apart**2).sum(1),
        "cross": (apart * curved * swapped).sum(1),
        "variance": np.stack(spread),
        "heterogeneity": ((g - g.mean(0)) ** 2).sum(1),
        "gap": gap,
        "update": ((x - begin) ** 2).sum(1),
        "dispersion": mixed(((x - merged) ** 2).sum(1)),
    }
    return Quantities(**{name: np.moveaxis(values, -1, 0) for name, values in found.items()})
