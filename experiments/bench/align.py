"""Weight matching: the share of its time in the assignment solver.

Two networks with one hidden layer are matched by `sail_jax.align.weight_matching`. The second is
the first with its units permuted and noise added ("related"), or an independent network
("unrelated", which is harder for the solver). The rest of the time goes into matrix products, which
form the costs, and into reading the weights. The auction, which can run inside jit, may be measured
instead of the solver.
"""

import argparse
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench._measuring import Table, add_repeats
from sail_jax import align
from sail_jax.basis.spaces import spec
from sail_jax.cli.options import Parser, UsageError, natural


class Timing(NamedTuple):
    """The fastest of several matchings of two networks.

    Attributes:
      case: "related" or "unrelated".
      solver: "hungarian" or "auction".
      width: The number of hidden units.
      total: Seconds of the matching.
      solving: Seconds of it that the solver took.
      calls: The number of the solver's calls.
      found: The share of units that were matched with their true partners, for related networks.
    """

    case: str
    solver: str
    width: int
    total: float
    solving: float
    calls: int
    found: float

    @property
    def share(self) -> float:
        """The share of the time that the solver took."""
        return self.solving / self.total


def networks(width: int, related: bool) -> tuple[Any, Any, Any, np.ndarray]:
    """Makes two networks with one hidden layer.

    Args:
      width: The number of inputs, of hidden units and of outputs.
      related: Whether the second is the first with its units permuted and noise added.

    Returns:
      The parameters of the first and of the second network, their spec, and the index `(width,)`
      that undoes the permutation of the units.
    """
    random = np.random.default_rng(0)
    shapes = {"in": (width, width), "bias": (width,), "out": (width, width)}
    first = {name: random.standard_normal(s, dtype=np.float32) for name, s in shapes.items()}
    order = random.permutation(width)
    second = {name: random.standard_normal(s, dtype=np.float32) for name, s in shapes.items()}
    if related:
        moved = {
            "in": first["in"][:, order],
            "bias": first["bias"][order],
            "out": first["out"][order],
        }
        second = {name: moved[name] + 0.5 * second[name] for name in first}
    axes = {"in": "x* hidden", "bias": "hidden", "out": "hidden* y"}
    network_spec = spec(first, axes, spaces={"hidden": "relu", "{x,y}": "outer"})
    put = [jax.tree.map(jnp.asarray, params) for params in (first, second)]
    return *put, network_spec, np.argsort(order)


def alignment(
    width: int, case: str = "unrelated", solver: str = "hungarian", repeats: int = 3
) -> Timing:
    """Measures the matching of two networks, after compilation.

    Args:
      width: The number of hidden units.
      case: "related" or "unrelated".
      solver: "hungarian" or "auction".
      repeats: The number of timed matchings.

    Returns:
      The fastest of the matchings.
    """
    first, second, network_spec, order = networks(width, case == "related")
    assign = {"hungarian": align.hungarian, "auction": jax.jit(align.auction)}[solver]
    spent: list[float] = []

    def timed(benefit: jax.Array) -> np.ndarray:
        start = time.perf_counter()
        index = np.asarray(assign(benefit))
        spent.append(time.perf_counter() - start)
        return index

    results = []
    # The first call compiles, and does not count.
    for _ in range(repeats + 1):
        spent.clear()
        start = time.perf_counter()
        maps = align.weight_matching(first, second, network_spec, assignment=timed)
        total = time.perf_counter() - start
        right = float(np.mean(np.asarray(maps["hidden"].index) == order))
        results.append(Timing(case, solver, width, total, sum(spent), len(spent), right))
    return min(results[1:], key=lambda timing: timing.total)


def options(parser: Parser) -> None:
    """Adds the options of the benchmark."""
    add = parser.add_argument
    add("--width", type=natural, nargs="+", default=[512, 1024, 2048], help="default: %(default)s")
    add("--solver", choices=("hungarian", "auction", "both"), default="hungarian")
    add_repeats(parser, 3, "timed matchings")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Prints a table, and returns the record."""
    if min(args.width) < 2:
        raise UsageError("--width: expected at least 2")
    solvers = ("hungarian", "auction") if args.solver == "both" else (args.solver,)
    columns = "width", "total s", "solver s", "share", "calls", "found"
    table = Table("case     ", "solver   ", *columns)
    timings = []
    for width in args.width:
        for case in ("related", "unrelated"):
            for solver in solvers:
                t = alignment(width, case, solver, args.repeats)
                timings.append({**t._asdict(), "share": t.share})
                table.row(
                    case, solver, width, f"{t.total:.3f}", f"{t.solving:.3f}",
                    f"{t.share:.0%}", t.calls, f"{t.found:.1%}" if case == "related" else "-",
                )  # fmt: skip
    return {"timings": timings}
