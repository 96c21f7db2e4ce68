"""Random small networks, with the known free units of their parameters.

A network is a stream of some width through a few blocks, each drawn from a list: dense layers with
different activations and norms, gated units, attention with and without rotary positions and shared
keys, mixtures of experts, layers in a scan, recurrences, convolutions over the sequence, ties.
Parameters are drawn, nothing stays at zero or one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Network(NamedTuple):
    """A random network.

    Attributes:
      apply: The network, of parameters and inputs `[batch, length, 3]`.
      params: Its parameters.
      free: Pairs of a path and an axis that is known to be at least partly free.
      blocks: What it is made of, for messages.
      apart: Groups of such pairs, the axes of slices of one stack. No two of a group are in one
        space.
    """

    apply: Any
    params: Any
    free: tuple[tuple[str, int], ...]
    blocks: tuple[str, ...]
    apart: tuple[tuple[tuple[str, int], ...], ...]


ACTIVATIONS = {
    "relu": jax.nn.relu, "gelu": jax.nn.gelu, "tanh": jnp.tanh, "silu": jax.nn.silu,
    "leaky": jax.nn.leaky_relu, "linear": lambda x: x, "square": lambda x: x * x,
    "abs": jnp.abs, "relu2": lambda x: jax.nn.relu(x) ** 2, "elu": jax.nn.elu,
    "softplus": jax.nn.softplus, "sine": jnp.sin, "cap": lambda x: 3 * jnp.tanh(x / 3),
}  # fmt: skip


def _layernorm(x, p):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["g"] + p["b"]


def _flax_layernorm(x, p):
    mean = x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt((x * x).mean(-1, keepdims=True) - mean * mean + 1e-5) * p["g"]
    return (x - mean) * scale + p["b"]


def _rmsnorm(x, p):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * p["g"]


def _gemma_norm(x, p):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * (1 + p["g"])


def _l2norm(x, p):
    return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6) * p["g"]


def _batchnorm(x, p):
    return (x - p["b"]) * jax.lax.rsqrt(jnp.abs(p["v"]) + 1e-5) * p["g"] + p["c"]


def _none(x, p):
    return x


def _groupnorm(x, p):
    y = x.reshape(*x.shape[:-1], 2, -1)
    y = y - y.mean(-1, keepdims=True)
    y = y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-5)
    return y.reshape(x.shape) * p["g"]


NORMS = {
    "layernorm": (_layernorm, "gb"), "flax layernorm": (_flax_layernorm, "gb"),
    "rmsnorm": (_rmsnorm, "g"), "gemma norm": (_gemma_norm, "g"), "l2 norm": (_l2norm, "g"),
    "batchnorm": (_batchnorm, "bvgc"), "no norm": (_none, ""), "groupnorm": (_groupnorm, "g"),
}  # fmt: skip


class _Maker:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.params: dict[str, Any] = {}
        self.free: list[tuple[str, int]] = []
        self.apart: list[tuple[tuple[str, int], ...]] = []

    def pick(self, *values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def add(self, path: str, shape: tuple[int, ...], *free: int) -> str:
        scale = np.prod(shape[:-1]) ** -0.5 if len(shape) > 1 else 1.0
        self.params[path] = jnp.asarray(self.rng.normal(size=shape) * scale, jnp.float32)
        self.free += [(path, axis) for axis in free]
        return path

    def slices(self, path: str, count: int, shape: tuple[int, ...], *apart: int) -> list[str]:
        """Slices of a stack, all of whose axes are free, some of them slice by slice."""
        names = [self.add(f"{path}/{k}", shape, *range(len(shape))) for k in range(count)]
        self.apart += [tuple((name, axis) for name in names) for axis in apart]
        return names


def random_network(seed: int) -> Network:
    """Draws a network.

    Args:
      seed: The seed, which determines everything.

    Returns:
      The network.
    """
    m = _Maker(seed)
    width = int(m.pick(4, 6, 8))
    m.add("in", (3, width), 1)
    steps, names = [], []
    for k in range(int(m.rng.integers(1, 4))):
        make = m.pick(_dense, _dense, _gated, _attention, _attention, _experts, _recurrence,
                      _convolution, _lora, _each_expert, _layers)  # fmt: skip
        norm = m.pick(*NORMS)
        act, letters = NORMS[norm]
        keys = {c: m.add(f"{k}/norm.{c}", (width,), 0) for c in letters}
        body, name = make(m, f"{k}", width)
        residual = bool(m.rng.integers(2)) or name.startswith("attention")
        steps.append((act, keys, body, residual))
        names.append(f"{norm}, {name}{', residual' if residual else ''}")
    tied = bool(m.rng.integers(3) == 0)
    if not tied:
        m.add("out", (width, 3), 0)

    def apply(p: Any, x: Any) -> Any:
        h = x @ p["in"]
        for norm, keys, body, residual in steps:
            y = body(p, norm(h, {c: p[path] for c, path in keys.items()}))
            h = h + y if residual else y
        return h @ (p["in"].T if tied else p["out"])

    names.append("tied" if tied else "untied")
    return Network(apply, m.params, tuple(m.free), tuple(names), tuple(m.apart))


def _dense(m: _Maker, at: str, width: int) -> Any:
    hidden, name = int(m.pick(3, 5, 8)), str(m.pick(*ACTIVATIONS))
    act = ACTIVATIONS[name]
    m.add(f"{at}/w", (width, hidden), 0, 1)
    m.add(f"{at}/u", (hidden, width), 0, 1)
    if m.rng.integers(2):
        m.add(f"{at}/bias", (hidden,), 0)
        return lambda p, x: act(x @ p[f"{at}/w"] + p[f"{at}/bias"]) @ p[f"{at}/u"], name
    normalised = bool(m.rng.integers(4) == 0)
    if normalised:
        m.add(f"{at}/gain", (hidden,), 0)

    def body(p: Any, x: Any) -> Any:
        w = p[f"{at}/w"]
        if normalised:
            w = p[f"{at}/gain"] * w / jnp.linalg.norm(w, axis=0)
        return act(x @ w) @ p[f"{at}/u"]

    return body, name + (", weight norm" if normalised else "")


def _gated(m: _Maker, at: str, width: int) -> Any:
    hidden, name = int(m.pick(3, 5)), str(m.pick(*ACTIVATIONS))
    act = ACTIVATIONS[name]
    fused = bool(m.rng.integers(2))
    m.add(f"{at}/u", (hidden, width), 0, 1)
    if fused:
        m.add(f"{at}/w", (width, 2 * hidden), 0, 1)
    else:
        m.add(f"{at}/w", (width, hidden), 0, 1)
        m.add(f"{at}/v", (width, hidden), 0, 1)

    def body(p: Any, x: Any) -> Any:
        if fused:
            gate, up = jnp.split(x @ p[f"{at}/w"], 2, axis=-1)
        else:
            gate, up = x @ p[f"{at}/w"], x @ p[f"{at}/v"]
        return (act(gate) * up) @ p[f"{at}/u"]

    return body, f"gated {name}{', fused' if fused else ''}"


def _rotary(x: Any) -> Any:
    angle = jnp.arange(x.shape[1])[:, None, None] * 10.0 ** -jnp.arange(x.shape[-1] // 2)
    a, b = jnp.split(x, 2, axis=-1)
    c, s = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * c - b * s, a * s + b * c], -1)


def _attention(m: _Maker, at: str, width: int) -> Any:
    heads, groups = 2, int(m.pick(1, 2))
    qk, v = 4, int(m.pick(2, 3))
    rotary, qk_norm = bool(m.rng.integers(2)), bool(m.rng.integers(3) == 0)
    free = () if rotary else (1,)
    fused = bool(m.rng.integers(3) == 0) and groups == 1
    if fused:
        v = qk
        m.add(f"{at}/qkv", (width, 3 * heads * qk), 0, 1)
    else:
        m.add(f"{at}/q", (width, heads * groups * qk), 0, 1)
        m.add(f"{at}/k", (width, heads * qk), 0, 1)
        m.add(f"{at}/v", (width, heads * v), 0, 1)
    m.add(f"{at}/o", (heads * groups * v, width), 0, 1)
    if qk_norm:
        m.add(f"{at}/qn", (qk,), *(0 for _ in free))
        m.add(f"{at}/kn", (qk,), *(0 for _ in free))

    def body(p: Any, x: Any) -> Any:
        b, t, _ = x.shape
        if fused:
            y = jnp.moveaxis((x @ p[f"{at}/qkv"]).reshape(b, t, 3, heads, qk), 2, 0)
            q, k, value = y[0][:, :, :, None], y[1], y[2]
        else:
            q = (x @ p[f"{at}/q"]).reshape(b, t, heads, groups, qk)
            k = (x @ p[f"{at}/k"]).reshape(b, t, heads, qk)
            value = (x @ p[f"{at}/v"]).reshape(b, t, heads, v)
        if qk_norm:
            q, k = _rmsnorm(q, {"g": p[f"{at}/qn"]}), _rmsnorm(k, {"g": p[f"{at}/kn"]})
        if rotary:
            q, k = _rotary(q.reshape(b, t, -1, qk)).reshape(q.shape), _rotary(k)
        scores = jnp.einsum("bshgd,bthd->bhgst", q, k) / np.sqrt(qk)
        out = jnp.einsum("bhgst,bthd->bshgd", jax.nn.softmax(scores, -1), value)
        return out.reshape(b, t, -1) @ p[f"{at}/o"]

    name = f"attention{', rotary' if rotary else ''}{', norm of q and k' if qk_norm else ''}"
    return body, name + (f", {groups} a group" if groups > 1 else "") + (", fused" if fused else "")


def _experts(m: _Maker, at: str, width: int) -> Any:
    count, hidden = 3, 4
    m.add(f"{at}/router", (width, count), 0, 1)
    m.add(f"{at}/w", (count, width, hidden), 0, 1, 2)
    m.add(f"{at}/u", (count, hidden, width), 0, 1, 2)
    hard = bool(m.rng.integers(2))

    def body(p: Any, x: Any) -> Any:
        weight = jax.nn.softmax(x @ p[f"{at}/router"], -1)
        if hard:
            weight = weight * jax.nn.one_hot(weight.argmax(-1), count)
        y = jax.nn.relu(jnp.einsum("btd,edh->bteh", x, p[f"{at}/w"]))
        return jnp.einsum("bteh,ehd,bte->btd", y, p[f"{at}/u"], weight)

    return body, f"experts{', the first' if hard else ''}"


def _each_expert(m: _Maker, at: str, width: int) -> Any:
    """Experts whose hidden units have an order of their own; the router's order is then fixed."""
    count, hidden = 3, int(m.pick(3, 5))
    m.add(f"{at}/router", (width, count), 0)
    first = m.slices(f"{at}/w", count, (width, hidden), 1)
    second = m.slices(f"{at}/u", count, (hidden, width), 0)
    form, name = str(m.pick("dense", "looked up", "in turn")), str(m.pick(*ACTIVATIONS))
    act = ACTIVATIONS[name]

    def body(p: Any, x: Any) -> Any:
        w, u = (jnp.stack([p[path] for path in paths]) for paths in (first, second))
        weight = jax.nn.softmax(x @ p[f"{at}/router"], -1)
        if form == "looked up":
            weight, chosen = jax.lax.top_k(weight, 2)
            y = act(jnp.einsum("btd,btkdh->btkh", x, w[chosen]))
            return jnp.einsum("btk,btkh,btkhd->btd", weight, y, u[chosen])
        if form == "dense":
            y = act(jnp.einsum("btd,edh->bteh", x, w))
            return jnp.einsum("bteh,ehd,bte->btd", y, u, weight)

        def step(total: Any, layer: Any) -> Any:
            one, other, share = layer
            return total + share[..., None] * (act(x @ one) @ other), None

        return jax.lax.scan(step, 0 * x, (w, u, jnp.moveaxis(weight, -1, 0)))[0]

    return body, f"each expert {form}, {name}"


