"""Tables for the parameter trees of Flax modules, as `experiments.models` has them.

Kernels are [..., in, out]; a tree may start at its collections ("params/...") or inside one.
"""

from sail_jax.architectures import forward
from sail_jax.architectures.detect import architecture
from sail_jax.architectures.forward.inputs import vectors
from sail_jax.architectures.table import Config, Rules, count, divided, flag, pairs, setting

__all__ = ["flax_gpt", "flax_llama", "flax_mlp", "flax_resnet", "flax_sit", "flax_vit", "mlp"]


@architecture()
def flax_mlp(config: Config) -> Rules:
    """Layers `hidden_0, hidden_1, ..., out` of ReLU units; `config` has their `widths`."""
    return _mlp(config, "**hidden_#/", "**out/")


@architecture(logits=forward.mlp, inputs=vectors)
def mlp(config: Config) -> Rules:
    """The same in a flat checkpoint: `layers.0.kernel, layers.0.bias, ..., out.kernel`."""
    return _mlp(config, "layers.#.", "out.")


def _mlp(config: Config, layer: str, last: str) -> Rules:
    n = len(_widths(config))
    reads = ["inputs", *(f"hidden.{k}" for k in range(n))]
    table = {f"{layer}kernel".replace("#", str(k)): f"{reads[k]}* hidden.{k}" for k in range(n)}
    if n:
        table[f"{layer}bias".replace("#", "{k}")] = "hidden.{k}"
    table |= {f"{last}kernel": f"{reads[n]}* outputs", f"{last}bias": "outputs"}
    settings = tuple((f"widths.{k}", f"hidden.{k}") for k in range(n))
    spaces = {"inputs": "outer", "outputs": "outer", "hidden.{k}": "relu"}
    layers = {"widths": layer.replace("#", "{i}")}
    return Rules(*_with(table, spaces), settings=settings, layers=layers)


@architecture()
def flax_resnet(config: Config) -> Rules:
    """A ResNet with BatchNorm, its running statistics in `batch_stats`; `config` has `widths`,
    one per stage, `blocks` of each stage or a list of them by stage, and may have `inner`, the
    widths inside the blocks. A stage is one space; its first block projects.

    A running variance is a gain: it stays beside its unit, with neither sign nor scale.
    """
    stages, listed = len(_widths(config)), setting(config, "blocks")
    per_stage = isinstance(listed, list | tuple)
    if per_stage and len(listed) != stages:
        raise ValueError(f"the configuration's 'blocks' must name {stages} stages, got {listed!r}")
    blocks = [count({"blocks": n}, "blocks") for n in (listed if per_stage else [listed] * stages)]
    table = {"**stem/kernel": "_ _ image* stage.0", **_batchnorm("**stem_bn", "stage.0")}
    for s in range(stages):
        for b in range(blocks[s]):
            x, source = f"**stage{s}_block{b}/", f"stage.{s - (s > 0 and b == 0)}"
            hidden, out = f"hidden.{s}.{b}", f"stage.{s}"
            table[f"{x}conv1/kernel"] = f"_ _ {source}* {hidden}"
            table[f"{x}conv2/kernel"] = f"_ _ {hidden}* {out}"
            table |= _batchnorm(f"{x}bn1", hidden) | _batchnorm(f"{x}bn2", out)
            if s and not b:
                table[f"{x}proj/kernel"] = f"_ _ {source}* {out}"
                table |= _batchnorm(f"{x}proj_bn", out)
    table |= {"**head/kernel": f"stage.{stages - 1}* labels", "**head/bias": "labels"}
    spaces = {"image": "outer", "labels": "outer"}
    words = {w for text in table.values() for w in text.replace("*", "").split()}
    spaces |= {w: "elementwise" for w in sorted(words) if w.startswith(("stage", "hidden"))}
    settings = tuple((f"widths.{s}", f"stage.{s}") for s in range(stages))
    settings += tuple((f"inner.{s}", f"hidden.{s}.{{b}}") for s in range(stages))
    layers = {"blocks": "**stage{s}_block{i}/"}
    if per_stage:
        layers = {f"blocks.{s}": f"**stage{s}_block{{i}}/" for s in range(stages)}
    return Rules(*_with(table, spaces), settings=settings, layers=layers)


def _widths(config: Config) -> list[int] | tuple[int, ...]:
    widths = setting(config, "widths")
    if not isinstance(widths, list | tuple):
        raise ValueError(f"the configuration's 'widths' must be a list of sizes, got {widths!r}")
    return widths


@architecture()
def flax_gpt(config: Config) -> Rules:
    """A decoder of pre-norm blocks; `config` has `tied`, false where not stated."""
    tied = flag(config, "tied", default=False)
    table = {
        "**token_embed/embedding": "vocab* resid | vocab resid*" if tied else "vocab* resid",
        "**position_embed": "_ resid",
        **_blocks(),
    }
    if not tied:
        table["**unembed/kernel"] = "resid* vocab"
    return Rules(*_with(table, _SPACES | {"vocab": "outer"}), settings=_SETTINGS, layers=_LAYERS)


