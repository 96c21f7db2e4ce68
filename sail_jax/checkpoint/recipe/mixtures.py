"""Reads files in mergekit-moe's format, which describe mixtures of experts.

The grammar is mergekit's, with additions: `gate_mode` may be zero, a file may have a `seed`, an
expert may `drop` a fraction of its hidden units (they are drawn anew), and a prompt may be a list
of tokens.

base_model: path              # provides everything except the experts
gate_mode: hidden             # or hidden_avg, cheap_embed, random, uniform_random, zero
experts_per_token: 2
dtype: bfloat16               # by default each tensor keeps its dtype
architecture: mixtral         # by default the first that fits these networks
shared_experts: []            # at most one, like an expert below, for mixtures with shared experts
seed: 0                       # of all random draws
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

from sail_jax.checkpoint.recipe.declared import Lenient, Note, Placed, kind, read
from sail_jax.checkpoint.recipe.parts import Document, Dtype, Ref, Reference
from sail_jax.checkpoint.recipe.settings import Integer, Natural, Number
from sail_jax.checkpoint.recipe.yaml_tree import RecipeError, Where, compose
from sail_jax.growth.routers import Drawn, Read

Mode = Read | Drawn
PROMPTED = ("hidden", "hidden_avg", "hidden_last", "cheap_embed")
"""The modes that need prompts."""


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


class Expert(Placed, Lenient):
    """An expert in a file.

    Attributes:
      source_model: The network that provides its feed-forward parts.
      positive_prompts: Prompts for this expert.
      negative_prompts: Prompts for the other experts.
      noise_scale: The standard deviation of noise that is added to its weights.
      residual_scale: The factor on its last layer.
      drop: The fraction of its hidden units that is drawn anew.
      where: Its place in the file.
    """

    source_model: Reference
    positive_prompts: tuple[Prompt, ...] = ()
    negative_prompts: tuple[Prompt, ...] = ()
    noise_scale: Scale = 0.0
    residual_scale: Number = 1.0
    drop: Share = 0.0


class Mixture(Placed, Lenient):
    """A mixture of experts in a file.

    Attributes:
      base_model: The network that provides everything except the experts.
      experts: The experts, in order.
      gate_mode: The way in which the routers are made.
      dtype: The dtype of the output; None for each tensor's own dtype.
      experts_per_token: The number of experts that each token uses.
      shared_experts: An expert that every token uses, for mixtures that have one.
      architecture: The name of the mixture's architecture; None for the first that fits.
      seed: The seed of all random draws.
      where: Its place in the file.
      text: The file; "" if it was made in Python.
      notes: The keys of the file that have no effect.
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
    notes: tuple[Note, ...] = Field((), exclude=True)

    @model_validator(mode="after")
    def _fits(self) -> "Mixture":
        """Runs the checks that do not require the networks."""
        if len(self.shared_experts) > 1:
            raise RecipeError(
                self.shared_experts[1].where,
                "a mixture has one shared expert at most: DeepSeek's several are not made yet",
            )
        if self.experts_per_token > len(self.experts):
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}, but there are only "
                f"{len(self.experts)} experts"
            )
        if self.gate_mode not in PROMPTED:
            return self
        for expert in (*self.experts, *self.shared_experts):
            if not expert.positive_prompts:
                raise RecipeError(
                    expert.where,
                    f"an expert needs positive_prompts if gate_mode is {self.gate_mode}; "
                    "random, uniform_random and zero need none",
                )
        prompts = {(expert.positive_prompts, expert.negative_prompts) for expert in self.experts}
        if len(prompts) == 1 < len(self.experts):
            raise ValueError(
                "all experts have the same prompts, so a router could not distinguish them"
            )
        return self


def parse(text: str | bytes, file: str = "mixture") -> Mixture:
    """Reads a file about a mixture of experts.

    Args:
      text: The YAML, in UTF-8 if it is bytes.
      file: The file's name in error messages, such as its path.

    Returns:
      The mixture, after all checks that do not require its networks.

    Raises:
      RecipeError: If it is not valid; the message contains the position.

    >>> mixture = parse("{base_model: a, gate_mode: zero, experts: [{source_model: a}], "
    ...                 "experts_per_token: 1}")
    >>> mixture.base_model.path, mixture.experts[0].noise_scale
    ('a', 0.0)
    """
    document = Document()
    mixture = read(Mixture, compose(text, file), document)
    text = text if isinstance(text, str) else text.decode("utf-8-sig")
    return mixture.model_copy(update={"text": text, "notes": tuple(document.notes)})


def copies(base: str | PathLike[str], experts: int, **options: Any) -> Mixture:
    """Describes a mixture with all experts made from one network, without a file.

    Args:
      base: The checkpoint, a plain path.
      experts: The number of experts.
      **options: The keys of a file, and keys of an expert, which then apply to all experts. None
        counts as missing. `gate_mode` is "uniform_random" by default, because the experts are
        equal.

    Returns:
      The mixture.

    Raises:
      RecipeError: If an option is unknown or its value is invalid.

    >>> copies("a", 4, noise_scale=0.01).experts[3].noise_scale
    0.01
    """
    given = {name: value for name, value in options.items() if value is not None}
    own = {name: given.pop(name) for name in [*given] if name in Expert.model_fields}
    if not 1 <= experts <= 4096:
        raise RecipeError(Where("experts"), f"expected a number from 1 to 4096, got {experts}")
    # JSON is YAML, so one reader checks files and calls.
    each = {"source_model": "-", **own}
    top = {"gate_mode": "uniform_random", **given, "base_model": "-", "experts": [each] * experts}
    document = Document()
    mixture = read(Mixture, compose(json.dumps(top), ""), document)
    if document.notes:  # an option, not a word of a file that other programs read too
        raise RecipeError(*document.notes[0])
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
