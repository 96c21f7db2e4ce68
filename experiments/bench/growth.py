"""Growth: index maps compared with dense ones, and checkpoints compared with plain writing.

First, in memory: both axes of a 2048 x 2048 matrix in float32 are permuted by a gather and by
matrix products, and copied. Then a synthetic Llama-shaped checkpoint in bfloat16 is grown twofold
in width by `sail-jax grow` (including start-up and compilation, without a certificate), in turns
with a program that only writes as many bytes and flushes them. Seconds and peak resident memory are
for whole processes.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from experiments.bench._llama import Llama, write
from experiments.bench._measuring import Track, check_space, process, take_turns, times
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
    # Space is required for the checkpoint and the grown checkpoint, at most fourfold and twice,
    # plus a margin.
    need = 2 * llama.parameters * 10
    check_space(folder, need)
    source, out, plain = folder / "base", folder / "grown", folder / "plain"
    write([source], llama)
    grow = [sys.executable, "-m", "sail_jax.cli", "grow", str(source), str(out), "--quiet"]
    grow += ["--width", "2x", "--method", method, "--no-certify"]
    # The first run compiles programs, which JAX then reuses, and fills the page cache.
    first = process(grow, folder / "log")
    size = 0 if first.failure else sum(f.stat().st_size for f in out.iterdir())
    only = [sys.executable, "-I", "-S", "-c", _WRITER, str(size), str(plain)]
    tracks = {"grow": Track(grow, repeat, []), "write": Track(only, repeat, [])}

    def clear() -> None:
        shutil.rmtree(out, ignore_errors=True)
        plain.unlink(missing_ok=True)

    turns = take_turns(tracks, clear, folder / "log")
    if failure := first.failure or next((s.failure for _, s in turns if s.failure), ""):
        print(f"grow: {failure}")
        return {"failure": failure}
    ours, limit = (track.record() for track in tracks.values())
    seconds, least, peak = ours["seconds"], limit["seconds"], ours["peak_bytes"]
    print(
        f"{llama.parameters / 1e6:.0f} M parameters to {size / 1e9:.2f} GB by {method}: "
        f"{seconds:.2f} s ({first.seconds:.2f} s the first time), writing alone {least:.2f} s: "
        f"{seconds / least:.2f}x; peak {peak / 1e9:.2f} GB"
    )
    return {
        "parameters": llama.parameters, "bytes": size, "method": method,
        "seconds": [s.seconds for s in tracks["grow"].samples], "first": first.seconds,
        "write_seconds": [s.seconds for s in tracks["write"].samples],
        "ratio": seconds / least, "peak_bytes": peak,
    }  # fmt: skip