@architecture()
def flax_llama(config: Config) -> Rules:
    """A decoder of RMSNorm, SwiGLU and rotary positions, whose units are told apart; `config` has
    `heads` and `head_dim`, and may have `kv_heads` (each serving a group of queries), `tied`, and
    `norm`: "rmsnorm", or "layernorm" without parameters."""
    tied, norm = flag(config, "tied", default=False), setting(config, "norm", default="rmsnorm")
    if norm not in ("rmsnorm", "layernorm"):
        raise ValueError(
            f"the configuration's 'norm' must be 'rmsnorm' or 'layernorm', got {norm!r}"
        )
    heads = count(config, "heads")
    shared = count(config, "kv_heads", default=heads)
    group = divided(heads, shared, "kv_heads among heads")
    size = count(config, "head_dim")
    x = "**block_{i}/"
    table = {
        "**token_embed/embedding": "vocab* resid | vocab resid*" if tied else "vocab* resid",
        f"{x}q/kernel": "resid* (head.{i} group.{i} qk.{i})",
        f"{x}k/kernel": "resid* (head.{i} qk.{i}*)",
        f"{x}v/kernel": "resid* (head.{i} v.{i})",
        f"{x}o/kernel": "(head.{i} group.{i} v.{i})* resid",
        f"{x}{{gate,up}}/kernel": "resid* hidden.{i}",
        f"{x}down/kernel": "hidden.{i}* resid",
    }
    if norm == "rmsnorm":
        table |= {f"{x}norm_{{1,2}}/scale": "diag(resid)", "**norm/scale": "diag(resid)"}
    if not tied:
        table["**unembed/kernel"] = "resid* vocab"
    own = {"resid": norm, "group.{i}": "elementwise", "qk.{i}": "outer", "vocab": "outer"}
    settings = [(k, v) for k, v in _SETTINGS if k != "heads"]
    settings += [("kv_heads", "head.{i}"), ("heads", "head.{i} group.{i}")]
    return Rules(
        *_with(table, _SPACES | own)[:2],
        {"head.{i}": shared, "group.{i}": group, "qk.{i}": size, "v.{i}": size},
        settings=tuple(settings),
        layers=_LAYERS,
    )


@architecture()
def flax_vit(config: Config) -> Rules:
    """A vision transformer: convolved patches, the mean of the last norm classified."""
    table = {
        "**patch_embed/kernel": "_ _ _ resid",
        "**patch_embed/bias": "resid",
        "**position_embed": "_ resid",
        **_blocks(),
        "**head/kernel": "resid* labels",
        "**head/bias": "labels",
    }
    return Rules(*_with(table, _SPACES | {"labels": "outer"}), settings=_SETTINGS, layers=_LAYERS)


@architecture()
def flax_sit(config: Config) -> Rules:
    """A diffusion transformer whose norms have no parameters of their own: shifts, scales and gates
    are read, layer by layer, from one condition of time and class.

    A gate or a scale multiplies the stream unit by unit, so that no unit of that is an average of
    others ("odd"); the condition is read through a nonlinearity.
    """
    setting(config, "width")
    table = {
        "**patch_embed/kernel": "_ _ channel* resid",
        "**patch_embed/bias": "resid",
        "**position_embed": "_ resid",
        "**time_in/kernel": "frequency* time",
        "**time_in/bias": "time",
        "**time_out/kernel": "time* cond",
        "**time_out/bias": "cond",
        "**label_embed/embedding": "label* cond",
        **{p: a for p, a in _blocks().items() if "ln" not in p},
        "**block_{i}/ada/kernel": "cond* _ resid",
        "**block_{i}/ada/bias": "_ resid",
        "**ada_out/kernel": "cond* _ resid",
        "**ada_out/bias": "_ resid",
        "**head/kernel": "resid* velocity",
        "**head/bias": "velocity",
    }
    own = dict.fromkeys(("channel", "frequency", "label", "velocity"), "outer")
    own |= {"resid": "layernorm odd", "cond": "elementwise", "time": "elementwise"}
    settings = (*_SETTINGS, ("width", "cond"), ("width", "time"))
    return Rules(*_with(table, _SPACES | own), settings=settings, layers=_LAYERS)


_SPACES = {
    "resid": "layernorm",
    "head.{i}": "odd",
    "qk.{i}": "dot",
    "v.{i}": "linear",
    "hidden.{i}": "elementwise",
}


_SETTINGS = (
    ("width", "resid"),
    ("heads", "head.{i}"),
    ("head_dim", "qk.{i}"),
    ("head_dim", "v.{i}"),
    ("hidden", "hidden.{i}"),
)
_LAYERS = {"layers": "**block_{i}/"}


def _blocks() -> dict[str, str]:
    x = "**block_{i}/"
    return {
        f"{x}ln_{{1,2}}/scale": "diag(resid)",
        f"{x}ln_{{1,2}}/bias": "resid",
        f"{x}q/kernel": "resid* head.{i} qk.{i}",
        f"{x}q/bias": "head.{i} qk.{i}",
        f"{x}k/kernel": "resid* head.{i} qk.{i}*",
        f"{x}k/bias": "head.{i} qk.{i}*",
        f"{x}v/kernel": "resid* head.{i} v.{i}",
        f"{x}v/bias": "head.{i} v.{i}",
        f"{x}o/kernel": "head.{i}* v.{i}* resid",
        f"{x}o/bias": "resid",
        f"{x}in/kernel": "resid* hidden.{i}",
        f"{x}in/bias": "hidden.{i}",
        f"{x}out/kernel": "hidden.{i}* resid",
        f"{x}out/bias": "resid",
        "**ln/scale": "diag(resid)",
        "**ln/bias": "resid",
    }


def _batchnorm(path: str, space: str) -> dict[str, str]:
    return {
        f"{path}/scale": f"diag({space})",
        f"{path}/bias": space,
        f"?{path}/mean": space,
        f"?{path}/var": f"diag({space})",
    }


def _with(table: dict[str, str], spaces: dict[str, str]):
    axes, optional = pairs(table)
    return axes, spaces, {}, optional
