"""The registry of known architectures, and which of them a configuration asks for."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from sail_jax.architectures import files, forward
from sail_jax.architectures.forward.inputs import Inputs, images, tokens
from sail_jax.architectures.table import Config, Rules
from sail_jax.checks import argument


class Architecture(NamedTuple):
    """A family of networks: its table, and how to run it.

    Attributes:
      name: What errors and reports call it.
      rules: A function from a configuration to its rules.
      outputs: A function `(params, config, inputs, see=...) -> outputs` of
        `sail_jax.architectures.forward`, which returns a dictionary of arrays, the main one first;
        None where no forward pass is known.
      inputs: A function `(config, rng) -> inputs` that draws random inputs to run the network on.
      causal: Whether the outputs at a token predict the next token.
    """

    name: str
    rules: Callable[[Config], Rules]
    outputs: Callable[..., dict[str, Any]] | None = None
    inputs: Inputs = tokens
    causal: bool = False

    @property
    def logits(self) -> Callable[..., Any] | None:
        """The forward pass that returns the main output alone; None where none is known."""
        run = self.outputs
        return run and (lambda *args, **kwargs: next(iter(run(*args, **kwargs).values())))


_BY_TYPE: dict[str, Architecture] = {}

# Granite and mixtures of experts have the forward pass of Llama, and names of their own.
_LIKE_LLAMA = ("mixtral", "qwen2_moe", "qwen3_moe", "granite", "granitemoe", "granitemoeshared")

# The forward passes of model types that have a table in a file: their family, what runs it, its
# inputs, and whether a token's outputs predict the next.
_FORWARD: dict[str, tuple[str, Callable[..., dict[str, Any]], Inputs, bool]] = {
    "gpt2": ("gpt2", forward.gpt2, tokens, True),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ("llama", forward.llama, tokens, True)),
    **{name: (name, forward.llama, tokens, True) for name in _LIKE_LLAMA},
    "bert": ("bert", forward.bert, tokens, False),
    **dict.fromkeys(("roberta", "xlm-roberta"), ("roberta", forward.roberta, tokens, False)),
    "vit": ("vit", forward.vit, images, False),
}


def architecture(
    *others: str,
    outputs: Callable[..., dict[str, Any]] | None = None,
    inputs: Inputs = tokens,
    causal: bool = False,
) -> Callable[[Callable[[Config], Rules]], Callable[[Config], Rules]]:
    """Registers a table under its name, which configurations call their `model_type`.

    Args:
      *others: Further model types that have the same table.
      outputs: As the attribute of `Architecture`.
      inputs: As the attribute of `Architecture`.
      causal: As the attribute of `Architecture`.

    Returns:
      A decorator of tables, which returns the table as it is.
    """

    def register(rules: Callable[[Config], Rules]) -> Callable[[Config], Rules]:
        record = Architecture(rules.__name__, rules, outputs, inputs, causal)
        _BY_TYPE.update(dict.fromkeys((record.name, *others), record))
        return rules

    return register


def of(config: Config) -> Architecture:
    """Finds the architecture that a configuration asks for.

    It goes by the `model_type`, or else by the first of the `architectures`. A type that is spelt
    nearly like a known one is another architecture, so no guess is made.

    Args:
      config: A configuration, as in a `config.json` of Hugging Face.

    Returns:
      The architecture.

    Raises:
      ValueError: If the configuration states neither entry, or one that is not text, or a type that
        is not known; the message lists the known ones.

    >>> of({"model_type": "mistral"}).name, of({"architectures": ["BertForMaskedLM"]}).name
    ('llama', 'bert')
    """
    name, classes = config.get("model_type"), config.get("architectures") or [""]
    if not isinstance(name, str | None):
        raise ValueError(f"the configuration's 'model_type' must be a text, got {name!r}")
    if not isinstance(classes, list | tuple) or not all(isinstance(c, str) for c in classes):
        raise ValueError(f"the configuration's 'architectures' must be texts, got {classes!r}")
    if name is None:
        # Names of classes begin with the model type and end with what the model is for, as in
        # BertForMaskedLM.
        name = re.sub(r"(For\w+|LMHeadModel|Model)$", "", classes[0]).lower()
        # XLM-RoBERTa alone has a hyphen in its model type, which class names cannot have.
        name = {"xlmroberta": "xlm-roberta"}.get(name, name)
    if not name:
        raise ValueError("the configuration states neither 'model_type' nor 'architectures'")
    if name in files.model_types():
        table = files.read(name)
        table.check(config)
        family, outputs, inputs, causal = _FORWARD.get(name, (name, None, tokens, False))
        return Architecture(family, table.rules, outputs, inputs, causal)
    if name not in _BY_TYPE:
        known = ", ".join([*_BY_TYPE, *files.model_types()])
        raise ValueError(
            f"no table for the architecture {name!r} (known: {known}): let its "
            "spaces be inferred (pip install 'sail-jax[torch]'), or draft a table "
            f"({argument('draft', 'True')}, or architectures.draft), answer what it asks, and give "
            f"it, {argument('rules', '...')}"
        )
    return _BY_TYPE[name]
