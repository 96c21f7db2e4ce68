"""Growing: index maps compared with dense ones, and checkpoints compared with plain writing.

First, in memory: both axes of a 2048 x 2048 matrix in float32 are permuted by a gather and by
matrix products, and copied. Then a synthetic Llama-shaped checkpoint in bfloat16 is grown twofold
in width by `sail-jax grow` (including start-up and compilation, without a certificate), in turns
with a program that only writes as many bytes and flushes them. Seconds and peak resident memory are
for whole processes.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from experiments.bench._llama import Llama, write
from experiments.bench._measuring import Sample, check_space, process, times
from experiments.bench._merge_speed import SIZES
from sail_jax.cli.options import Parser, natural

# Writes the given number of bytes from one reused buffer.
_WRITER = """
import os, sys
left, out = int(sys.argv[1]), sys.argv[2]
buffer = memoryview(os.urandom(1 << 20))
target = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
while left > 0:
    left -= os.write(target, buffer[:left])
os.fsync(target)
"""


def options(parser: Parser) -> None:
    """Adds the options of the benchmark."""
    add = parser.add_argument
    add("--size", choices=sorted(SIZES), default="50m", help="default: %(default)s")
    add("--method", default="lemon", help="default: %(default)s")
    add("--units", type=natural, default=2048, help="permuted units; default: %(default)s")
    add("--repeat", type=natural, default=3, help="timed runs of each; default: %(default)s")
    add("--dir", type=Path, help="a folder with free space; default: the system's temporary one")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Prints the results, and returns the record; it is not `good` if growing failed."""
    record: dict[str, Any] = {"permutation": permutation(args.units, args.repeat)}
    if args.dir is not None:
        args.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sail-jax-bench-", dir=args.dir) as folder:
        size = SIZES[args.size]
        record["checkpoint"] = checkpoint(Path(folder), size, args.method, args.repeat)
    return {"good": "failure" not in record["checkpoint"], **record}


def permutation(n: int, repeat: int) -> dict[str, float]:
    """Times permutations of both axes of a square matrix, and prints the result.

    Args:
      n: The number of units on either axis.
      repeat: The number of timed calls of the dense form; the others are called 20 times as often.

    Returns:
      The smallest milliseconds of the index form, of a copy and of the dense form, and the ratio of
      the dense form to the index form.
    """
    import jax

    from sail_jax import change_basis, spec
    from sail_jax.growth import permute

    keys = jax.random.split(jax.random.key(0), 3)
    rules = {"in": "x* a", "between": "a* b", "out": "b* y"}
    column = jax.ShapeDtypeStruct((n, 1), float)
    shapes = {"in": jax.ShapeDtypeStruct((1, n), float), "out": column}
    params = {"between": jax.random.normal(keys[0], (n, n))}
    s = spec(shapes | params, rules, spaces={"{a,b}": "relu", "{x,y}": "outer"})
    maps = {
        name: permute(jax.random.permutation(k, n)) for name, k in zip("ab", keys[1:], strict=True)
    }
    move = jax.jit(lambda p, maps: change_basis(p, s, maps))
    copy = jax.jit(lambda p, maps: jax.tree.map(lambda x: x + 0, p))

    def milliseconds(f: Callable[..., PyTree], maps: PyTree, repeat: int) -> float:
        return 1e3 * min(times(lambda: f(params, maps), repeat).later)

    index, limit = (milliseconds(f, maps, 20 * repeat) for f in (move, copy))
    dense = milliseconds(move, {name: m.dense() for name, m in maps.items()}, repeat)
    print(
        f"permutations of {n} units, both axes: {index:.2f} ms, a copy {limit:.2f} ms, "
        f"dense {dense:.1f} ms: {dense / index:.0f}x"
    )
    return {
        "units": n, "index_ms": index, "copy_ms": limit, "dense_ms": dense, "ratio": dense / index,
    }  # fmt: skip


def checkpoint(folder: Path, llama: Llama, method: str, repeat: int) -> dict[str, Any]:
    """Times the growth of a checkpoint and plain writing of as many bytes, and prints the result.

    Args:
      folder: The folder for checkpoints.
      llama: The sizes of the checkpoint.
      method: The growth method.
      repeat: The number of timed runs of each program.

    Returns:
      The record: sizes, seconds, their ratio and the highest peak; or only the failure.

    Raises:
      StoreError: If there is too little space.
    """
    # Space is needed for the checkpoint and the grown checkpoint, at most fourfold and twice, and
    # some to spare.
    need = 2 * llama.parameters * 10
    check_space(folder, need)
    source, out, plain = folder / "base", folder / "grown", folder / "plain"
    write([source], llama)
    grow = [sys.executable, "-m", "sail_jax.cli", "grow", str(source), str(out), "--quiet"]
    grow += ["--width", "2x", "--method", method, "--no-certify"]
    ours: list[Sample] = []
    limit: list[Sample] = []
    size = 0
    for turn in range(repeat + 1):
        sample = process(grow, folder / "log")
        if sample.failure:
            print(f"grow: {sample.failure}")
            return {"failure": sample.failure}
        size = sum(f.stat().st_size for f in out.iterdir())
        shutil.rmtree(out)
        command = [sys.executable, "-I", "-S", "-c", _WRITER, str(size), str(plain)]
        floor = process(command, folder / "log")
        plain.unlink()
        # The first turn compiles programs, which JAX then reuses, and fills the page cache.
        if turn:
            ours.append(sample)
            limit.append(floor)
        else:
            first = sample
    seconds = statistics.median(s.seconds for s in ours)
    least = statistics.median(s.seconds for s in limit)
    peak = max(s.peak for s in ours)
    print(
        f"{llama.parameters / 1e6:.0f} M parameters to {size / 1e9:.2f} GB by {method}: "
        f"{seconds:.2f} s ({first.seconds:.2f} s the first time), writing alone {least:.2f} s: "
        f"{seconds / least:.2f}x; peak {peak / 1e9:.2f} GB"
    )
    return {
        "parameters": llama.parameters, "bytes": size, "method": method,
        "seconds": [s.seconds for s in ours], "first": first.seconds,
        "write_seconds": [s.seconds for s in limit], "ratio": seconds / least, "peak_bytes": peak,
    }  # fmt: skip
