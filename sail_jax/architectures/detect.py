"""The known architectures, and which of them a configuration asks for."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from sail_jax.architectures.forward.inputs import Inputs, tokens
from sail_jax.architectures.table import Config, Rules

__all__ = ["Architecture", "architecture", "of"]


class Architecture(NamedTuple):
    """A family of networks.

    Attributes:
      name: What errors and reports call it.
      rules: Its table at a configuration.
      logits: `logits(params, config, inputs)`, None where no forward pass is known.
      inputs: `inputs(config, rng)`, random inputs to run it on.
      causal: Whether outputs at a token predict the next.
    """

    name: str
    rules: Callable[[Config], Rules]
    logits: Callable[[Any, Config, Any], Any] | None = None
    inputs: Inputs = tokens
    causal: bool = False


_BY_TYPE: dict[str, Architecture] = {}


def architecture(
    *others: str,
    logits: Callable[[Any, Config, Any], Any] | None = None,
    inputs: Inputs = tokens,
    causal: bool = False,
) -> Callable[[Callable[[Config], Rules]], Callable[[Config], Rules]]:
    """Registers a table under its name, which configurations call their `model_type`.

    Args:
      others: Further model types that have the same table.
      logits: As of `Architecture`, like `inputs` and `causal`.
    """

    def register(rules: Callable[[Config], Rules]) -> Callable[[Config], Rules]:
        record = Architecture(rules.__name__, rules, logits, inputs, causal)
        _BY_TYPE.update(dict.fromkeys((record.name, *others), record))
        return rules

    return register


def of(config: Config) -> Architecture:
    """The family of a configuration, by its `model_type`, or else by its `architectures`.

    Raises ValueError, naming the known types, if there is none: a type that is nearly spelt like
    one of them is another architecture.

    >>> of({"model_type": "mistral"}).name, of({"architectures": ["BertForMaskedLM"]}).name
    ('llama', 'bert')
    """
    name, classes = config.get("model_type"), config.get("architectures") or [""]
    if not isinstance(name, str | None):
        raise ValueError(f"the configuration's 'model_type' must be a text, got {name!r}")
    if not isinstance(classes, list | tuple) or not all(isinstance(c, str) for c in classes):
        raise ValueError(f"the configuration's 'architectures' must be texts, got {classes!r}")
    if name is None:
        name = re.sub(r"(For\w+|LMHeadModel|Model)$", "", classes[0]).lower()
        name = {"xlmroberta": "xlm-roberta"}.get(name, name)
    if not name:
        raise ValueError("the configuration states neither 'model_type' nor 'architectures'")
    if name not in _BY_TYPE:
        raise ValueError(
            f"no table for the architecture {name!r} (known: {', '.join(_BY_TYPE)}): draft "
            "one (draft=True, or architectures.draft), answer what it asks, and give it, rules=..."
        )
    return _BY_TYPE[name]
