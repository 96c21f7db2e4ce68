"""The heads of Hugging Face networks: the axes of their tensors, and their computation.

A head reads the states of a body: its stream, or a pooled vector. There are few kinds of heads
(`labels`, `dense`, `words`, `vocabulary`, `pixels`), and `HEADS` lists the heads of each family.
Tables take the axes from there, and forward passes the computation.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from sail_jax.architectures.forward.layers import Tensors, activation, layer_norm, linear
from sail_jax.architectures.table import Config, flag, setting
from sail_jax.checks import one_of
from sail_jax.configurations import class_of


class States(NamedTuple):
    """The output of a network's body, which its heads read.

    Attributes:
      outputs: The outputs of a model without a head, by their names in transformers:
        "last_hidden_state", `(batch, time, width)`, first; then "pooler_output", `(batch, width)`,
        if there is a pooler.
      tokens: The tokens that determine which position a head reads, `(batch, time)`; None for
        images.
      table: The embedding table, `(vocab, width)`, for a head that is tied to it.
    """

    outputs: Mapping[str, Array]
    tokens: Int[Array | np.ndarray, "batch time"] | None = None
    table: Array | None = None

    @property
    def stream(self) -> Array:
        """Returns the last states of all positions, `(batch, time, width)`."""
        return self.outputs["last_hidden_state"]


Compute = Callable[[Tensors, Config, States], Array]
"""The computation of a head, or its input: the states of all positions, one, or a pooled vector."""


class Head(NamedTuple):
    """A head of a network.

    Attributes:
      weight: The tensor whose presence shows that the head is stored.
      axes: The axes string of each of its tensors by pattern. "?" in front marks tensors that may
        be missing although the head is stored.
      run: Computes its outputs from the tensors, the configuration and the states.
      about: A short description of its computation.
      output: The name of its outputs.
      classes: Suffixes of the names of the classes with this head; empty for any class. If two
        heads share a tensor, the first that matches the class is used.
      implied: Whether it may exist without a tensor, tied to the embedding table.
    """

    weight: str
    axes: Mapping[str, str]
    run: Compute
    about: str
    output: str = "logits"
    classes: tuple[str, ...] = ()
    implied: bool = False


def _everywhere(t: Tensors, config: Config, states: States) -> Array:
    """Reads each position of the stream."""
    return states.stream


def _first(t: Tensors, config: Config, states: States) -> Array:
    """Reads the first position."""
    return states.stream[:, 0]


def _patches(t: Tensors, config: Config, states: States) -> Array:
    """Reads the mean of all positions but the first."""
    return states.stream[:, 1:].mean(1)


def _pooled(t: Tensors, config: Config, states: States) -> Array:
    """Reads the pooler's output for the first position."""
    if "pooler_output" not in states.outputs:
        raise ValueError(
            "its head reads the pooler, but the tensor 'pooler.dense.weight' is missing"
        )
    return states.outputs["pooler_output"]


def _last(t: Tensors, config: Config, states: States) -> Array:
    """Reads the last position before padding, or the last position if there is no padding token."""
    pad = config.get("pad_token_id")
    if pad is None:
        return states.stream[:, -1]
    # For a row of only padding it is the first position, as in transformers.
    at = jnp.argmax(jnp.arange(states.stream.shape[1]) * (_tokens(states) != pad), axis=-1)
    return states.stream[jnp.arange(len(at)), at]


def _ended(t: Tensors, config: Config, states: States) -> Array:
    """Reads the position of the last end token, or the last position of a row without one."""
    # Some configurations list several end tokens.
    ends = jnp.isin(_tokens(states), jnp.asarray(config.get("eos_token_id", 1)))
    places = jnp.arange(ends.shape[1])
    at = jnp.where(ends.any(-1), jnp.max(places * ends, axis=-1), places[-1])
    # These states belong to the decoder, and these tokens to the encoder. Both have the same
    # length.
    return states.stream[jnp.arange(len(at)), at]


def _summary(t: Tensors, config: Config, states: States) -> Array:
    """Reads the position or the mean that GPT-2's `summary_type` selects."""
    kind = config.get("summary_type", "cls_index")
    if kind == "mean":
        return states.stream.mean(1)
    one_of("the configuration's 'summary_type'", kind, ("cls_index", "last", "first"))
    # If no position is given, "cls_index" is the last one.
    return states.stream[:, 0 if kind == "first" else -1]


