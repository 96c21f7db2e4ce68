"""Probes of networks, compared with the forward and backward passes that they need.

The networks are a small transformer and an MLP. A bare pass is the compiled loss, or its gradient,
of one model on all of the data; a product with the Hessian needs two gradients. Each probe and its
passes take turns, and the fastest of each counts (without compilation). A pass takes some
milliseconds. Much shorter passes would mostly measure dispatch. `interference` needs no pass and is
compared with a copy of its models.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from experiments.bench._measuring import Table, Times, add_repeats, device, in_turns
from experiments.models.gpt import GPT
from experiments.models.mlp import MLP
from sail_jax import probe
from sail_jax.cli.options import Parser, UsageError, natural

LIMIT = 2.0


class Case(NamedTuple):
    """A network, its data, and models for the probes.

    Attributes:
      name: The name of the network.
      apply: The network as a function, as `sail_jax.probe` takes it.
      data: The batch, "x" and "y".
      models: Parameters: a base, and two models near it.
      metric: The loss of each example.
    """

    name: str
    apply: probe.Apply
    data: dict[str, jax.Array]
    models: list[Any]
    metric: probe.Metric

    def loss(self, params: PyTree, batch: PyTree) -> jax.Array:
        """Computes the loss of one model on a batch."""
        return self.metric(probe.features(self.apply, params, batch)["output"], batch).mean()

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Timing(NamedTuple):
    """The time of a probe, and the time of its passes.

    Attributes:
      network: The name of the network.
      probe: The name of the probe.
      forward: The number of its forward passes.
      gradients: The number of its gradients.
      ms: Milliseconds of the probe.
      bare_ms: Milliseconds of the passes alone.
    """

    network: str
    probe: str
    forward: int
    gradients: int
    ms: float
    bare_ms: float

    @property
    def ratio(self) -> float:
        """The time of the probe divided by the time of its passes."""
        return self.ms / self.bare_ms


def _metric(logits: jax.Array, batch: PyTree) -> jax.Array:
    """Computes the cross-entropy of each example, the mean over its positions."""
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][..., None], -1)
    return -picked.reshape(len(logits), -1).mean(1)


def _case(name: str, module: nn.Module, layers: str, x: np.ndarray, y: np.ndarray) -> Case:
    """Creates a network with a base and two models near it."""
    apply = probe.flax_network(
        module.apply, layers, intercept=nn.intercept_methods, inputs=lambda batch: batch["x"]
    )
    init = jax.jit(module.init)
    base = init(jax.random.key(0), x[:1])
    near = [
        jax.tree.map(lambda a, b: a + 0.1 * b, base, init(jax.random.key(i), x[:1])) for i in (1, 2)
    ]
    return Case(name, apply, {"x": jnp.asarray(x), "y": jnp.asarray(y)}, [base, *near], _metric)


def cases(batch: int) -> list[Case]:
    """Creates the networks for the probes.

    Args:
      batch: There are an eighth as many sequences, and four times as many images.

    Returns:
      A small transformer on random tokens, and an MLP on random images.
    """
    random = np.random.default_rng(0)
    tokens = random.integers(0, 64, (batch // 8, 65))
    images = random.normal(size=(4 * batch, 64)).astype(np.float32)
    gpt = GPT(vocab=64, context=64, width=64, layers=2, heads=4, head_dim=16, hidden=256)
    return [
        _case("gpt", gpt, "block_?", tokens[:, :-1], tokens[:, 1:]),
        _case("mlp", MLP((256, 256), 10), "*", images, random.integers(0, 10, len(images))),
    ]


def probes(case: Case) -> dict[str, tuple[int, int, Callable[[], Any]]]:
    """Lists the probes, and the passes of each.

    Returns for each probe the numbers of forward passes and of gradients, and the call.
    """
    base, first, second = case.models
    apply, data, metric, loss = case.apply, case.data, case.metric, case.loss
    key, thirds = jax.random.key(0), [0.25, 0.5, 0.75]
    weights = np.stack([thirds, np.subtract(1, thirds)], 1)
    depth = len(jax.eval_shape(lambda: apply(base, data)[1]))
    return {
        "barrier": (13, 0, lambda: probe.barrier(loss, first, second, data)),
        "simplex_barrier": (
            13,
            0,
            lambda: probe.simplex_barrier(loss, case.models, data, probe.simplex_grid(3, 3)),
        ),
        "cross_task_linearity": (
            5,
            0,
            lambda: probe.cross_task_linearity(apply, first, second, data, thirds),
        ),
        "addition": (6, 0, lambda: probe.addition(apply, base, [first, second], data, [0.3, 1.0])),
        "negation": (6, 0, lambda: probe.negation(apply, base, first, data, [0.3, 1.0])),
        "averaging": (5, 0, lambda: probe.averaging(apply, [first, second], data, metric, weights)),
        "stitching": (
            2 + depth,
            0,
            lambda: probe.stitching(apply, [first], base, data, metric),
        ),
        "hessian_spectrum": (
            0,
            32,
            lambda: probe.hessian_spectrum(loss, base, data, key, steps=8, probes=2),
        ),
        "gaussian_sensitivity": (
            9,
            4,
            lambda: probe.gaussian_sensitivity(loss, base, data, key, [0.1, 1.0], draws=2),
        ),
        "fine_tuning_sensitivity": (
            4,
            2,
            lambda: probe.fine_tuning_sensitivity(loss, base, first, data, thirds),
        ),
    }


def timings(case: Case, repeats: int) -> Iterator[Timing]:
    """Times the probes of a network, each in turns with its bare passes.

    Args:
      case: The network.
      repeats: The number of timed calls of each.

    Yields:
      The time of each probe; the last is `interference`, compared with a copy.
    """
    forward, gradient = jax.jit(case.loss), jax.jit(jax.grad(case.loss))
    params = case.models[0]
    for name, (passes, gradients, call) in probes(case).items():

        def bare(f: int = passes, g: int = gradients) -> None:
            for _ in range(f):
                jax.block_until_ready(forward(params, case.data))
            for _ in range(g):
                jax.block_until_ready(gradient(params, case.data))

        took, floor = in_turns((call, bare), repeats)
        yield Timing(case.name, name, passes, gradients, *_fastest(took, floor))
    copy = jax.jit(lambda trees: jax.tree.map(lambda x: x + 1, trees))
    ours = partial(probe.interference, params, case.models[1:])
    pair = in_turns((ours, partial(copy, case.models)), repeats)
    yield Timing(case.name, "interference", 0, 0, *_fastest(*pair))


def _fastest(*of: Times) -> Iterator[float]:
    """Yields the smallest milliseconds of each."""
    return (1e3 * min(took.later) for took in of)


def options(parser: Parser) -> None:
    """Adds the options of the benchmark."""
    add = parser.add_argument
    add("--batch", type=natural, default=128, help="examples, in units; default: %(default)s")
    add_repeats(parser, 3, "timed runs of each")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Prints a table, and returns the record.

    It is not `good` if a probe takes more than `LIMIT` times as long as its passes.
    """
    if args.batch < 16:
        raise UsageError("--batch: expected at least 16")
    print(device())
    table = Table(
        "network", "probe".ljust(23), "forward", "gradients", "ms      ", "bare ms ", "ratio"
    )
    measured: list[Timing] = []
    for case in cases(args.batch):
        for t in timings(case, args.repeats):
            measured.append(t)
            table.row(
                t.network, t.probe, t.forward, t.gradients,
                f"{t.ms:.1f}", f"{t.bare_ms:.1f}", f"{t.ratio:.2f}",
            )  # fmt: skip
    # `interference` needs no pass, so its ratio is not limited.
    passing = [t for t in measured if t.forward + t.gradients]
    worst = max(passing, key=lambda t: t.ratio)
    print(f"worst ratio: {worst.ratio:.2f} ({worst.probe}, {worst.network}); limit {LIMIT:g}")
    timed = [{**t._asdict(), "ratio": t.ratio} for t in measured]
    return {"good": worst.ratio <= LIMIT, "timings": timed}
