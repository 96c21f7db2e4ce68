"""Tables for the parameter trees of Flax modules, such as those of `experiments.models`.

Kernels are `(..., in, out)`. A tree may begin with its collections ("params/...") or inside one.
"""

from sail_jax.architectures import forward
from sail_jax.architectures.detect import architecture
from sail_jax.architectures.forward.inputs import vectors
from sail_jax.architectures.table import Config, Rules, count, divided, flag, pairs, setting
from sail_jax.checks import one_of


@architecture()
def flax_mlp(config: Config) -> Rules:
    """Gives the rules of an MLP with layers `hidden_0, hidden_1, ..., out` of ReLU units.

    Args:
      config: A configuration with `widths`, a list of the sizes of the hidden layers.

    Returns:
      The rules.

    Raises:
      ValueError: If `widths` is missing or not a list.

    >>> import numpy as np
    >>> net = {"hidden_0": {"kernel": np.zeros((3, 8)), "bias": np.zeros(8)}}
    >>> net["out"] = {"kernel": np.zeros((8, 2)), "bias": np.zeros(2)}
    >>> print(flax_mlp({"widths": [8]}).spec(net))
    space     size  nonlinearity  writers                          readers          gains
    hidden.0  8     relu          hidden_0/bias, hidden_0/kernel   out/kernel       -
    inputs    3     outer         -                                hidden_0/kernel  -
    outputs   2     outer         out/bias, out/kernel             -                -
    """
    return _mlp(config, "**hidden_#/", "**out/")


@architecture(outputs=forward.mlp, inputs=vectors)
def mlp(config: Config) -> Rules:
    """Gives the rules of the same MLP in a flat checkpoint.

    Its tensors are `layers.0.kernel, layers.0.bias, ..., out.kernel, out.bias`.

    Args:
      config: A configuration with `widths`, a list of the sizes of the hidden layers.

    Returns:
      The rules.

    Raises:
      ValueError: If `widths` is missing or not a list.
    """
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
    """Gives the rules of a ResNet with BatchNorm, its running statistics in `batch_stats`.

    Each stage is one space. The first block of every stage but the first projects into it. A
    running variance is a gain: it stays with its unit, without sign or scale.

    Args:
      config: A configuration with `widths`, one for each stage, and `blocks`, the number of blocks
        of each stage (one number or a list). It may have `inner`, the widths inside the blocks.

    Returns:
      The rules.

    Raises:
      ValueError: If an entry is missing, has the wrong type, or does not cover every stage.
    """
    stages, listed = len(_widths(config)), setting(config, "blocks")
    per_stage = isinstance(listed, list | tuple)
    if per_stage and len(listed) != stages:
        raise ValueError(f"the configuration's 'blocks' must list {stages} stages, got {listed!r}")
    blocks = [count({"blocks": n}, "blocks") for n in (listed if per_stage else [listed] * stages)]
    table = {"**stem/kernel": "_ _ image* stage.0", **_batchnorm("**stem_bn", "stage.0")}
    for s in range(stages):
        for b in range(blocks[s]):
            # The first block of a stage reads the previous stage and projects it.
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
    """Returns the entry `widths` of a configuration, checked to be a list."""
    widths = setting(config, "widths")
    if not isinstance(widths, list | tuple):
        raise ValueError(f"the configuration's 'widths' must be a list of sizes, got {widths!r}")
    return widths


@architecture()
def flax_gpt(config: Config) -> Rules:
    """Gives the rules of a decoder of pre-norm blocks.

    Args:
      config: A configuration. `tied` states whether the embeddings are also the output's table
        (default: false).

    Returns:
      The rules.

    Raises:
      ValueError: If `tied` is not true or false.
    """
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
    """Gives the rules of a decoder with RMSNorm, SwiGLU and rotary positions.

    Rotary positions distinguish the units of a query, so these cannot be permuted.

    Args:
      config: A configuration with `heads` and `head_dim`. It may have `kv_heads` (each serves a
        group of queries), `tied`, and `norm`: "rmsnorm" (the default), or "layernorm" without
        parameters.

    Returns:
      The rules.

    Raises:
      ValueError: If an entry is missing or has the wrong type, or `kv_heads` do not divide `heads`.
    """
    tied, norm = flag(config, "tied", default=False), setting(config, "norm", default="rmsnorm")
    one_of("the configuration's 'norm'", norm, ("rmsnorm", "layernorm"))
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
    """Gives the rules of a vision transformer that classifies the mean of its last norm.

    Args:
      config: A configuration; the rules do not depend on it.

    Returns:
      The rules.
    """
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
    """Gives the rules of a diffusion transformer with conditional norms (SiT).

    Its norms have no parameters. Their shifts, scales and gates are read, layer by layer, from one
    condition of time and class. A gate or a scale multiplies the stream unit by unit, so the stream
    is "odd" in addition to "layernorm": units of it may not become averages of others. The
    condition is read through a nonlinearity.

    Args:
      config: A configuration with `width`.

    Returns:
      The rules.

    Raises:
      ValueError: If `width` is missing.
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
    """Makes the rules of the transformer blocks and of the last norm."""
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
    """Makes the rules of one BatchNorm; its running statistics are optional."""
    return {
        f"{path}/scale": f"diag({space})",
        f"{path}/bias": space,
        f"?{path}/mean": space,
        f"?{path}/var": f"diag({space})",
    }


def _with(table: dict[str, str], spaces: dict[str, str]):
    """Converts a table to the first arguments of `Rules`."""
    # The empty mapping is for sizes of spaces. These trees determine them: a kernel has one axis
    # for heads and one for their units. Llama's kernels fuse the two, so its table states the
    # sizes.
    axes, optional = pairs(table)
    return axes, spaces, {}, optional