_READS: Mapping[Compute, str] = {
    _everywhere: "each position",
    _first: "the first position",
    _patches: "the mean of all positions but the first",
    _pooled: "the pooler's output for the first position",
    _last: "the last position before padding",
    _ended: "the position of the last end token",
    _summary: "the position that `summary_type` selects",
}
"""The states that each function reads, for printed tables."""


def _tokens(states: States) -> Array:
    assert states.tokens is not None, "only heads for text read tokens"
    return jnp.asarray(states.tokens)


def _space(output: str) -> str:
    """Returns the space of a head's outputs, for heads without a vocabulary."""
    return "labels" if output == "logits" else output


def labels(
    name: str,
    read: Compute,
    *,
    reads: str = "resid",
    output: str = "logits",
    bias: bool = True,
    classes: tuple[str, ...] = (),
) -> Head:
    """Makes a head of one linear layer, `(label, width)`.

    Args:
      name: The name of the layer.
      read: The function that selects the states it reads.
      reads: The space of these states.
      output: The name of its outputs.
      bias: Whether it may have a bias.
      classes: See the attribute of `Head`.

    Returns:
      The head.
    """
    space = _space(output)
    axes = {f"{name}.weight": f"{space} {reads}*"} | ({f"?{name}.bias": space} if bias else {})
    return Head(
        f"{name}.weight",
        axes,
        lambda t, config, states: linear(t, name, read(t, config, states)),
        f"a linear layer of {_READS[read]}",
        output,
        classes,
    )


def dense(name: str, read: Compute) -> Head:
    """Makes a head of two linear layers, `dense` and `out_proj`, with a tanh between.

    Args:
      name: The prefix of the layers' names.
      read: The function that selects the states it reads.

    Returns:
      The head.
    """

    def run(t: Tensors, config: Config, states: States) -> Array:
        hidden = jnp.tanh(linear(t, f"{name}.dense", read(t, config, states)))
        return linear(t, f"{name}.out_proj", hidden)

    axes = {
        f"{name}.dense.weight": "pooled resid*",
        f"{name}.dense.bias": "pooled",
        f"{name}.out_proj.weight": "labels pooled*",
        f"{name}.out_proj.bias": "labels",
    }
    about = f"two linear layers with a tanh in between, of {_READS[read]}"
    return Head(f"{name}.out_proj.weight", axes, run, about)


def words(name: str, layer: str, norm: str, act: str | None = None) -> Head:
    """Makes the head for masked language models, which transforms the stream and then scores
    tokens.

    Args:
      name: The prefix of its tensors' names.
      layer: The name of the layer of the transform.
      norm: The name of its norm.
      act: The nonlinearity in between. None: from the configuration.

    Returns:
      The head. Without its own table it is tied to the embeddings.
    """

    def run(t: Tensors, config: Config, states: States) -> Array:
        head = t / name
        function = activation(act or config.get("hidden_act", "gelu"))
        y = function(linear(head, layer, states.stream))
        y = layer_norm(head, norm, y, config.get("layer_norm_eps", 1e-12))
        table = states.table
        if "decoder.weight" in head:
            table = head["decoder.weight"]
        # The bias has two names while the table is tied; untied, there are two biases.
        untied = not flag(config, "tie_word_embeddings", default=True) or "bias" not in head
        bias = head["decoder.bias" if untied and "decoder.bias" in head else "bias"]
        return y @ jnp.asarray(table).T + bias

    axes = {
        f"{name}{layer}.weight": "resid resid*",
        f"{name}{layer}.bias": "resid",
        f"{name}{norm}.weight": "diag(resid)",
        f"{name}{norm}.bias": "resid",
        f"?{name}decoder.weight": "vocab resid*",
        f"?{name}{{bias,decoder.bias}}": "vocab",
    }
    return Head(f"{name}{layer}.weight", axes, run, "masked words")


