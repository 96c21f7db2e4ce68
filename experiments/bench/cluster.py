"""Clusters: the overhead of Dask for a merge and for independent tasks.

A merge of three synthetic models is made by one process with two threads, and by two workers on the
same machine (`--on local:2`), in turns. The ratio of their CPU-seconds is the price of the cluster:
the workers' imports and plans, and the scheduler. Then tasks that each compute for some time run on
two workers and in joblib's processes, and their wall time is divided by half the sum of the tasks.
The start of the processes counts.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from experiments.bench._llama import Llama, write
from experiments.bench._measuring import Track, check_space, spread, take_turns
from experiments.bench._merge_speed import SIZES
from sail_jax.cli.options import Parser, natural, positive

WORKERS = 2


def options(parser: Parser) -> None:
    """Adds the options of the benchmark."""
    add = parser.add_argument
    add("--size", choices=sorted(SIZES), default="0.5b", help="default: %(default)s")
    add("--method", choices=("linear", "ties"), default="linear", help="default: %(default)s")
    add("--tasks", type=natural, default=64, help="independent tasks; default: %(default)s")
    add("--seconds", type=positive, default=1.0, help="CPU-seconds of each; default: %(default)s")
    add("--repeat", type=natural, default=3, help="timed runs of each; default: %(default)s")
    add("--dir", type=Path, help="a folder with free space; default: the system's temporary one")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Prints the results, and returns the record; it is not `good` if a merge failed."""
    if args.dir is not None:
        args.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sail-jax-bench-", dir=args.dir) as folder:
        merge = merging(Path(folder), SIZES[args.size], args.method, args.repeat)
    tasks = independent(args.tasks, args.seconds, args.repeat)
    return {"good": "failure" not in merge, "merge": merge, "tasks": tasks}


def merging(folder: Path, llama: Llama, method: str, repeat: int) -> dict[str, Any]:
    """Measures a merge by one process and on a cluster, in turns, and prints the ratio.

    Args:
      folder: The folder for checkpoints.
      llama: The sizes of the models.
      method: The merging method.
      repeat: The number of timed runs of each.

    Returns:
      The record of both, and the ratio of their median CPU-seconds; or only the failure.

    Raises:
      StoreError: If there is too little space.
    """
    check_space(folder, 6 * 2 * llama.parameters)
    models = [folder / name for name in ("base", "a", "b", "c")]
    write(models, llama)
    base = f"base_model: {models[0]}\n" if method == "ties" else ""
    rows = "".join(f"- {{model: {path}, parameters: {{weight: 1}}}}\n" for path in models[1:])
    recipe, out = folder / "recipe.yaml", folder / "out"
    recipe.write_text(f"merge_method: {method}\n{base}models:\n{rows}")
    # Eight files, so that each worker has several tasks.
    shard = f"{max(1, llama.parameters * 2 // 8)}"
    command = [sys.executable, "-m", "sail_jax.cli", "merge", str(recipe), str(out), "--quiet"]
    command += ["--shard-size", shard]
    more = {"threads": ["--threads", str(WORKERS)], "cluster": ["--on", f"local:{WORKERS}"]}
    tracks = {name: Track([*command, *words], repeat + 1, []) for name, words in more.items()}
    for _, sample in take_turns(tracks, partial(shutil.rmtree, out, True), folder / "log"):
        if sample.failure:
            print(f"merge: {sample.failure}")
            return {"failure": sample.failure}
    for track in tracks.values():
        del track.samples[0]  # compiles programs, which the later runs read
    one, many = (track.record() for track in tracks.values())
    ratio = many["cpu_seconds"] / one["cpu_seconds"]
    print(
        f"{method} of 3 x {llama.parameters / 1e6:.0f} M parameters: {one['cpu_seconds']:.2f} "
        f"CPU-s in {one['seconds']:.2f} s with {WORKERS} threads, {many['cpu_seconds']:.2f} CPU-s "
        f"in {many['seconds']:.2f} s with {WORKERS} workers: {ratio:.2f} of the CPU-seconds"
    )
    return {"parameters": llama.parameters, "threads": one, "cluster": many, "ratio": ratio}


def independent(count: int, seconds: float, repeat: int) -> dict[str, Any]:
    """Measures tasks on a cluster and in joblib's processes, in turns, and prints the ratios.

    Args:
      count: The number of tasks.
      seconds: The CPU-seconds of each task.
      repeat: The number of timed runs of each.

    Returns:
      The wall seconds of each run by program, the wall seconds that two processes need at least,
      and the ratios of the medians to these.
    """
    from joblib import Parallel, delayed
    from joblib.externals.loky import get_reusable_executor

    from sail_jax.cluster import connected

    def on_cluster() -> None:
        with connected(f"local:{WORKERS}") as workers:
            list(workers.each(computed, [seconds] * count))

    def by_joblib() -> None:
        Parallel(n_jobs=WORKERS)(delayed(computed)(seconds) for _ in range(count))
        get_reusable_executor().shutdown()

    least = count * seconds / WORKERS
    took: dict[str, list[float]] = {"cluster": [], "joblib": []}
    for _ in range(repeat):
        for name, run in (("cluster", on_cluster), ("joblib", by_joblib)):
            start = time.perf_counter()
            run()
            took[name].append(time.perf_counter() - start)
    ratios = {name: statistics.median(times) / least for name, times in took.items()}
    print(f"{count} tasks of {seconds:g} CPU-s on {WORKERS} processes, at least {least:g} s:")
    for name, times in took.items():
        print(f"  {name}: {spread(times)} s, {ratios[name]:.2f} of the least")
    return {"seconds": took, "least": least, "ratios": ratios}


def computed(seconds: float) -> int:
    """Computes for some CPU-seconds, and returns how many steps it took."""
    end, steps = time.thread_time() + seconds, 0
    while time.thread_time() < end:
        steps += sum(range(1000)) > 0
    return steps
