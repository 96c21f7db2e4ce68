"""Reads mergekit-moe's files, which say what mixture of experts is made of which networks.

The grammar is mergekit's. Further, `gate_mode` may be zero, a file may have a `seed`, an expert may
`drop` a fraction of its hidden units, which are drawn anew, and a prompt may be a list of tokens.

base_model: path              # has all but the experts
gate_mode: hidden             # or hidden_avg, cheap_embed, random, uniform_random, zero
experts_per_token: 2
dtype: bfloat16               # by default each tensor keeps its own
architecture: mixtral         # by default the first that is made of such networks
shared_experts: []            # one for mixtures that have such, as an expert below
seed: 0                       # of all that is drawn
experts:
- source_model: path
  positive_prompts: [text, [1, 17, 4]]
  negative_prompts: []
  noise_scale: 0.01
  residual_scale: 1.0
  drop: 0.5
"""

import json
from collections.abc import Sequence
from os import PathLike, fspath
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from sail_jax.checkpoint.recipe.declared import Placed, kind, read
from sail_jax.checkpoint.recipe.parts import Document, Dtype, Ref, Reference
from sail_jax.checkpoint.recipe.settings import Integer, Natural, Number
from sail_jax.checkpoint.recipe.yaml_tree import RecipeError, Where, compose
from sail_jax.growth.routers import Drawn, Read

Mode = Read | Drawn
PROMPTED = ("hidden", "hidden_avg", "hidden_last", "cheap_embed")
"""The modes that are made of prompts."""


def _prompt(given: object) -> str | tuple[int, ...]:
    """Reads a prompt: text, or a list of tokens."""
    if isinstance(given, str) and given:
        return given
    tokens = given if isinstance(given, list) else []
    if tokens and all(type(token) is int and 0 <= token < 1 << 31 for token in tokens):
        return tuple(tokens)
    raise ValueError(f"expected a text or a list of tokens, numbers from 0; got {kind(given)}")


Prompt = Annotated[Any, BeforeValidator(_prompt)]
Scale = Annotated[Number, Field(ge=0, lt=1e6)]
Share = Annotated[Number, Field(ge=0, le=1)]


class Expert(Placed):
    """An expert, as a file has it.

    Attributes:
      source_model: The network that has its feed-forward parts.
      positive_prompts: Prompts that it should answer.
      negative_prompts: Prompts that others should answer.
      noise_scale: The standard deviation of noise that is added to its weights.
      residual_scale: What its last layer is multiplied by.
      drop: The fraction of its hidden units that is drawn anew.
      where: Its place in the file.
    """

    source_model: Reference
    positive_prompts: tuple[Prompt, ...] = ()
    negative_prompts: tuple[Prompt, ...] = ()
    noise_scale: Scale = 0.0
    residual_scale: Number = 1.0
    drop: Share = 0.0


class Mixture(Placed):
    """A mixture of experts, as a file has it.

    Attributes:
      base_model: The network that has everything but the experts.
      experts: The experts, in order.
      gate_mode: What the routers are made of.
      dtype: The dtype that is written; None for the one of each tensor.
      experts_per_token: How many experts each token uses.
      shared_experts: An expert that every token uses, for mixtures that have one.
      architecture: What the mixture is called; None for the first that fits.
      seed: The seed of all that is drawn.
      where: Its place in the file.
      text: The file; "" if it was made in Python.
    """

    base_model: Reference
    experts: tuple[Expert, ...] = Field(min_length=1)
    gate_mode: Mode = "hidden"
    dtype: Dtype | None = None
    experts_per_token: Annotated[Integer, Field(ge=1)] = 2
    shared_experts: tuple[Expert, ...] = ()
    architecture: str | None = None
    seed: Natural = 0
    text: str = Field("", exclude=True)

    @model_validator(mode="after")
    def _fits(self) -> "Mixture":
        """Checks what can be checked without the networks."""
        if len(self.shared_experts) > 1:
            raise RecipeError(
                self.shared_experts[1].where,
                "a mixture has one shared expert at most: DeepSeek's several are not made yet",
            )
        if self.experts_per_token > len(self.experts):
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}, and there are "
                f"{len(self.experts)} experts"
            )
        if self.gate_mode not in PROMPTED:
            return self
        for expert in (*self.experts, *self.shared_experts):
            if not expert.positive_prompts:
                raise RecipeError(
                    expert.where,
                    f"an expert needs positive_prompts where gate_mode is {self.gate_mode}; "
                    "random, uniform_random and zero need none",
                )
        prompts = {(expert.positive_prompts, expert.negative_prompts) for expert in self.experts}
        if len(prompts) == 1 < len(self.experts):
            raise ValueError(
                "all experts have the same prompts, so that no router could tell them apart"
            )
        return self


def parse(text: str | bytes, file: str = "mixture") -> Mixture:
    """Reads a file about a mixture of experts.

    Args:
      text: The YAML, in UTF-8 if it is bytes.
      file: What error messages call it, such as its path.

    Returns:
      The mixture, checked as far as it can be without its networks.

    Raises:
      RecipeError: If it is not valid; the message names the place.

    >>> mixture = parse("{base_model: a, gate_mode: zero, experts: [{source_model: a}], "
    ...                 "experts_per_token: 1}")
    >>> mixture.base_model.path, mixture.experts[0].noise_scale
    ('a', 0.0)
    """
    mixture = read(Mixture, compose(text, file), Document())
    text = text if isinstance(text, str) else text.decode("utf-8-sig")
    return mixture.model_copy(update={"text": text})


def copies(base: str | PathLike[str], experts: int, **options: Any) -> Mixture:
    """Makes a mixture in which all experts are made of one network, without a file.

    Args:
      base: The checkpoint, a path as it is.
      experts: How many experts there are.
      **options: The keys of a file, and those of an expert, which hold for all of them. Those that
        are None are left out. `gate_mode` is "uniform_random" by default, as nothing is known of
        the experts.

    Returns:
      The mixture.

    Raises:
      RecipeError: If an option is unknown or its value does not fit.

    >>> copies("a", 4, noise_scale=0.01).experts[3].noise_scale
    0.01
    """
    given = {name: value for name, value in options.items() if value is not None}
    own = {name: given.pop(name) for name in [*given] if name in Expert.model_fields}
    if not 1 <= experts <= 4096:
        raise RecipeError(Where("experts"), f"expected a number from 1 to 4096, got {experts}")
    # JSON is YAML: the same reader checks what a file and what a call says.
    each = {"source_model": "-", **own}
    top = {"gate_mode": "uniform_random", **given, "base_model": "-", "experts": [each] * experts}
    mixture = read(Mixture, compose(json.dumps(top), ""), Document())
    ref = Ref(fspath(base))
    made = tuple(expert.model_copy(update={"source_model": ref}) for expert in mixture.experts)
    return mixture.model_copy(update={"base_model": ref, "experts": made})


def models(mixture: Mixture) -> Sequence[Ref]:
    """Lists the networks of a mixture, each once, the base first.

    Args:
      mixture: The mixture.

    Returns:
      The networks.
    """
    experts = (*mixture.experts, *mixture.shared_experts)
    refs = (mixture.base_model, *(expert.source_model for expert in experts))
    return tuple(dict.fromkeys(refs))
