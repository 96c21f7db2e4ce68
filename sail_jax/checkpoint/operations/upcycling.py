"""Makes mixtures of experts from dense checkpoints: plans from shapes, certifies, and writes.

Unchanged tensors are copied, and read once for each expert that uses them. Random tensors are
computed as they are read. Routers made from prompts are computed before anything is written, from
one tensor of the base at a time.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sail_jax.basis.certificate import Verdict
from sail_jax.checkpoint.contents.encoding import encoder
from sail_jax.checkpoint.contents.relations import following
from sail_jax.checkpoint.executor import CONSTANT, mib
from sail_jax.checkpoint.formats.extras import config_of, content
from sail_jax.checkpoint.formats.files import DTYPES, CheckpointError
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.operations.results import Result
from sail_jax.checkpoint.operations.running import (
    DEFAULTS,
    Inputs,
    Path_,
    Ready,
    Request,
    RunOptions,
    bounds,
    carried_out,
    unselected,
)
from sail_jax.checkpoint.planning import cards
from sail_jax.checkpoint.planning.openings import Openings, paths
from sail_jax.checkpoint.recipe import mixtures
from sail_jax.checkpoint.recipe.mixtures import Mixture
from sail_jax.checkpoint.recipe.yaml_tree import RecipeError
from sail_jax.checkpoint.sources.agreement import (
    Agreement,
    Arrays,
    Certify,
    certified,
    verdict,
    wanted,
)
from sail_jax.checkpoint.sources.computed import Computed, Programs
from sail_jax.checkpoint.sources.joined import Joined
from sail_jax.checkpoint.sources.view import View
from sail_jax.checks import argument
from sail_jax.configurations import Config
from sail_jax.growth import routers, upcycling
from sail_jax.merging import random_bits
from sail_jax.merging.engine import InMemory
from sail_jax.merging.tensors import Tensor, read_whole


@dataclass(frozen=True, kw_only=True, repr=False)
class Upcycled(Result):
    """The result of `upcycle_checkpoint`.

    Attributes:
      config: The configuration of the mixture.
      agreement: The differences between its outputs and the dense network's; empty if they were not
        compared.
      verdict: Whether the function of the dense network is preserved, according to the run.
    """

    config: Config
    agreement: tuple[Agreement, ...]
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Upcycling(Ready[Upcycled]):
    """A mixture before its execution, when everything is known except the values of the experts.

    Attributes:
      mixture: The description of the mixture.
      plan: The source of each tensor.
      certify: Whether both networks are run.
      about: The content of upcycling.json.
    """

    mixture: Mixture
    plan: upcycling.Plan
    certify: Certify
    about: Mapping[str, Any]

    def completed(self) -> "Upcycling":
        assert self.out is not None
        agreed, failed = _measured(self)
        preserved = verdict(agreed)
        notes = (*self.notes, *failed)
        about = {
            **self.about,
            "notes": notes,
            "exactness": str(preserved),
            "agreement": [one.record() for one in agreed],
        }
        files = {"upcycling.json": json.dumps(about, indent=2, default=str).encode() + b"\n"}
        if self.run.write_model_card:
            files["README.md"] = cards.mixture_card(about, self.out.name).encode()
            if self.mixture.text:
                files["mergekit_moe_config.yml"] = self.mixture.text.encode()
        return replace(
            self, notes=notes, files=files,
            make=functools.partial(
                Upcycled, config=self.plan.config, agreement=agreed, verdict=preserved
            ),
        )  # fmt: skip


@dataclass(frozen=True)
class UpcycleRequest(Request[Upcycling]):
    """The arguments of `upcycle_checkpoint`; `out` is None for a plan alone."""

    mixture: Mixture
    out: Path_ | None = None
    certify: Certify = None
    found: np.ndarray | None = None
    """The rows of the routers, if an earlier plan has made them from prompts."""

    def plan(self, inputs: Inputs) -> Upcycling:
        """Plans the mixture from shapes. Tensors are read only for routers made from prompts."""
        mixture, run = self.mixture, inputs.run
        if run.strict and mixture.notes:
            raise RecipeError(*mixture.notes[0])
        refs = mixtures.models(mixture)
        inputs.look_up([*paths(refs)], self.out)
        notes = [note.text for note in mixture.notes]

        opening = functools.partial(inputs, adapters=True)
        openings = Openings(opening, run.select, notes)
        models = {ref: openings(ref) for ref in refs}
        base = models[mixture.base_model]
        notes += unselected(base)
        config = config_of(base.extras)
        if not config:
            raise CheckpointError(f"{base.path}: a config.json with its architecture is missing")
        for ref, model in models.items():
            _check_alike(config, config_of(model.extras), base.path, str(ref))
        places = {ref: k for k, ref in enumerate(refs)}

        def expert(e: mixtures.Expert) -> upcycling.Expert:
            place = places[e.source_model]
            return upcycling.Expert(place, e.noise_scale, e.residual_scale, e.drop)

        try:
            mixture = _with_shared(mixture, config)
            experts = [expert(e) for e in mixture.experts]
            shared = next(map(expert, mixture.shared_experts), None)
            rows = self.found
            if rows is None:
                rows = _rows(mixture, base, config, run.max_memory)
            made = upcycling.plan(
                [model.tensors for model in models.values()], config, experts, rows,
                used=mixture.experts_per_token, kind=mixture.architecture,
                shared=shared, key=random_bits.key(mixture.seed),
            )  # fmt: skip
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{base.path}: {error}") from error
        if mixture.gate_mode in mixtures.PROMPTED and (
            near := routers.dependent(rows[:, : len(experts)])
        ):
            notes.append(
                f"in {len(near)} of {len(rows)} layers the rows of the router are nearly linearly "
                "dependent, and some experts will hardly be used: choose prompts that differ more"
            )
        first = experts[0]
        if experts.count(first) == len(experts) and not (first.noise or first.drop):
            notes.append("all experts are equal, and stay equal unless training distinguishes them")
        mark = _mark(mixture, made)
        view = _view([*models.values()], made, mixture, mark, run)
        works = view.works()
        about = {
            "base": str(mixture.base_model),
            "experts": _records(mixture.experts),
            "shared_experts": _records(mixture.shared_experts),
            "experts_per_token": mixture.experts_per_token,
            "gate_mode": mixture.gate_mode,
            "seed": mixture.seed,
            "architecture": made.config["model_type"],
            "notes": notes,
        }  # fmt: skip
        # The process that joins the parts runs the networks, and writes the result.
        certify = False if run.part is not None else self.certify
        return Upcycling(
            out=None if self.out is None else Path(self.out), run=run, works=works,
            limits=bounds(works, run), fingerprint=mark, mixture=mixture, plan=made, view=view,
            inputs=tuple(models.values()), about=about, notes=tuple(notes), certify=certify,
            make=Upcycled, divisible=True, solved=replace(self, found=rows),
        )  # fmt: skip


def upcycle_checkpoint(
    mixture: Mixture | str,
    out: Path_,
    *,
    certify: Certify = None,
    run: RunOptions = DEFAULTS,
    before: Callable[[Upcycling], None] | None = None,
) -> Upcycled:
    """Makes a mixture of experts from dense checkpoints, tensor by tensor.

    The output has a config.json, the base's plain files, a model card, and an upcycling.json. This
    file records the operations, and whether a run of both networks shows that they compute the same
    function.

    Args:
      mixture: The description of the mixture: the text of a file in mergekit-moe's format, or a
        mixture from `sail_jax.checkpoint.recipe.mixtures`.
      out: The path of the mixture.
      certify: Whether the base and the mixture are run on probe inputs, and how; see
        `grow_checkpoint`. By default they are run if all experts are the base's own and both fit in
        1 GiB. With other experts the outputs differ.
      before: Called when everything except the values is known, before experts are read.

    Returns:
      The result.

    Raises:
      ValueError: If a network is missing or incompatible, CheckpointError and MergeError; or if the
        caller requests a certificate that cannot hold.

    >>> import tempfile
    >>> import numpy as np
    >>> from sail_jax.checkpoint import save_checkpoint
    >>> names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    >>> tensors = {f"model.layers.0.{name}.weight": np.ones((4, 4), np.float32) for name in names}
    >>> tensors |= {f"model.layers.0.mlp.{name}_proj.weight": np.ones((4, 4), np.float32)
    ...             for name in ("gate", "up", "down")}
    >>> norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    >>> tensors |= {f"model.{name}.weight": np.ones(4, np.float32) for name in norms}
    >>> tensors |= {name: np.ones((5, 4), np.float32)
    ...             for name in ("model.embed_tokens.weight", "lm_head.weight")}
    >>> config = (b'{"model_type": "llama", "hidden_size": 4, "intermediate_size": 4, '
    ...           b'"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 5}')
    >>> folder = tempfile.mkdtemp()
    >>> save_checkpoint(f"{folder}/dense", tensors, extras={"config.json": config})
    >>> made = upcycle_checkpoint(mixtures.copies(f"{folder}/dense", 4), f"{folder}/mixture")
    >>> made.config["model_type"], made.config["num_local_experts"], made.tensors
    ('mixtral', 4, 22)
    """
    mixture = mixtures.parse(mixture) if isinstance(mixture, str) else mixture
    return carried_out(UpcycleRequest(mixture, out, certify), run, before)


def _check_alike(base: Config, own: Config, path: object, name: str) -> None:
    """Raises a CheckpointError if a network computes experts differently from the base."""
    for entry, default in (("model_type", None), ("hidden_act", "silu")):
        a, b = base.get(entry, default), own.get(entry, default)
        if own and a != b:
            raise CheckpointError(f"{entry} is {b!r} in {name}, but {a!r} in the base {path}")


def _records(experts: Sequence[mixtures.Expert]) -> list[dict[str, Any]]:
    """Makes the records of experts in upcycling.json, without their position in the file."""
    bare = (expert.model_copy(update={"where": ()}) for expert in experts)
    return [
        {name: str(x) if name == "source_model" else x for name, x in expert if x != ()}
        for expert in bare
    ]


def _with_shared(mixture: Mixture, config: Config) -> Mixture:
    """Adds the shared expert of copies. Its output is zero, so it has no effect before training."""
    kind = upcycling.target_of(str(config.get("model_type")), mixture.architecture)
    if mixture.text or mixture.shared_experts or not upcycling.TARGETS[kind].shared:
        return mixture
    plain = {"noise_scale": 0.0, "drop": 0.0, "residual_scale": 0.0}
    shared = mixture.experts[0].model_copy(update=plain)
    return mixture.model_copy(update={"shared_experts": (shared,)})


def _rows(mixture: Mixture, base: Checkpoint, config: Config, max_memory: int | None) -> np.ndarray:
    """Returns the rows of the routers, `(layer, expert, width)`."""
    layers, width = config.get("num_hidden_layers"), config.get("hidden_size")
    for name, value in (("num_hidden_layers", layers), ("hidden_size", width)):
        if type(value) is not int or not 1 <= value < 1 << 24:
            raise CheckpointError(f"{base.path}: config.json has {name} {value!r}")
    assert isinstance(layers, int)
    assert isinstance(width, int)
    kind = upcycling.target_of(str(config.get("model_type")), mixture.architecture)
    shared = mixture.shared_experts if upcycling.TARGETS[kind].share else ()
    experts, mode = (*mixture.experts, *shared), mixture.gate_mode
    if mode not in mixtures.PROMPTED:
        key = jax.random.fold_in(random_bits.key(mixture.seed), 1)
        return routers.drawn(mode, layers, len(experts), width, key)
    tables = [name for name in base.tensors if name.split(".")[-2:] == ["embed_tokens", "weight"]]
    if len(tables) != 1 or base.tensors[tables[0]].shape[1:] != (width,):
        raise CheckpointError(f"{base.path}: expected one table embed_tokens.weight, {width} wide")
    table = base.tensors[tables[0]]
    encode = _encoder(base)
    prompts = [
        routers.Prompts(
            *(
                tuple(_tokens(prompt, encode, table.shape[0]) for prompt in given)
                for given in (expert.positive_prompts, expert.negative_prompts)
            )
        )
        for expert in experts
    ]

    def rows(tokens: np.ndarray) -> np.ndarray:
        out = np.empty((len(tokens), width), table.dtype)
        for row, token in zip(out, tokens, strict=True):
            table.read(row, int(token) * width)
        return out.astype(np.float32)

    if mode == "cheap_embed":
        return routers.of_prompts(prompts, routers.embedded(rows, layers), unit=True)
    states = routers.hidden(
        _Read(base.tensors), config, rows, tables[0], mean=mode == "hidden_avg",
        **_room(base, config, prompts, tables[0], max_memory),
    )  # fmt: skip
    return routers.of_prompts(prompts, states)


def _room(
    base: Checkpoint, config: Config, prompts: Sequence[routers.Prompts], table: str,
    max_memory: int | None,
) -> dict[str, int]:  # fmt: skip
    """Computes memory arguments of `hidden`; raises a CheckpointError if a prompt is too long."""
    if max_memory is None:
        return {}
    largest = max(math.prod(x.shape) for name, x in base.tensors.items() if name != table)
    # A weight as it is read, in float32, and in the layout of the product.
    taken = CONSTANT + 12 * largest
    longest = max(len(tokens) for each in prompts for group in each for tokens in group)
    need = routers.activations(config, longest)
    if taken + need > max_memory:
        raise CheckpointError(
            f"{argument('max_memory')}: running a prompt of {longest} tokens takes about "
            f"{mib(taken + need)} ({mib(need)} of it for the prompt), got {max_memory >> 20} MiB"
        )
    return {"most": min(max_memory - taken, routers.TOGETHER)}


class _Read(Mapping[str, np.ndarray]):
    """Tensors by name, which are read on demand and not kept."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> np.ndarray:
        return read_whole(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


Encode = Callable[[str], list[int]]


def _encoder(base: Checkpoint) -> Encode:
    """Returns a function that tokenises text with the base's tokenizer, read on first use."""

    def encode(text: str) -> list[int]:
        if "tokenizer.json" not in base.extras:
            remedy = "give prompts as lists of tokens"
            raise CheckpointError(f"{base.path} lacks a tokenizer.json: {remedy}")
        document = content(base.extras["tokenizer.json"])
        spelled = encoder(document, f"{base.path}: tokenizer.json")
        # mergekit-moe prepends the beginning-of-sequence token to each prompt.
        first = config_of(base.extras, "tokenizer_config.json").get("bos_token") or ""
        first = first.get("content", "") if isinstance(first, dict) else first
        return spelled(f"{first}{text}", True)

    return encode


def _tokens(prompt: str | tuple[int, ...], encode: Encode, vocabulary: int) -> list[int]:
    """Returns the tokens of a prompt; each must have an embedding."""
    tokens = encode(prompt) if isinstance(prompt, str) else list(prompt)
    if far := [token for token in tokens if token >= vocabulary]:
        raise CheckpointError(
            f"the prompt {prompt!r:.80} has the token {far[0]}, but there are only {vocabulary} "
            "embeddings"
        )
    return tokens


def _mark(mixture: Mixture, made: upcycling.Plan) -> str:
    """Computes a mark that identifies this mixture, which a resumed run must reproduce."""
    about = [mixture.seed, mixture.dtype, made.config]
    mark = hashlib.sha256(json.dumps(about, default=repr).encode())
    for name, part in made.parts.items():
        for own in _parts(part):
            mark.update(repr([name, own.like, own.source, own.function]).encode())
            if own.source is None:
                mark.update(np.ascontiguousarray(own.operands).tobytes())
    return mark.hexdigest()


def _parts(part: upcycling.Part | upcycling.Joined) -> tuple[upcycling.Part, ...]:
    """Returns the parts of a tensor, most often itself."""
    return part.parts if isinstance(part, upcycling.Joined) else (part,)


def _view(
    models: list[Checkpoint], made: upcycling.Plan, mixture: Mixture, mark: str, run: RunOptions
) -> View:
    """Returns the mixture as a checkpoint, in the dtype of the output."""
    programs, tensors = Programs(), {}

    def tensor(name: str, part: upcycling.Part) -> Tensor:
        if part.source is None:
            return InMemory.of(name, "the routers", part.operands)
        model, source = part.source
        own = models[model].tensors[source]
        if part.function is None:
            return own
        return Computed(
            name, part.like, [own], part.function, part.operands, programs, how="upcycled",
            mark=mark, allow_nonfinite=run.allow_nonfinite,
        )  # fmt: skip

    for name, part in made.parts.items():
        own = [tensor(name, each) for each in _parts(part)]
        joins = isinstance(part, upcycling.Joined)
        tensors[name] = Joined(name, part.like, own) if joins else own[0]
    dtype = None if mixture.dtype is None else DTYPES[mixture.dtype]
    config = dict(made.config)
    view = View(models, tensors, config, dtype)
    # The dtype, and other entries that the tensors determine.
    config, _ = following(config, {work.name: work for work in view.works()})
    view.extras["config.json"] = json.dumps(config, indent=2).encode() + b"\n"
    return view


def _measured(ready: Upcycling) -> tuple[tuple[Agreement, ...], tuple[str, ...]]:
    """Runs the base and the mixture, if requested, or if it is cheap and both should agree."""
    base, plan, certify = ready.inputs[0], ready.plan, ready.certify
    if not plan.alike:
        if certify:
            raise CheckpointError(
                f"{base.path}: {argument('certify')}: the experts differ from the base's own, so "
                "the mixture computes something else"
            )
        return (), ()

    def renew(arrays: Arrays) -> tuple[Arrays, Config]:
        return {name: part.of([arrays]) for name, part in plan.parts.items()}, plan.config

    # Experts are the base's own arrays and held once, unless they are stacked in one tensor.
    joined = [x for x in plan.parts.values() if isinstance(x, upcycling.Joined)]
    entries = 2 * sum(int(np.prod(x.shape)) for x in base.tensors.values())
    entries += sum(int(np.prod(x.like.shape)) for x in joined)
    own = config_of(base.extras)
    return wanted(
        certify, entries, base.path, lambda: certified(base.tensors, own, renew, certify),
        ready.run.max_memory,
    )  # fmt: skip