def _layers(m: _Maker, at: str, width: int) -> Any:
    """Two layers in one scan, of attention and of a gate."""
    hidden, heads, qk = int(m.pick(3, 5)), 2, 3
    paths = {c: m.slices(f"{at}/{c}", 2, (width, heads * qk), 1) for c in "qkv"}
    paths["o"] = m.slices(f"{at}/o", 2, (heads * qk, width), 0)
    paths |= {c: m.slices(f"{at}/{c}", 2, (width, hidden), 1) for c in ("gate", "up")}
    paths["down"] = m.slices(f"{at}/down", 2, (hidden, width), 0)
    name, backwards = str(m.pick(*ACTIVATIONS)), bool(m.rng.integers(2))
    act = ACTIVATIONS[name]

    def layer(h: Any, w: Any) -> Any:
        q, k, v = (jnp.reshape(h @ w[c], (*h.shape[:2], heads, qk)) for c in "qkv")
        mix = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k) / np.sqrt(qk), -1)
        h = h + jnp.einsum("bhst,bthd->bshd", mix, v).reshape(*h.shape[:2], -1) @ w["o"]
        return h + (act(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

    def body(p: Any, x: Any) -> Any:
        stacks = {c: jnp.stack([p[path] for path in own]) for c, own in paths.items()}
        return jax.lax.scan(layer, x, stacks, reverse=backwards)[0]

    return body, f"layers of attention, {name}{', backwards' if backwards else ''}"


def _recurrence(m: _Maker, at: str, width: int) -> Any:
    hidden = int(m.pick(3, 5))
    lstm = bool(m.rng.integers(2))
    fan = 4 if lstm else 1
    m.add(f"{at}/w", (width, fan * hidden), 0, 1)
    m.add(f"{at}/r", (hidden, fan * hidden), 0, 1)
    m.add(f"{at}/u", (hidden, width), 0, 1)

    def step(p: Any, state: Any, row: Any) -> Any:
        h, c = state
        z = row @ p[f"{at}/w"] + h @ p[f"{at}/r"]
        if not lstm:
            h = jnp.tanh(z)
            return (h, c), h
        i, f, g, o = jnp.split(z, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    def body(p: Any, x: Any) -> Any:
        zero = jnp.zeros((x.shape[0], hidden))
        _, hs = jax.lax.scan(lambda s, row: step(p, s, row), (zero, zero), x.swapaxes(0, 1))
        return hs.swapaxes(0, 1) @ p[f"{at}/u"]

    return body, "lstm" if lstm else "recurrence"


def _convolution(m: _Maker, at: str, width: int) -> Any:
    hidden = int(m.pick(4, 6))
    kind = str(m.pick("plain", "depthwise", "grouped"))
    m.add(f"{at}/w", (width, hidden), 0, 1)
    groups = {"plain": 1, "depthwise": hidden, "grouped": 2}[kind]
    m.add(f"{at}/k", (3, hidden // groups, hidden), *((2,) if groups == hidden else (1, 2)))
    m.add(f"{at}/u", (hidden, width), 0, 1)
    name = str(m.pick(*ACTIVATIONS))
    act = ACTIVATIONS[name]

    def body(p: Any, x: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            x @ p[f"{at}/w"], p[f"{at}/k"], (1,), "SAME",
            dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups,
        )  # fmt: skip
        return act(y) @ p[f"{at}/u"]

    return body, f"{kind} convolution, {name}"


def _lora(m: _Maker, at: str, width: int) -> Any:
    hidden, rank = 5, 2
    m.add(f"{at}/w", (width, hidden), 0, 1)
    m.add(f"{at}/a", (width, rank), 0, 1)
    m.add(f"{at}/b", (rank, hidden), 0, 1)
    m.add(f"{at}/u", (hidden, width), 0, 1)

    def body(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ (p[f"{at}/w"] + 2 * p[f"{at}/a"] @ p[f"{at}/b"])) @ p[f"{at}/u"]

    return body, "low rank"