def vocabulary(scale: Callable[[Config], float] = lambda _: 1.0) -> Head:
    """Makes the head `lm_head`, which scores tokens from the stream.

    Tables contain its axes themselves, since it is required unless it is tied.

    `scale` computes the factor on the stream from the configuration. Returns the head. Without its
    own tensor it is tied to the embedding table.
    """

    def run(t: Tensors, config: Config, states: States) -> Array:
        own = "lm_head.weight" in t
        table = t["lm_head.weight"] if own else jnp.asarray(states.table)
        return states.stream * scale(config) @ table.T

    return Head("lm_head.weight", {}, run, "words", implied=True)


def pixels(name: str) -> Head:
    """Makes the head that predicts a square of pixels from each patch.

    Args:
      name: The name of its layer, a convolution with a kernel of one pixel.

    Returns:
      The head. Its outputs are images, `(batch, channel, y, x)`.
    """

    def run(t: Tensors, config: Config, states: States) -> Array:
        x = states.stream[:, 1:] @ t[f"{name}.weight"][:, :, 0, 0].T + t[f"{name}.bias"]
        rows, stride = math.isqrt(x.shape[1]), config.get("encoder_stride", 16)
        if rows**2 != x.shape[1] or not stride or x.shape[-1] % stride**2:
            raise ValueError(
                f"{x.shape[1]} patches of {x.shape[-1]} numbers do not form a square of squares "
                f"with {stride} x {stride} pixels, the configuration's 'encoder_stride'"
            )
        # Outputs are numbered by (channel, y, x) within the square of a patch.
        x = x.reshape(len(x), rows, rows, -1, stride, stride)
        return jnp.transpose(x, (0, 3, 1, 4, 2, 5)).reshape(len(x), -1, *[rows * stride] * 2)

    output = "reconstruction"
    axes = {f"{name}.weight": f"{_space(output)} resid* _ _", f"{name}.bias": _space(output)}
    return Head(f"{name}.weight", axes, run, "the pixels of each patch", output)


def _choices(t: Tensors, config: Config, states: States) -> Array:
    """Runs GPT-2's second head, which returns one number per text."""
    y = linear(t, "multiple_choice_head.summary", _summary(t, config, states))
    kind = config.get("summary_activation")
    return (activation(kind)(y) if kind else y)[..., 0]


def _t5_scale(config: Config) -> float:
    """Returns the factor on the decoder's states under the tied head of T5's first release."""
    # A tied head has the scale of embeddings, which is too large for logits by a factor of
    # sqrt(width). Newer configurations may claim tied heads incorrectly, and have a separate entry
    # for the scale.
    scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
    return config["d_model"] ** -0.5 if scaled else 1.0


_TOKENS = ("ForTokenClassification",)

_BERT = (
    labels("classifier", _everywhere, classes=_TOKENS),
    labels("classifier", _pooled, reads="pooled"),
    labels("qa_outputs", _everywhere),
)


def _granite_scale(config: Config) -> float:
    """Returns the factor on Granite's logits; the configuration has its inverse."""
    return 1 / setting(config, "logits_scaling", default=1.0)


HEADS: Mapping[str, tuple[Head, ...]] = {
    "gpt2": (
        vocabulary(),
        labels("score", _last, bias=False),
        labels("classifier", _everywhere),
        labels("qa_outputs", _everywhere),
        labels("multiple_choice_head.summary", _summary, output="mc_logits")._replace(run=_choices),
    ),
    "llama": (
        vocabulary(),
        labels("score", _everywhere, classes=_TOKENS),
        labels("score", _last, bias=False),
        labels("qa_outputs", _everywhere),
    ),
    "granite": (vocabulary(_granite_scale),),
    "bert": (
        words("cls.predictions.", "transform.dense", "transform.LayerNorm"),
        *_BERT,
        labels("cls.seq_relationship", _pooled, reads="pooled", output="seq_relationship_logits"),
    ),
    "roberta": (
        words("lm_head.", "dense", "layer_norm", "gelu"),
        dense("classifier", _first),
        *_BERT,
    ),
    "t5": (
        vocabulary(_t5_scale),
        dense("classification_head", _ended),
        labels("classifier", _everywhere),
        labels("qa_outputs", _everywhere),
    ),
    "vit": (labels("classifier", _first), pixels("decoder.0")),
    "clip": (labels("classifier", _patches, reads="vision.resid"),),
}
"""The heads of each family. Of two with one tensor, the first that fits the class is used."""

