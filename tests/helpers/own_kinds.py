"""Fifteen small networks of different kinds, without a table of their spaces.

Each entry of `KINDS` returns a network, its parameters, its inputs, and the paths of leaves with a
size that its code states.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Kind(NamedTuple):
    """A network.

    Attributes:
      apply: The network, of parameters and inputs.
      params: Its parameters.
      inputs: Its inputs.
      stated: Leaves with sizes that its code states, such as heads.
    """

    apply: Callable[..., Any]
    params: dict[str, Any]
    inputs: tuple[Any, ...]
    stated: tuple[str, ...] = ()


def _drawn(seed: int, /, **shapes: tuple[int, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...]) -> Any:
        scale = np.prod(shape[:-1]) ** -0.5 if len(shape) > 1 else 1.0
        return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)

    return {name: draw(shape) for name, shape in shapes.items()}


def _conv(x: Any, w: Any, *, groups: int = 1, stride: int = 1) -> Any:
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )  # fmt: skip


IMAGE, SEQUENCE = _drawn(1, image=(2, 8, 8, 3))["image"], _drawn(2, x=(2, 6, 3))["x"]


def u_net() -> Kind:
    def net(p: Any, x: Any) -> Any:
        a = jax.nn.relu(_conv(x, p["down0"]))
        b = jax.nn.relu(_conv(a, p["down1"], stride=2))
        up = jax.image.resize(b, (*a.shape[:3], b.shape[3]), "nearest")
        return _conv(jax.nn.gelu(_conv(jnp.concatenate([a, up], -1), p["up"])), p["out"])

    shapes = {"down0": (3, 3, 3, 4), "down1": (3, 3, 4, 5), "up": (3, 3, 9, 4), "out": (1, 1, 4, 2)}
    return Kind(net, _drawn(3, **shapes), (IMAGE,))


def dense_net() -> Kind:
    def net(p: Any, x: Any) -> Any:
        h = _conv(x, p["stem"])
        for name in ("a", "b"):
            h = jnp.concatenate([h, _conv(jax.nn.relu(h), p[name])], -1)
        return h.mean((1, 2)) @ p["head"]

    shapes = {"stem": (3, 3, 3, 4), "a": (3, 3, 4, 3), "b": (3, 3, 7, 3), "head": (10, 2)}
    return Kind(net, _drawn(4, **shapes), (IMAGE,))


def mamba() -> Kind:
    def net(p: Any, x: Any) -> Any:
        u, gate = x @ p["u"], jax.nn.silu(x @ p["gate"])
        step = jax.nn.softplus(u * p["scale"] + p["bias"])

        def one(h: Any, at: Any) -> Any:
            u, step, b, c = at
            h = jnp.exp(-step[..., None] * jnp.exp(p["decay"])) * h
            h = h + (step * u)[..., None] * b[:, None]
            return h, (h * c[:, None]).sum(-1)

        swapped = [v.swapaxes(0, 1) for v in (u, step, x @ p["b"], x @ p["c"])]
        start = jnp.zeros((x.shape[0], u.shape[-1], p["b"].shape[-1]))
        _, y = jax.lax.scan(one, start, tuple(swapped))
        return (y.swapaxes(0, 1) * gate) @ p["out"]

    shapes = {"u": (3, 5), "gate": (3, 5), "scale": (5,), "bias": (5,), "decay": (5, 4)}
    shapes |= {"b": (3, 4), "c": (3, 4), "out": (5, 2)}
    return Kind(net, _drawn(5, **shapes), (SEQUENCE,))


def mixer() -> Kind:
    def net(p: Any, x: Any) -> Any:
        h = x @ p["in"]
        tokens = jax.nn.gelu(h.swapaxes(1, 2) @ p["token_up"]) @ p["token_down"]
        h = h + tokens.swapaxes(1, 2)
        return (h + jax.nn.gelu(h @ p["up"]) @ p["down"]).mean(1) @ p["out"]

    shapes = {"in": (3, 5), "token_up": (6, 4), "token_down": (4, 6), "up": (5, 7), "down": (7, 5)}
    return Kind(net, _drawn(6, out=(5, 2), **shapes), (SEQUENCE,))


def gru() -> Kind:
    def net(p: Any, x: Any) -> Any:
        def one(h: Any, at: Any) -> Any:
            reset = jax.nn.sigmoid(at @ p["xr"] + h @ p["hr"])
            keep = jax.nn.sigmoid(at @ p["xz"] + h @ p["hz"])
            new = jnp.tanh(at @ p["xn"] + (reset * h) @ p["hn"])
            return keep * h + (1 - keep) * new, None

        h = jnp.zeros((x.shape[0], p["hr"].shape[0]))
        return jax.lax.scan(one, h, x.swapaxes(0, 1))[0] @ p["out"]

    shapes = {f"x{k}": (3, 5) for k in "rzn"} | {f"h{k}": (5, 5) for k in "rzn"}
    return Kind(net, _drawn(7, out=(5, 2), **shapes), (SEQUENCE,))


def mb_conv() -> Kind:
    def net(p: Any, x: Any) -> Any:
        h = _conv(x, p["stem"])
        y = jax.nn.silu(_conv(h, p["expand"]))
        y = jax.nn.silu(_conv(y, p["depth"], groups=y.shape[-1]))
        gate = jax.nn.sigmoid(jax.nn.silu(y.mean((1, 2)) @ p["squeeze"]) @ p["excite"])
        return (h + _conv(y * gate[:, None, None], p["project"])).mean((1, 2)) @ p["head"]

    shapes = {"stem": (3, 3, 3, 4), "expand": (1, 1, 4, 6), "depth": (3, 3, 1, 6)}
    shapes |= {"squeeze": (6, 3), "excite": (3, 6), "project": (1, 1, 6, 4), "head": (4, 2)}
    return Kind(net, _drawn(8, **shapes), (IMAGE,))


def perceiver() -> Kind:
    def net(p: Any, x: Any) -> Any:
        scores = (p["latent"] @ p["q"]) @ (x @ p["k"]).swapaxes(-1, -2)
        z = p["latent"] + jax.nn.softmax(scores, -1) @ (x @ p["v"])
        z = z + jax.nn.gelu(z @ p["up"]) @ p["down"]
        return z.mean(1) @ p["out"]

    shapes = {"latent": (4, 5), "q": (5, 3), "k": (3, 3), "v": (3, 5), "up": (5, 6), "down": (6, 5)}
    return Kind(net, _drawn(9, out=(5, 2), **shapes), (SEQUENCE,))


def tied_autoencoder() -> Kind:
    def net(p: Any, x: Any) -> Any:
        z = jnp.tanh(jax.nn.relu(x @ p["a"]) @ p["b"])
        return jax.nn.relu(z @ p["b"].T) @ p["a"].T

    return Kind(net, _drawn(10, a=(3, 6), b=(6, 4)), (SEQUENCE,))


def fused_attention() -> Kind:
    def net(p: Any, x: Any) -> Any:
        h = x @ p["in"]
        q, k, v = (y.reshape(*y.shape[:-1], 2, -1) for y in jnp.split(h @ p["qkv"], 3, -1))
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
        y = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores, -1), v)
        return (h + y.reshape(*y.shape[:2], -1) @ p["o"]) @ p["out"]

    shapes = {"in": (3, 6), "qkv": (6, 24), "o": (8, 6), "out": (6, 2)}
    return Kind(net, _drawn(11, **shapes), (SEQUENCE,), ("qkv", "o"))


def hyper_network() -> Kind:
    def net(p: Any, x: Any) -> Any:
        z = jnp.tanh(x.mean(1) @ p["code"])
        w = jnp.einsum("bz,zio->bio", z, p["make"])
        return jax.nn.relu(jnp.einsum("bsi,bio->bso", x @ p["in"], w)) @ p["out"]

    shapes = {"code": (3, 4), "make": (4, 5, 6), "in": (3, 5), "out": (6, 2)}
    return Kind(net, _drawn(12, **shapes), (SEQUENCE,))


def siamese() -> Kind:
    def embed(p: Any, x: Any) -> Any:
        return jax.nn.relu(x @ p["a"]) @ p["b"]

    def net(p: Any, x: Any, y: Any) -> Any:
        u, v = embed(p, x), embed(p, y)
        return (jax.nn.gelu(jnp.abs(u - v) @ p["c"]) @ p["o"]).mean(1), (u * v).sum(-1)

    shapes = {"a": (3, 5), "b": (5, 4), "c": (4, 6), "o": (6, 2)}
    return Kind(net, _drawn(13, **shapes), (SEQUENCE, SEQUENCE[:, ::-1]))


def graph() -> Kind:
    source, target = jnp.array([0, 1, 2, 3, 4, 0]), jnp.array([1, 2, 3, 4, 5, 5])

    def net(p: Any, x: Any) -> Any:
        h = x @ p["in"]
        for k in range(2):
            message = jax.nn.relu(h[source] @ p[f"m{k}"])
            summed = jax.ops.segment_sum(message, target, num_segments=6)
            h = jnp.tanh(h @ p[f"own{k}"] + summed @ p[f"u{k}"])
        return h @ p["out"]

    shapes = {"in": (3, 4), "out": (4, 2)}
    shapes |= {f"{name}{k}": s for k in range(2)
               for name, s in {"m": (4, 5), "own": (4, 4), "u": (5, 4)}.items()}  # fmt: skip
    return Kind(net, _drawn(14, **shapes), (SEQUENCE[0],))


def vector_quantised() -> Kind:
    def net(p: Any, x: Any) -> Any:
        z = jax.nn.relu(x @ p["a"]) @ p["b"]
        distance = ((z[..., None, :] - p["book"]) ** 2).sum(-1)
        code = p["book"][distance.argmin(-1)]
        return jax.nn.relu(code @ p["c"]) @ p["d"]

    shapes = {"a": (3, 5), "b": (5, 4), "book": (7, 4), "c": (4, 6), "d": (6, 2)}
    return Kind(net, _drawn(15, **shapes), (SEQUENCE,))


def transposed() -> Kind:
    def net(p: Any, x: Any) -> Any:
        h = jax.nn.relu(_conv(x, p["a"], stride=2))
        up = jax.lax.conv_transpose(
            h, p["b"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return _conv(jax.nn.relu(up), p["out"])

    shapes = {"a": (3, 3, 3, 5), "b": (2, 2, 5, 4), "out": (1, 1, 4, 2)}
    return Kind(net, _drawn(16, **shapes), (IMAGE,))


def tied_language() -> Kind:
    def net(p: Any, tokens: Any) -> Any:
        h = p["table"][tokens]
        h = h + jax.nn.silu(h @ p["up"]) @ p["down"]
        h = h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6) * p["gain"]
        return h @ p["table"].T

    shapes = {"table": (11, 6), "up": (6, 5), "down": (5, 6), "gain": (6,)}
    return Kind(net, _drawn(17, **shapes), (jnp.array([[1, 2, 3], [4, 5, 6]]),))


KINDS = {
    make.__name__: make
    for make in (
        u_net, dense_net, mamba, mixer, gru, mb_conv, perceiver, tied_autoencoder, fused_attention,
        hyper_network, siamese, graph, vector_quantised, transposed, tied_language,
    )
}  # fmt: skip
