"""Model-FLOPs utilisation of a training step: the used fraction of the device, and its limits.

Trains a transformer preset by the package's trainer on random tokens, and counts 6 N + 12 L H Q T
floating-point operations per token (PaLM, App. B), where N is the number of parameters that
multiply each token. The rate is compared with products of large matrices in the same precision,
measured in the same run, and with the published peak of the device if it is known.
"""

import argparse
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from experiments.bench._measuring import device, times
from experiments.measures.flops import flops
from experiments.models import presets
from experiments.models.next_token import token_losses
from experiments.training import Optimizer, Schedule, Training, init, make_step, sharding, train
from sail_jax.cli.options import Parser, UsageError, natural

# Dense bfloat16 operations per second, without sparsity, by the vendors' data sheets.
PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L4": 121e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}


def per_token(config: Mapping[str, Any], params: PyTree, context: int) -> float:
    """Counts the operations of a forward and a backward pass for one token.

        6 N + 12 L H Q T

    with N parameters that multiply the token, L layers, H heads of dimension Q, and T tokens in a
    sequence. An embedding that is only a lookup is excluded.

    Args:
      config: The sizes of the model, in the form of `experiments.models.presets`.
      params: The parameters.
      context: The number of tokens in a sequence, T.

    Returns:
      The number of operations.

    References:
      Chowdhery et al., PaLM, 2022 (arXiv 2204.02311), App. B.
    """
    met = 0
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        looked_up = "position_embed" in name or ("token_embed" in name and not config.get("tied"))
        met += 0 if looked_up else leaf.size
    heads = config["layers"] * config["heads"] * config["head_dim"]
    return 6.0 * met + 12.0 * heads * context


def matmul_rate(dtype: DTypeLike, n: int, repeats: int) -> float:
    """Measures the rate at which one device multiplies matrices.

    Args:
      dtype: The dtype of the matrices.
      n: Their height and width.
      repeats: The number of timed calls, of 8 products each.

    Returns:
      Operations per second.
    """
    chain = 8

    @jax.jit
    def products(a: Array, b: Array) -> Array:
        # The division keeps entries of order 1 along the whole chain.
        return jax.lax.fori_loop(0, chain, lambda _, x: (a @ x) / math.sqrt(n), b)

    a, b = (jax.random.normal(k, (n, n), dtype) for k in jax.random.split(jax.random.key(0)))
    return chain * 2.0 * n**3 / times(lambda: products(a, b), repeats).median


def options(parser: Parser) -> None:
    """Adds the options of the benchmark."""
    add = parser.add_argument
    add("--preset", default="gpt2-small", help="a GPT or Llama of the presets")
    add("--batch", type=natural, help="sequences per step (default: 8 per accelerator, 1 on CPU)")
    add("--context", type=natural, help="tokens of each (default: the preset's)")
    add("--layers", type=natural, help="number of layers, at most the preset's")
    add("--micro-batches", type=natural, default=1, help="parts of a batch")
    add("--steps", type=natural, default=20, help="timed ones")
    add("--compute", default="bfloat16", help="bfloat16 or float32")
    add("--shard", default="data", choices=("data", "full"), help="over devices")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Prints the results, and returns the record."""
    devices = jax.devices()
    changes = {k: v for k in ("context", "layers") if (v := getattr(args, k)) is not None}
    try:
        config = presets.config(args.preset, **changes, dropout=0.0)
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    if not {"vocab", "heads"} <= config.keys():
        raise UsageError(f"--preset: {args.preset} is not a language model")
    batch = args.batch or (1 if devices[0].platform == "cpu" else 8) * len(devices)
    mesh = sharding.mesh()
    print(device())
    seconds, share, params = _train(config, batch, args, mesh)
    tokens = batch * config["context"]
    model = per_token(config, params, config["context"]) * tokens
    size = sum(x.size for x in jax.tree.leaves(params))
    done = model / seconds / len(devices)
    print(
        f"{args.preset}: {size / 1e6:.1f}M parameters, {batch} x {config['context']} tokens, "
        f"{args.compute}: {seconds * 1e3:.1f} ms per step, {tokens / seconds:.4g} tokens/s, "
        f"{done / 1e12:.4g} Tflop/s per device; steps take {share:.0%} of the time, the rest "
        "is input and metrics"
    )
    n = 8192 if devices[0].platform != "cpu" else 2048
    rate = matmul_rate(jnp.dtype(args.compute), n, 5)
    print(
        f"ratio: {done / rate:.1%} of the rate of products of {n} x {n} matrices in "
        f"{args.compute} ({rate / 1e12:.4g} Tflop/s)"
    )
    peak = next((v for k, v in PEAKS.items() if k in devices[0].device_kind), None)
    if peak is not None and args.compute == "bfloat16":
        print(f"ratio: model-FLOPs utilisation {done / peak:.1%} of {peak / 1e12:.0f} Tflop/s")
    # In float32, the optimiser reads and writes parameters and two moments, and reads gradients,
    # which is 7 x 4 bytes for each parameter.
    counted = _counted(config, batch // args.micro_batches, args.compute, params)
    print(
        f"limits: XLA counts {args.micro_batches * counted / model:.2f} times the model's "
        f"operations; the products alone would take {model / rate / len(devices) * 1e3:.1f} of "
        f"{seconds * 1e3:.1f} ms; the optimiser reads and writes {28 * size / 1e9:.2f} GB a step"
    )
    return {"parameters": size, "seconds": seconds, "operations_per_second": done, "limit": rate}


def _loss(
    net: nn.Module, params: PyTree, mutable: None, tokens: Array, key: Array | None = None
) -> tuple[Array, dict[str, Array], None]:
    """Computes the mean loss of next-token prediction, in the trainer's form."""
    return token_losses(net, {"params": params}, tokens[:, :-1], tokens[:, 1:]).mean(), {}, mutable


def _train(
    config: dict[str, Any], batch: int, args: argparse.Namespace, mesh: Mesh
) -> tuple[float, float, PyTree]:
    """Trains, and returns seconds per step, the fraction of time in steps, and the parameters.

    The first step, which compiles, is excluded.
    """
    net = presets.build(config)
    params = net.init(jax.random.key(0), jnp.zeros((1, 1), int))["params"]
    optimizer = Optimizer(Schedule(6e-4, 10_000, 100), weight_decay=0.1, clip=1.0)
    training = Training(optimizer, args.micro_batches, args.compute)
    state = init(training, params, jax.random.key(1))
    rule = sharding.replicated if args.shard == "data" else sharding.fully_sharded
    shardings = rule(mesh, state)
    step = make_step(partial(_loss, net), training, shardings)

    def tokens(t: int) -> np.ndarray:
        shape = batch, config["context"] + 1
        return np.random.default_rng(t).integers(config["vocab"], size=shape, dtype=np.int32)

    place = partial(sharding.split, mesh)
    trained = train(
        step, sharding.place(state, shardings), tokens, args.steps + 1, place=place, say=None,
        log_every=args.steps + 1,
    )  # fmt: skip
    return trained.seconds / args.steps, trained.step_share, params


def _counted(config: dict[str, Any], batch: int, dtype: str, params: PyTree) -> float:
    """Returns the number of operations of one gradient, as counted by XLA."""
    net = presets.build(config)
    tokens = jax.ShapeDtypeStruct((batch, config["context"] + 1), jnp.int32)
    cast = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), params)
    return flops(jax.grad(lambda p, x: _loss(net, p, None, x)[0]), cast, tokens)