LABELS: Mapping[str, str] = {
    _space(head.output): "outer" for known in HEADS.values() for head in known
}
"""The spaces of heads' outputs, for tables."""

# Suffixes of the names of classes with heads that do not score tokens.
_OTHER_TASKS = (
    *("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
    *("ForMultipleChoice", "ForNextSentencePrediction"),
)


def is_base(config: Config) -> bool:
    """Checks whether a configuration's class has no head."""
    name = class_of(config)
    return name.endswith("Model") and not name.endswith(("LMHeadModel", "DoubleHeadsModel"))


def has_vocabulary(config: Config) -> bool:
    """Checks whether a language model scores tokens. Without a class, this is assumed.

    Args:
      config: The configuration.

    Returns:
      Whether its class has a head that scores tokens.
    """
    return not is_base(config) and not class_of(config).endswith(_OTHER_TASKS)


def heads(family: str, config: Config) -> tuple[Head, ...]:
    """Lists the heads that a network of a family may have.

    Args:
      family: The family, a key of `HEADS`.
      config: The configuration, which contains the class.

    Returns:
      The heads, one per identifying tensor.
    """
    out: dict[str, Head] = {}
    for head in HEADS[family]:
        if not head.classes or class_of(config).endswith(head.classes):
            out.setdefault(head.weight, head)
    return tuple(out.values())


def head_axes(family: str, config: Config) -> dict[str, str]:
    """Gives the rules of the heads of a family. All of them are optional.

    Args:
      family: The family, a key of `HEADS`.
      config: The configuration.

    Returns:
      Axes strings by pattern, as `table.pairs` takes them.
    """
    rules = {name: text for head in heads(family, config) for name, text in head.axes.items()}
    return {f"?{name.removeprefix('?')}": text for name, text in rules.items()}


def ends(family: str, config: Config, resid: str = "resid") -> dict[str, tuple[str, ...]]:
    """Lists the heads that make the states of a body internal to the network.

    Args:
      family: The family, a key of `HEADS`.
      config: The configuration.
      resid: The space of the stream.

    Returns:
      The tensors of the heads that read the stream, and of those that read the pooled vector.
      Without any of them the states are outputs. Empty if a tied head, which has no tensor, reads
      them.
    """
    known = heads(family, config)
    if has_vocabulary(config) and any(head.implied for head in known):
        return {}
    pooled = (h.weight for h in known if h.axes.get(h.weight, "").endswith(" pooled*"))
    return {resid: tuple(head.weight for head in known), "pooled": tuple(pooled)}


def readers(family: str, config: Config, tied: bool) -> tuple[str, ...]:
    """Lists the tensors of heads that read the stream's last norm.

    Args:
      family: The family, a key of `HEADS`.
      config: The configuration.
      tied: Whether the embedding table reads it as well. The other heads are then not listed, since
        the norm must not be folded into them alone.

    Returns:
      Their patterns.
    """
    others = (n for n, text in head_axes(family, config).items() if text.endswith(" resid*"))
    return "lm_head.weight", *(() if tied else (name.removeprefix("?") for name in others))


def outputs(family: str, t: Tensors, config: Config, states: States) -> dict[str, Array]:
    """Computes the outputs of a network: the outputs of its heads, or else its states.

    Args:
      family: The family, a key of `HEADS`.
      t: All tensors of the network.
      config: The configuration.
      states: The states of its body.

    Returns:
      The outputs by name, the main one first.

    Raises:
      ValueError: If the class has a head but none is stored, or a tensor is missing.
    """
    known, name = heads(family, config), class_of(config)
    stored = [head for head in known if head.weight in t]
    # A tied head has no tensor. A network without a class is assumed to have a tied head, unless
    # another head is stored.
    if has_vocabulary(config) and (name or not stored):
        stored = [head for head in known if head in stored or head.implied]
    if not stored and name and not is_base(config):
        raise ValueError(
            f"the configuration has the class {name!r}, but the checkpoint has none of the known "
            f"heads: {', '.join(head.weight for head in known)}"
        )
    out: dict[str, Array] = {}
    for head in stored:
        key = head.weight if head.output in out else head.output
        out[key] = head.run(t, config, states)
    return out or dict(states.outputs)
