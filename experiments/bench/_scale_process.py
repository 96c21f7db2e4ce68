"""One computation of one size, in a separate process: its cost after compilation.

`scale` starts such processes. Usage: python -m experiments.bench._scale_process JOB SIZE REPEATS
prints a line of JSON. The first run, which compiles, is excluded.
"""

import json
import sys
import time
from collections.abc import Callable

import jax
import numpy as np

from experiments.bench._compile_process import cpu_seconds, peak_bytes
from experiments.models import presets
from experiments.studies.shared import language_training as training
from experiments.studies.shared.language_tasks import Batch
from experiments.studies.transfer_phase.config import Config
from experiments.studies.transfer_phase.run import simulate
from experiments.training import Optimizer, Schedule, Training, sharding

NET = {"model_type": "flax_gpt", "width": 64, "layers": 2, "heads": 2, "head_dim": 32}
NET |= {"hidden": 256, "vocab": 256, "context": 64, "tied": True}
BATCH, STEPS = 4, 100


def trainings(members: int, devices: int = 1) -> Callable[[], object]:
    """Creates the training of some small GPTs side by side, distributed over devices."""
    net = presets.build(NET)
    how = Training(Optimizer(Schedule(1e-3, 10 * STEPS)))
    params = [jax.device_get(training.first(net, jax.random.key(k))) for k in range(members)]
    mesh = sharding.mesh() if devices > 1 else None
    where = sharding.Layout(mesh, "members" if mesh else "no")

    def batch(step: int) -> Batch:
        shape = BATCH, members, NET["context"] + 1
        tokens = np.random.default_rng(step).integers(NET["vocab"], size=shape, dtype=np.int32)
        return Batch(tokens, np.ones((*shape[:2], NET["context"]), bool))

    key = jax.random.key(1)
    return lambda: training.together(net, how, params, batch, STEPS, key=key, where=where)


JOBS: dict[str, Callable[[int], Callable[[], object]]] = {
    "dimension": lambda d: lambda: simulate(Config(d=d, draws=4)),
    "draws": lambda draws: lambda: simulate(Config(d=200, draws=draws)),
    "members": trainings,
    # The same number of trainings for any number of devices, to measure the cost of distribution.
    "devices": lambda devices: trainings(8, devices),
}


def main(job: str, size: str, repeats: str) -> None:
    """Prints the cost of later runs, and the peak of the process."""
    run = JOBS[job](int(size))
    jax.block_until_ready(run())
    cpu: list[float] = []
    seconds: list[float] = []
    for _ in range(int(repeats)):
        used, start = cpu_seconds(), time.perf_counter()
        jax.block_until_ready(run())
        cpu.append(cpu_seconds() - used)
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"cpu": cpu, "seconds": seconds, "peak": peak_bytes()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
