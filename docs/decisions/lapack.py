"""Which programs of JAX stand still on a CPU because LAPACK splits a batch of matrices.

Needs JAX alone: `python docs/decisions/lapack.py`. Each row is a process of its own, on the given
number of cores. "stands still" means that nothing was computed for PATIENCE seconds.
"""

import itertools
import os
import subprocess
import sys
import threading
import time

PATIENCE, RUNS = 30, 100
OPERATIONS = ("triangular solve", "Cholesky", "LU", "QR", "SVD", "eigh", "eig", "FFT", "product")
CASES = ((1, 4), (2, 1), (2, 2), (2, 4))
PROGRAMS = ("one call", "four calls", "four calls, one matrix at a time")


def operation(name):
    import jax.numpy as jnp
    from jax import lax

    return {
        "triangular solve": lambda x: lax.linalg.triangular_solve(x, x, left_side=True, lower=True),
        "Cholesky": jnp.linalg.cholesky,
        "LU": lambda x: lax.linalg.lu(x)[0],
        "QR": lambda x: jnp.linalg.qr(x)[0],
        "SVD": lambda x: jnp.linalg.svd(x)[0],
        "eigh": lambda x: jnp.linalg.eigh(x)[1],
        "eig": lambda x: jnp.linalg.eigvals(x).real,
        "FFT": lambda x: jnp.fft.fft2(x).real,
        "product": lambda x: x @ x,
    }[name]


def experiment(cores, threads, program, name):
    """Runs a program in some threads, and returns whether all of them ended."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    import jax
    import jax.numpy as jnp
    import numpy as np

    x = np.random.default_rng(0).normal(size=(64, 48, 48)).astype(np.float32)
    x = x @ x.swapaxes(1, 2) + 48 * np.eye(48, dtype=np.float32)
    f, calls = operation(name), 1 if program == "one call" else 4
    if program.endswith("at a time"):
        f = lambda x, f=f: jax.lax.map(f, x)  # noqa: E731

    @jax.jit
    def run(x):
        # Something before each call: XLA runs what follows it on the thread that computed it last.
        return [f(x + 1e-3 * (i + 1) * jnp.roll(x, i + 1, 0)) for i in range(calls)]

    done = [0] * threads

    def work(i):
        for _ in range(RUNS):
            [np.asarray(y) for y in run(x)]
            done[i] += 1

    workers = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(threads)]
    for worker in workers:
        worker.start()
    before, since = sum(done), time.monotonic()
    while any(worker.is_alive() for worker in workers):
        time.sleep(0.1)
        if sum(done) > before:
            before, since = sum(done), time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            return False
    return True


def main():
    if len(sys.argv) > 1:
        cores, threads, program, name = sys.argv[1:]
        ended = experiment(int(cores), int(threads), program, name)
        print("ends" if ended else "stands still", flush=True)
        os._exit(0)  # threads that stand still cannot be ended
    import jax

    print(f"JAX {jax.__version__}")
    heads = (f"{cores} cores, {threads}" for cores, threads in CASES)
    print(f"{'cores, threads of Python':50}" + "".join(f"{head:14}" for head in heads))
    for program, name in itertools.product(PROGRAMS, OPERATIONS):
        row = []
        for cores, threads in CASES:
            command = [sys.executable, __file__, str(cores), str(threads), program, name]
            shown = subprocess.run(command, capture_output=True, text=True)
            row.append(shown.stdout.strip() or shown.stderr)
        print(f"{program + ', ' + name:50}" + "".join(f"{cell:14}" for cell in row), flush=True)


if __name__ == "__main__":
    main()
