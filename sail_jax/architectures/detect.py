"""The registry of known architectures, and the lookup by configuration."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from sail_jax.architectures import files, forward
from sail_jax.architectures.forward.inputs import Inputs, images, tokens
from sail_jax.architectures.table import Config, Rules
from sail_jax.checks import argument


class Architecture(NamedTuple):
    """A family of networks: its table, and its forward pass.

    Attributes:
      name: Its name in errors and reports.
      rules: A function from a configuration to its rules.
      outputs: A function `(params, config, inputs, see=...) -> outputs` of
        `sail_jax.architectures.forward`. It returns a dictionary of arrays, the main one first.
        None if the forward pass is unknown.
      inputs: A function `(config, rng) -> inputs` that draws random inputs for the network.
      causal: Whether the outputs at a token predict the next token.
    """

    name: str
    rules: Callable[[Config], Rules]
    outputs: Callable[..., dict[str, Any]] | None = None
    inputs: Inputs = tokens
    causal: bool = False

    @property
    def logits(self) -> Callable[..., Any] | None:
        """Returns the forward pass of the main output, or None if it is unknown."""
        run = self.outputs
        return run and (lambda *args, **kwargs: next(iter(run(*args, **kwargs).values())))


_BY_TYPE: dict[str, Architecture] = {}

# Granite and mixtures of experts have the forward pass of Llama, but names of their own.
_LIKE_LLAMA = ("mixtral", "qwen2_moe", "qwen3_moe", "granite", "granitemoe", "granitemoeshared")

# The forward passes of model types with a table in a file: their family, the forward pass, its
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
    """Registers a table under its name, the `model_type` of configurations.

    Args:
      *others: Further model types with the same table.
      outputs: See the attribute of `Architecture`.
      inputs: See the attribute of `Architecture`.
      causal: See the attribute of `Architecture`.

    Returns:
      A decorator of tables, which returns the table unchanged.
    """

    def register(rules: Callable[[Config], Rules]) -> Callable[[Config], Rules]:
        record = Architecture(rules.__name__, rules, outputs, inputs, causal)
        _BY_TYPE.update(dict.fromkeys((record.name, *others), record))
        return rules

    return register


def of(config: Config) -> Architecture:
    """Finds the architecture of a configuration.

    It reads the `model_type`, or else the first of the `architectures`. A type that is spelt almost
    like a known one is another architecture, so the function never guesses.

    Args:
      config: A configuration, as in a Hugging Face `config.json`.

    Returns:
      The architecture.

    Raises:
      ValueError: If the configuration contains neither entry, or an entry that is not text, or an
        unknown type; the message lists the known types.

    >>> of({"model_type": "mistral"}).name, of({"architectures": ["BertForMaskedLM"]}).name
    ('llama', 'bert')
    """
    name, classes = config.get("model_type"), config.get("architectures") or [""]
    if not isinstance(name, str | None):
        raise ValueError(f"the configuration's 'model_type' must be a text, got {name!r}")
    if not isinstance(classes, list | tuple) or not all(isinstance(c, str) for c in classes):
        raise ValueError(f"the configuration's 'architectures' must be texts, got {classes!r}")
    if name is None:
        # Class names begin with the model type and end with the model's purpose, as in
        # BertForMaskedLM.
        name = re.sub(r"(For\w+|LMHeadModel|Model)$", "", classes[0]).lower()
        # Only XLM-RoBERTa has a hyphen in its model type, which class names cannot contain.
        name = {"xlmroberta": "xlm-roberta"}.get(name, name)
    if not name:
        raise ValueError("the configuration has neither 'model_type' nor 'architectures'")
    if name in files.model_types():
        table = files.read(name)
        table.check(config)
        family, outputs, inputs, causal = _FORWARD.get(name, (name, None, tokens, False))
        return Architecture(family, table.rules, outputs, inputs, causal)
    if name not in _BY_TYPE:
        known = ", ".join([*_BY_TYPE, *files.model_types()])
        raise ValueError(
            f"no table for the architecture {name!r} (known: {known}): let the spaces be inferred "
            "(pip install 'sail-jax[torch]'), or draft a table "
            f"({argument('draft', 'True')}, or architectures.draft), answer its questions, and "
            f"pass it, {argument('rules', '...')}"
        )
    return _BY_TYPE[name]
