"""Several benchmarks one after the other; their records are the source of the page on performance.

Each runs in a separate process, and its record is a JSON file in --out. Existing records of other
benchmarks are kept. `python docs/performance.py` makes the page from the records in
`docs/performance`. On an idle machine of two cores, the preset `page` takes about 15 minutes, half
of them for mergekit. `long` takes about 40 minutes. It merges 3 B parameters, which requires 26 GB
of disk space, and runs every method under every memory limit.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.bench._measuring import carry_out, some_of
from sail_jax.cli.options import Parser

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
    words = {name: f"bench {words}" for name, words in PRESETS[args.preset].items()}
    took = carry_out({name: words[name] for name in words if name in args.only}, args.out)
    return {"good": not any(run["code"] for run in took.values()), "took": took}
