"""The quadratics of `merging_scaling`: excess, stability and bounds, exact and simulated.

The closed forms come from `theory.merging`; `networks` measures the same quantities on networks.
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from experiments.studies.merging_scaling.config import LAWS, Config
from theory.merging import QuadraticTasks, dare, scaling, simulate
from theory.merging.scaling import Law


def quadratics(
    config: Config, law: Law | None = None, value: float | None = None
) -> QuadraticTasks:
    """Builds the testbed at one setting.

    All settings of a config share the centres of the tasks. A setting with fewer tasks uses the
    first ones.

    - `law`: the hyperparameter to change from the centre; None changes none.

    It returns the quadratic losses of the tasks, with the training of their experts.
    """
    s, how = config.at(law, value), config.quadratics
    shape = max(config.swept.tasks), how.dimensions
    draws = np.random.default_rng(config.seed).standard_normal(shape)
    centres = 1 / how.dimensions**0.5 + how.spread * draws
    curvature = np.geomspace(1, 1 / how.condition, how.dimensions)
    n = int(s.pop("tasks"))
    return QuadraticTasks(curvature, centres[:n], how.noise, **s)


def measure(config: Config, key: Array) -> dict[str, Any]:
    """Computes the testbed's quantities at every value of every law.

    It returns arrays of shape (law, point): `exact_*`, `bound_*` and `corrected_*` of `excess` and
    `stability`; `exact_generalisation` and `exact_optimisation`, the parts of the excess;
    `dare_excess`; and `simulated_*` with their standard errors, if the config has runs.
    """
    rows = []
    for i, law in enumerate(LAWS):
        values = config.values(law)
        # `scaling` uses the first N of its tasks, so it requires the largest number of them.
        widest = quadratics(config, law, values[-1])
        predicted = scaling(widest, law, values)
        row = {
            f"{kind}_{name}": getattr(getattr(predicted, kind), name)
            for kind in ("exact", "bound", "corrected")
            for name in ("excess", "stability")
        }
        row["exact_generalisation"] = predicted.exact.generalisation
        row["exact_optimisation"] = predicted.exact.optimisation
        beds = [quadratics(config, law, value) for value in values]
        row["dare_excess"] = np.array([dare(bed, config.merging.drop).excess for bed in beds])
        if config.quadratics.runs:
            drawn = [
                simulated(config, bed, jax.random.fold_in(jax.random.fold_in(key, i), j))
                for j, bed in enumerate(beds)
            ]
            row |= {name: np.array([means[name] for means in drawn]) for name in drawn[0]}
        rows.append(row)
    return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}


def simulated(config: Config, bed: QuadraticTasks, key: Array) -> dict[str, float]:
    """Simulates the testbed at one setting.

    It returns the means over runs, `simulated_excess` and `simulated_stability`, and their standard
    errors under the same names with `_error`.
    """
    draws, means = simulate(key, bed, config.quadratics.runs), {}
    for name in ("excess", "stability"):
        x = np.asarray(getattr(draws, name))
        means[f"simulated_{name}"] = float(x.mean())
        means[f"simulated_{name}_error"] = float(x.std(ddof=1) / len(x) ** 0.5)
    return means
