"""Merging checkpoints: whole processes, compared with plain reading and writing, and with mergekit.

Writes synthetic Llama-shaped checkpoints in bfloat16 (a base and three models fine-tuned from it),
merges them with `sail-jax merge`, and prints wall time (including start-up and compilation) and
peak resident memory. One ratio is to a program that only reads the inputs and writes one output.
With --peer, another ratio is to mergekit on the same recipe. All programs take turns in one run,
and the inputs are in the page cache. Other modes: --caps and --device.
"""

import argparse
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.bench import _merge_speed
from experiments.bench._measuring import some_of
from experiments.bench._merge_recipes import DEFAULT, JOBS
from sail_jax import disk
from sail_jax.cli.options import Parser, natural
from sail_jax.cli.progress import say


def options(parser: Parser) -> None:
    """Adds the options of the benchmark."""
    add = parser.add_argument
    default = Path(tempfile.gettempdir()) / "sail-jax-bench-merge"
    sizes = [*_merge_speed.SIZES, "both"]
    add("--dir", type=Path, default=default, help="for checkpoints and peer; default: %(default)s")
    add("--clean", action="store_true", help="only remove that directory")
    add("--size", choices=sizes, default="both", help="of the model; both: 50m and 0.5b")
    add(
        "--methods",
        type=some_of(JOBS),
        help="comma-separated, of: " + ", ".join(JOBS),
    )
    add("--repeat", type=natural, default=5, help="timed runs of sail-jax and of the limit")
    add(
        "--peer",
        type=some_of(JOBS),
        nargs="?",
        const=tuple(JOBS),
        default=(),
        metavar="METHODS",
        help="install mergekit there and run it as well; default: with all methods",
    )
    add(
        "--allocators",
        type=some_of(JOBS),
        default=(),
        metavar="METHODS",
        help="methods that both programs also run with the other's memory allocator",
    )
    add("--peer-version", choices=["0.1.5", "0.1.4"], default="0.1.5", help="default: %(default)s")
    add("--peer-repeat", type=natural, default=3, help="timed runs of the peer")
    add("--caps", action="store_true", help="all methods under each --max-memory: is it exceeded?")
    add("--largest", default="1,16,64,128", help="for --caps: sizes of the largest tensor, in Mi")
    add("--resume", action="store_true", help="for --caps: measure only rows not yet in --dir")
    add(
        "--max-memory",
        help="memory limits for --caps; default: least,400MB,600MB,1GB",
    )
    add("--device", action="store_true", help="merge arrays in device memory, no files")
    add("--command", help="run this instead of sail-jax, with RECIPE and OUT appended")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the benchmark in one of its modes, prints the results, and returns the record.

    It is not `good` if a merge failed.
    """
    if args.clean:
        shutil.rmtree(args.dir, ignore_errors=True)
        return {}
    with disk.explained("write to", args.dir):
        args.dir.mkdir(parents=True, exist_ok=True)
        # The peer in this folder is executed, and other users know the default name.
        if why := disk.foreign(args.dir, links=True):
            raise disk.RefusedError(f"{args.dir} {why}; choose another --dir")
    sizes = ["50m", "0.5b"] if args.size == "both" else [args.size]
    jobs = {name: JOBS[name] for name in args.methods or (JOBS if args.caps else DEFAULT)}
    ours = [sys.executable, "-m", "sail_jax.cli", "merge"]
    if args.command:
        ours = shlex.split(args.command)
    if args.device:
        from experiments.bench import _merge_device

        names = [x for x in _merge_device.MERGES if x in (args.methods or _merge_device.MERGES)]
        llamas = ((size, _merge_speed.SIZES[size]) for size in sizes)
        rows = [_merge_device.run(*llama, args.repeat, names) for llama in llamas]
        return {"device_memory": rows}
    if args.caps:
        from experiments.bench import _merge_caps

        caps = (args.max_memory or f"{_merge_caps.LEAST},400MB,600MB,1GB").split(",")
        entries = [natural(n) << 20 for n in args.largest.split(",")]
        return _merge_caps.run(args.dir, ours, jobs, caps, entries, resume=args.resume)
    record: dict[str, Any] = {}
    peer = None
    if args.peer:
        from experiments.bench._merge_peer import Peer

        say("mergekit: preparing its environment ...")
        peer = Peer(args.dir, args.peer_version)
        record["peer"] = peer.versions()
        print("peer: " + ", ".join(f"{k} {v}" for k, v in record["peer"].items()))
    results = []
    for size in sizes:
        turns = _merge_speed.Turns(args.repeat, args.peer_repeat, args.peer, args.allocators)
        results.append(_merge_speed.run(args.dir, size, jobs, ours, peer, turns))
    return {**record, "good": all(result["good"] for result in results), "speed": results}
