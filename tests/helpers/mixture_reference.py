"""Llama, and its mixtures of experts, token by token in NumPy and in float64."""

import numpy as np

QUERIES = "model.layers.0.self_attn.q_proj.weight"


def norm(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def rotated(x, base=1e4):
    """`[time, head, unit]`; unit i is paired with unit i + half."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] / base ** (np.arange(half) / half)
    turn = np.exp(1j * angle)[:, None] * (x[..., :half] + 1j * x[..., half:])
    return np.concatenate([turn.real, turn.imag], axis=-1)


def gated(x, gate, up, down):
    z = gate @ x
    return down @ (z / (1 + np.exp(-z)) * (up @ x))


def mixed(x, router, experts, used, normalised):
    """The mixture at one token: a loop over the experts of the largest shares."""
    logits = router @ x
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    chosen = np.argsort(-shares, kind="stable")[:used]
    total = shares[chosen].sum() if normalised else 1.0
    return sum(shares[e] / total * gated(x, *experts[e]) for e in chosen)


def run(params, config, tokens):
    """Computes the inputs of each layer, `[layer, time, width]`, and the logits, for one text."""
    p = {name: np.asarray(x, np.float64) for name, x in params.items()}
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    # Granite states these four numbers; others divide products by the root of a head's size.
    embedding, residual = (config.get(f"{n}_multiplier", 1.0) for n in ("embedding", "residual"))
    scale = config.get("attention_multiplier", (len(p[QUERIES]) // heads) ** -0.5)
    x, inputs = p["model.embed_tokens.weight"][tokens] * embedding, []
    for i in range(config["num_hidden_layers"]):
        inputs.append(x)
        h = f"model.layers.{i}."
        y = norm(x, p[h + "input_layernorm.weight"])
        q, k, v = (
            (
                y @ p[f"{h}self_attn.{name}_proj.weight"].T
                + p.get(f"{h}self_attn.{name}_proj.bias", 0)
            ).reshape(len(y), n, -1)
            for name, n in (("q", heads), ("k", shared), ("v", shared))
        )
        if h + "self_attn.q_norm.weight" in p:
            q, k = (norm(z, p[f"{h}self_attn.{n}_norm.weight"]) for n, z in (("q", q), ("k", k)))
        q, k = rotated(q), rotated(k)
        out = np.zeros_like(q)
        for head in range(heads):
            own = head // (heads // shared)
            for t in range(len(y)):
                scores = k[: t + 1, own] @ q[t, head] * scale
                shares = np.exp(scores - scores.max())
                out[t, head] = shares / shares.sum() @ v[: t + 1, own]
        x = x + residual * (out.reshape(len(y), -1) @ p[h + "self_attn.o_proj.weight"].T)
        y = norm(x, p[h + "post_attention_layernorm.weight"])
        x = x + residual * np.stack([_feed_forward(p, h, config, token) for token in y])
    logits = norm(x, p["model.norm.weight"]) @ p["lm_head.weight"].T
    return np.stack(inputs), logits / config.get("logits_scaling", 1.0)


def _feed_forward(p, h, config, x):
    if h + "mlp.gate_proj.weight" in p:
        return gated(x, *(p[f"{h}mlp.{n}_proj.weight"] for n in ("gate", "up", "down")))
    if config["model_type"].startswith("granite"):
        return _granite(p, h, config, x)
    mixtral = config["model_type"] == "mixtral"
    at = h + ("block_sparse_moe." if mixtral else "mlp.")
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    router = p[at + "gate.weight"]
    experts = [[p[f"{at}experts.{e}.{n}.weight"] for n in names] for e in range(len(router))]
    normalised = mixtral or config["norm_topk_prob"]
    y = mixed(x, router, experts, config["num_experts_per_tok"], normalised)
    if at + "shared_expert_gate.weight" in p:
        (share,) = 1 / (1 + np.exp(-p[at + "shared_expert_gate.weight"] @ x))
        y = y + share * gated(x, *(p[f"{at}shared_expert.{n}.weight"] for n in names))
    return y


def _granite(p, h, config, x):
    def halves(into, out):
        return *np.split(into, 2), out

    at = h + "block_sparse_moe."
    stacks = p[at + "input_linear.weight"], p[at + "output_linear.weight"]
    experts = [halves(*expert) for expert in zip(*stacks, strict=True)]
    y = mixed(x, p[at + "router.layer.weight"], experts, config["num_experts_per_tok"], True)
    if h + "shared_mlp.input_linear.weight" in p:
        y = y + gated(
            x, *halves(*(p[f"{h}shared_mlp.{n}put_linear.weight"] for n in ("in", "out")))
        )
    return y
