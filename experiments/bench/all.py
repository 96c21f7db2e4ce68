"""Several benchmarks one after the other; their records are the source of the page on performance.

Each runs in a separate process, and its record is a JSON file in --out. Existing records of other
benchmarks are kept. `python docs/performance.py` makes the page from the records in
`docs/performance`. On an idle machine of two cores, the preset `page` takes about 15 minutes, half
of them for mergekit. `long` takes about 40 minutes. It merges 3 B parameters, which requires 26 GB
of disk space, and runs every method under every memory limit.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.bench._measuring import some_of
from sail_jax import disk
from sail_jax.cli.options import Parser
from sail_jax.cli.progress import say

_MERGE = (
    "merge --size 0.5b --methods linear,slerp,model_stock,dare_ties,ties,della "
    "--peer linear,dare_ties,ties,della --allocators linear,dare_ties"
)
PRESETS: Mapping[str, Mapping[str, str]] = {
    "tiny": {
        "merge": "merge --size tiny --methods linear --repeat 1",
        "scale": "scale --preset tiny --repeats 1 --axes draws",
    },
    "page": {
        "merge": f"{_MERGE} --repeat 3 --peer-repeat 1",
        "scale": "scale --preset page --repeats 2",
    },
    "long": {
        "large": "scale --preset full --axes parameters,growth,alignment --repeats 2",
        "caps": "merge --caps",
    },
}
NAMES = tuple(dict.fromkeys(name for preset in PRESETS.values() for name in preset))


def options(parser: Parser) -> None:
    """Adds the options of the benchmark."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="the folder for the records")
    add("--preset", choices=tuple(PRESETS), default="page", help="default: %(default)s")
    add("--only", type=some_of(NAMES), default=NAMES, help="of: " + ", ".join(NAMES))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the benchmarks, and returns the seconds and exit code of each."""
    with disk.explained("write to", args.out):
        args.out.mkdir(parents=True, exist_ok=True)
    took: dict[str, dict[str, float]] = {}
    for name, words in PRESETS[args.preset].items():
        if name not in args.only:
            continue
        say(f"bench {words} ...")
        start = time.perf_counter()
        command = [sys.executable, "-m", "sail_jax.cli", "bench", *words.split()]
        # Records hold their arguments. A relative path keeps this machine's folders out of them.
        path = os.path.relpath(args.out / f"{name}.json")
        done = subprocess.run([*command, "--json", path], check=False)
        took[name] = {"seconds": time.perf_counter() - start, "code": done.returncode}
        print(f"bench {words}: {took[name]['seconds']:.0f} s\n", flush=True)
    return {"good": not any(run["code"] for run in took.values()), "took": took}
