"""Plans a merge: determines the treatment of every tensor from a recipe and headers.

No entry of a tensor is read. The rules by which tensors are matched:

* By name, after `rename`. The output has the tensors of the base, or without one of the first
  model. Additional tensors of other models are an error unless `extra: ignore`. A missing tensor
  is an error unless `missing: skip` (the model is left out) or `missing: base` (it counts as the
  base). Computed buffers (rotary frequencies, position ids, counters) never cause a refusal.
* A head that is tied to the embedding in all inputs is not written. If any input has a separate
  head, the output is untied, and tied inputs are merged by their embedding. A stored head that its
  config calls tied counts as a copy of the embedding.
* Rows of embeddings and heads are matched by token if a tokenizer is requested and vocabularies
  differ, else by number. By number, rows beyond the base's are left out, and a row that is missing
  in a model is taken from the base, which makes its delta 0. Without a base, only the rows of all
  models are kept.
* Rows are matched by number only if the tokenizers assign them to the same tokens.
* Other shapes must be equal. Floating-point dtypes may differ. The output's is out_dtype, else
  dtype, else the base's or first model's. Integers, bools and keys are copied; if they differ,
  `integers` chooses the source. Complex numbers are copied, too; if they differ, the merge is
  refused.
* config.json comes from the base or first model. If the output's tensors contradict it, it is
  corrected to match them; if that is impossible, the merge is refused.
* `layers.position` finds the layers. In slices, the output's layers are numbered consecutively.
  Tensors before the layers (embeddings) come from the sources of the first slice, and tensors after
  them from the sources of the last slice.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from sail_jax.checkpoint.contents.configs import patched_config
from sail_jax.checkpoint.contents.layers import role
from sail_jax.checkpoint.contents.relations import (
    TOKENIZER,
    Contradiction,
    contradictions,
    contradictions_of,
    following,
)
from sail_jax.checkpoint.contents.vocabulary import Vocabulary, roles
from sail_jax.checkpoint.formats.extras import carried, config_of, licence_of
from sail_jax.checkpoint.formats.listing import of_tokenizer
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.planning.hyperparameters import Choice, Hyperparameters
from sail_jax.checkpoint.planning.inputs import (
    Input,
    Renaming,
    is_derived,
)
from sail_jax.checkpoint.planning.jobs import Job, is_main, jobs
from sail_jax.checkpoint.planning.meaning import (
    Vocabularies,
    compare,
    match_tokens,
    sentences,
)
from sail_jax.checkpoint.planning.openings import Openings, located
from sail_jax.checkpoint.planning.templates import chat_template
from sail_jax.checkpoint.planning.tokenizers import (
    OutputVocabulary,
    Rowing,
    dump,
    output_vocabulary,
)
from sail_jax.checkpoint.recipe.declared import Note
from sail_jax.checkpoint.recipe.parts import Recipe, Ref
from sail_jax.checkpoint.recipe.recipes import merged_sources
from sail_jax.checkpoint.recipe.yaml_tree import RecipeError
from sail_jax.checkpoint.sources.chosen import Chosen
from sail_jax.checkpoint.sources.requantised import Requantisation, requantised
from sail_jax.checkpoint.sources.rows import Rows, head_rows
from sail_jax.checkpoint.sources.transplanted import Transplanted
from sail_jax.checks import argument, nearest
from sail_jax.disk import StoreError
from sail_jax.interop import layers
from sail_jax.merging.integers import rule_for
from sail_jax.merging.merge import Merge
from sail_jax.merging.selection import averaged_statistics
from sail_jax.merging.tensors import Shape, Tensor, bytes_of
from sail_jax.merging.work import Work, copy
from sail_jax.trees import some_paths
from sail_jax.views import view


class Treatment(NamedTuple):
    """The treatment of one tensor of the output: the work for the engine, and its description.

    Attributes:
      work: The engine's work. Its `merge` is None to copy the bytes of the first model, which must
        be equal in all other models.
      owners: The models that are merged, by their names in `Plan.inputs`.
      base: The tensor of the base; None without one. The work contains it only if the merge
        requires it: as the start of the task vectors, or as a model.
      weights: One weight per model, as requested; None for the method's default.
      group: A number that all tensors with the same merge share. Statistics of the whole tree are
        taken over a group.
      note: The reason for copying or cropping, for example; "" without one.
    """

    work: Work
    owners: tuple[str, ...]
    base: Tensor | None
    weights: tuple[float, ...] | None
    group: int
    note: str

    @property
    def name(self) -> str:
        """The name of the tensor."""
        return self.work.name

    @property
    def shape(self) -> Shape:
        """The shape of the tensor in the output."""
        return self.work.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the tensor in the output."""
        return self.work.dtype

    @property
    def merge(self) -> Merge | None:
        """The merge; None for a copy."""
        merge = self.work.merge
        # Merges are the only kind of `Program`.
        assert merge is None or isinstance(merge, Merge)
        return merge

    @property
    def models(self) -> tuple[Tensor, ...]:
        """The tensor of each of the models; without a base that the merge counts as a model.

        For a copied tensor, it is a single tensor, from any of the owners.
        """
        models = self.work.models
        return models if self.work.merge is None else models[len(models) - len(self.owners) :]

    @property
    def method(self) -> str:
        """The name of the merge, or "copy"."""
        return "copy" if self.merge is None else self.merge.name

    @property
    def options(self) -> dict[str, Any]:
        """The hyperparameters of the merge without PRNG keys; a tuple has one value per model."""
        given = {} if self.merge is None else self.merge.options
        return {name: value for name, value in given.items() if name != "key"}


class InputSummary(NamedTuple):
    """An input in messages and reports.

    Attributes:
      name: The checkpoint in the recipe, with its operations.
      role: "base", "model", or "tokenizer" if it takes part in the vocabulary only.
      tensors: The number of its tensors.
      size: Their size in bytes.
      licence: The licence that its model card states; "" for none."""

    name: str
    role: str
    tensors: int
    size: int
    licence: str = ""


class Plan(NamedTuple):
    """A merge, ready to be run.

    Attributes:
      method: The name of the method.
      treatments: The treatment of each tensor, in the order of the output.
      aliases: The names that the output does not store, each with the tensor that it is tied to.
      extras: The plain files to write, by name: their bytes, or the path of a file to copy.
      inputs: The checkpoints that take part.
      compat: The origin of the defaults and variants.
      seed: The seed of methods that draw random numbers.
      notes: Notes for the user, a sentence each.
      losses: The parts of the inputs that are missing in the output, a sentence each.
      codes: The weights that are written in codes; None for none.
    """

    method: str
    treatments: tuple[Treatment, ...]
    aliases: dict[str, str]
    extras: dict[str, bytes | Path]
    inputs: tuple[InputSummary, ...]
    compat: str
    seed: int
    notes: tuple[str, ...]
    losses: tuple[str, ...] = ()
    codes: Requantisation | None = None

    def _repr_html_(self) -> str:
        rows = [("tensors", len(self.treatments)), ("inputs", len(self.inputs))]
        rows += [("compat", self.compat), ("seed", self.seed)]
        rows += [("note", text) for text in (*self.losses, *self.notes)]
        return view(f"plan of {self.method}", rows)

    def differing(self) -> tuple[str, ...]:
        """Lists the integers that were found to differ between models."""
        copied = ((t.name, x) for t in self.treatments for x in t.models)
        return tuple(name for name, x in copied if isinstance(x, Chosen) and x.differs)


def plan(
    recipe: Recipe,
    open: Callable[[str], Checkpoint],
    *,
    allow_crimes: bool = False,
    strict: bool = False,
    copy_tokenizer: bool = True,
) -> Plan:
    """Plans the merge of a recipe, by the rules at the top of this module.

    Args:
      recipe: The recipe.
      open: Opens a checkpoint by its path (or path@revision). It is called once for each path. The
        caller closes the checkpoints, after the plan has been used.
      allow_crimes: Whether different architectures may be merged, and an output may contradict its
        config.json.
      strict: Whether a part without effect is an error. By default it causes a note.
      copy_tokenizer: Whether the files of a tokenizer are copied. Files that the recipe's
        `tokenizer` makes are always in the plan.

    Returns:
      The plan. Its tensors are read from the open checkpoints when it is run.

    Raises:
      RecipeError: If the recipe does not match its checkpoints: a tensor is missing or has another
        shape, a filter has no effect, and so on; with `strict`, also for other parts without
        effect.
      ValueError: If an adapter is incompatible or a plain file cannot be read. Errors of `open` are
        propagated.
    """
    return _Planner(recipe, open, allow_crimes, strict, copy_tokenizer).plan()


def fingerprint(plan: Plan) -> str:
    """Computes a digest of a plan, which identifies an interrupted merge.

    It changes with anything that changes the output: the merges, and the tensors that they apply
    to. It covers the source, dtype and shape of tensors, but not their entries.

    Args:
      plan: The plan.

    Returns:
      64 hexadecimal digits.
    """

    def tensor(x: Tensor | None) -> Any:
        if isinstance(x, Rows):
            # A vocabulary may have 10^5 rows, so they are hashed.
            runs = hashlib.sha256(repr((x.runs, sorted(x.means.items()))).encode()).hexdigest()
            return [runs, *map(tensor, x.parts)]
        if x is None:
            return None
        return [x.name, x.source, getattr(x, "mark", ""), str(x.dtype), list(x.shape)]

    digest = hashlib.sha256(json.dumps([plan.method, plan.compat, plan.seed]).encode())
    for t in plan.treatments:
        done = "copy" if t.merge is None else t.merge.identity
        parts = [t.name, list(t.shape), str(t.dtype), done, t.group, t.weights]
        parts += [tensor(t.base), *map(tensor, t.models)]
        digest.update(json.dumps(parts, sort_keys=True, default=str).encode())
    for name, data in sorted(plan.extras.items()):
        digest.update(name.encode() + (data if isinstance(data, bytes) else str(data).encode()))
    return digest.hexdigest()


class _Planner:
    """The state of planning one recipe: its inputs, intermediate results, and notes."""

    def __init__(
        self,
        recipe: Recipe,
        open: Callable[[str], Checkpoint],
        allow_crimes: bool,
        strict: bool,
        copy_tokenizer: bool,
    ):
        self.recipe, self.entry, self.allow_crimes = recipe, recipe.entry, allow_crimes
        # A tokenizer in the recipe is always written, regardless of the options.
        self.copy_tokenizer = copy_tokenizer or recipe.tokenizer is not None
        self.hyperparameters, self.notes = Hyperparameters(recipe), list[str]()
        # The tensors with losses, by the kind of loss.
        self.losses: dict[str, list[str]] = {}
        # The number of token rows of each input, and of the output.
        self.tables: dict[Ref, int] = {}
        self.rows = 0
        self.vocabularies = Vocabularies(self.notes)
        # The same recipe under the other convention, for `_note_convention`; None if the user chose
        # a convention, or gave the merge itself.
        named = "compat" in recipe.node.value or self.entry.merge is not None
        compat = "mergekit" if recipe.compat == "paper" else "paper"
        other = recipe.model_copy(update={"compat": compat})
        self.other = None if named else Hyperparameters(other)
        self.merged = recipe.merged()
        self.groups: dict[int | None, int] = {}
        self.aliases: dict[str, str] = {}
        self.rowings: dict[tuple[tuple[Ref, int] | None, ...], dict[Ref, Rowing]] = {}
        refs = recipe.models()
        for note in (*recipe.notes, *_revisions(recipe, refs)):
            if strict:
                raise RecipeError(note.where, note.text)
            self.notes.append(note.text)
        rename = Renaming(recipe)
        openings = self.openings = Openings(open, recipe.select, self.notes, rename)
        self.inputs: dict[Ref, Input] = {}
        for ref in refs:
            try:
                self.inputs[ref] = Input(ref, openings(ref), recipe=recipe, rename=rename)
            except (TypeError, ValueError) as error:
                if isinstance(error, (StoreError, RecipeError)):
                    raise
                # Errors of growing or aligning contain no position, so this model's is used.
                raise RecipeError(recipe.place_of(ref), f"{ref}: {error}") from error
        rename.check_used()
        first = recipe.base_model or recipe.sources()[0].model
        self.first = self.inputs[first]
        self._look()
        self.vocabulary = self._output_vocabulary()

    def _look(self) -> None:
        """Notes contradictions between the inputs' files and tensors, and between inputs."""
        merged = [self.inputs[ref] for ref in self.inputs if ref in self.merged]
        opened = {model.ref: self.openings.about(model.ref) for model in merged}
        # Equal sentences about all inputs, such as about selected leaves, take one line.
        of_all = set.intersection(*map(set, opened.values()))
        for ref, said in opened.items():
            self.notes += [text if text in of_all else f"{ref}: {text}" for text in said]
        for model in merged:
            vocabulary = self.vocabularies(model)
            # Files that are not copied to the output are noted there.
            stale = {"quantization_config", "compression_config"} if model is self.first else set()
            found = contradictions_of(model.opened, vocabulary)
            self.notes += [f"{model.ref}: {x}" for x in found if x.key not in stale]
        others = [model for model in merged if model is not self.first]
        self.notes += compare(self.first, others, self.recipe, self.allow_crimes)

    def _loses(self, text: str, *names: str) -> None:
        """Records a loss of the output, and the tensors that it affects."""
        self.losses.setdefault(text, []).extend(names)

    def plan(self) -> Plan:
        treatments: list[Treatment] = []
        left_out: list[str] = []
        for job in jobs(self.recipe, self.inputs, left_out):
            if (treated := self._treat(job)) is not None:
                treatments.append(treated)
        treatments += self._rest({t.name for t in treatments})
        if not treatments:
            self.notes.append("nothing to merge: the inputs have no tensors")
        self.notes += self.hyperparameters.notes()
        merged = (t.name for t in treatments if t.work.merge is not None and len(t.models) > 1)
        self.notes += averaged_statistics(merged)
        for text in left_out:
            self._loses(text)
        if self.tables:
            notes, losses = match_tokens(
                self.rows, self.tables, self.first, self.inputs, self.vocabularies, self.recipe
            )
            self.notes += notes
            for text in losses:
                self._loses(text)
        # The written tensors are known only now: an alias must refer to one of them, and not be
        # one.
        written = {treatment.name for treatment in treatments}
        self.aliases = {a: b for a, b in self.aliases.items() if b in written and a not in written}
        extras, codes = self._extras(treatments), self._codes(treatments)
        notes = list(dict.fromkeys(self.notes))
        # In mergekit, `dtype` is the dtype of the arithmetic, too.
        narrow = self.recipe.dtype is not None and np.dtype(self.recipe.dtype).itemsize < 4
        if narrow and self.recipe.compat == "mergekit":
            notes.append(f"dtype: output files are {self.recipe.dtype}; arithmetic is float32")
        return Plan(
            self.recipe.method,
            tuple(treatments),
            self.aliases,
            extras,
            tuple(self._summary(model) for model in self.inputs.values()),
            self.recipe.compat,
            self.recipe.seed,
            tuple(notes),
            tuple(sentences(self.losses)),
            codes,
        )

    def _codes(self, treatments: Sequence[Treatment]) -> Requantisation | None:
        """Chooses the weights to write in codes, in the scheme of the first input."""
        if self.recipe.requantize is None:
            return None
        try:
            codes = requantised(self.first.opened, [t.work for t in treatments])
        except StoreError as error:
            raise RecipeError(self.recipe.at("requantize"), str(error)) from error
        self.notes.append(codes.note())
        return codes

    def _note_convention(self, job: Job, chosen: Choice, owners: Sequence[str]) -> None:
        """Notes the convention in use, if none was chosen and the other gives other numbers."""
        if self.other is None:
            return
        used, other = self.recipe.compat, self.other.recipe.compat
        # The conventions merge different models only where the base may be one of them.
        joins = self.entry.base == "joins" and (
            merged_sources(self.recipe, job.part) != merged_sources(self.other.recipe, job.part)
        )
        if joins or self.hyperparameters.differs(self.other, job, chosen, owners):
            self.notes.append(
                f"compat: using {used}'s conventions; `compat: {other}` gives different numbers"
            )
            self.other = None

    def _treat(self, job: Job) -> Treatment | None:
        """Determines the treatment of one tensor; None if the output does not store it."""
        notes: list[str] = []
        chosen = self.hyperparameters.of(job)
        gathered = self._gather(job, notes)
        if gathered is None:
            return None
        places, tensors, base = gathered
        weights, options = chosen.of(places)
        first = base or tensors[0]
        owner = [] if job.base is None else [job.base[0].name]
        owners = [job.sources[k][1].name for k in places] or owner
        everyone = [*([base] if places and base is not None else []), *tensors]
        if not all(map(_is_float, {x.dtype for x in everyone})):
            return self._copied(job, everyone, owner + owners if places else owner, notes)
        tensors, base = self._shaped(job, [job.sources[k][1] for k in places], tensors, base, notes)
        dtype = _dtype(self.recipe.out_dtype or self.recipe.dtype) or first.dtype
        method = self.recipe.method
        # Models may have been left out here (`missing: skip`), so the number of models may be lower
        # than the one checked for the recipe.
        if len(places) < self.entry.least:
            who = "the first model" if base is None else "the base"
            if job.sources:
                notes.append(text := f"too few models have it for {method}: copied from {who}")
                self._loses(text, job.name)
            else:
                self.notes.append(f"nothing to merge into the base: copied from {owner[0]}")
            method, weights, options = "passthrough", None, {"scale": 1.0}
            tensors, owners, base = [base or tensors[0]], owner or owners[:1], None
        normalised = method == "linear" and options.get("normalize", True)
        # This is checked per tensor, because weights may depend on the layer, and models may have
        # been left out.
        if normalised and weights is not None and abs(sum(weights)) < 1e-12:
            raise RecipeError(
                job.part.where, f"{job.name}: the weights of linear sum to 0: {list(weights)}"
            )
        self._note_dtype(dtype, everyone)
        same = dtype == tensors[0].dtype
        shape = tensors[0].shape if base is None else base.shape
        note = "; ".join(dict.fromkeys(notes))
        # Bytes are copied unchanged, without a conversion to float32.
        if method == "passthrough" and options.get("scale", 1.0) == 1.0 and same:
            return self._treatment(copy(job.name, dtype, tensors[0]), owners, base, None, note)
        merge = self.hyperparameters.merge(job, method, options, owners)
        try:
            work = merge.work(job.name, shape, dtype, tensors, base, weights)
        except (TypeError, ValueError) as error:
            raise RecipeError(job.part.where, f"{job.name} ({method}): {error}") from error
        self._note_convention(job, chosen, owners)
        return self._treatment(work, owners, base, weights, note)

    def _rest(self, merged: Set[str]) -> Iterator[Treatment]:
        """Copies the tensors that are not selected from the model of the recipe's rule."""
        rule = self.recipe.rest
        ref = self.recipe.sources()[-1].model if rule == "last" else self.first.ref
        rest = {name: x for name, x in self.openings.rest(ref).items() if name not in merged}
        if not rest:
            return
        names = some_paths([*rest], 1)
        if rule == "error":
            where = self.recipe.at("rest")
            raise RecipeError(where, f"{ref}: {names} are not selected, which rest: error refuses")
        if rule == "drop" or ref.steps:
            self._loses("not selected" if rule == "drop" else f"not selected, as {ref}", *rest)
            return
        self.notes.append(f"not selected: {names}; copied from the {rule} model, {ref}")
        for name, tensor in rest.items():
            note = f"not selected: copied from the {rule} model"
            yield self._treatment(copy(name, tensor.dtype, tensor), [str(ref)], None, None, note)

    def _treatment(
        self,
        work: Work,
        owners: Sequence[str],
        base: Tensor | None,
        weights: tuple[float, ...] | None,
        note: str,
    ) -> Treatment:
        """Adds the description of a tensor to its work, and numbers its group."""
        # `Hyperparameters.merge` returns the same object for all tensors of a group, and keeps it,
        # so its identity identifies the group.
        key = None if work.merge is None else id(work.merge)
        group = self.groups.setdefault(key, len(self.groups))
        return Treatment(work, tuple(owners), base, weights, group, note)

    def _note_dtype(self, dtype: np.dtype, tensors: Sequence[Tensor]) -> None:
        """Notes an unrequested output dtype that is narrower than an input's dtype."""
        if self.recipe.out_dtype or self.recipe.dtype:
            return
        for x in tensors:
            if not _holds(dtype, x.dtype):
                self.notes.append(
                    f"the output dtype is {dtype}, as in {self.first.ref}; tensors of other inputs"
                    f" in {x.dtype} are rounded; dtype: {x.dtype} keeps more"
                )

    def _copied(
        self, job: Job, tensors: list[Tensor], owners: list[str], notes: list[str]
    ) -> Treatment:
        """Copies a non-float tensor; if models differ, the rule decides."""
        first, rule = tensors[0], self.recipe.integers
        odd = [x for x in tensors if (x.dtype, x.shape) != (first.dtype, first.shape)]
        if odd and not (is_derived(job.name) and rule in ("first", "last")):
            raise RecipeError(
                job.part.where,
                f"{job.name} is {first.dtype}{list(first.shape)} in {first.source} and"
                f" {odd[0].dtype}{list(odd[0].shape)} in {odd[0].source}; non-float tensors must"
                " have equal dtypes and shapes in all models",
            )
        if odd:
            tensors = tensors[-1:] if rule == "last" else tensors[:1]
            self._loses(f"of another shape in other models: {rule} kept", job.name)
        if len(tensors) == 1:
            notes.append("non-float: copied")
            return self._treatment(
                copy(job.name, first.dtype, tensors[0]), owners[:1], None, None, "; ".join(notes)
            )
        notes.append(f"non-float: copied; where models differ: {rule_for(first.dtype, rule)}")
        work = copy(job.name, first.dtype, Chosen(tensors, rule))
        return self._treatment(work, owners, None, None, "; ".join(notes))

    def _gather(
        self, job: Job, notes: list[str]
    ) -> tuple[list[int], list[Tensor], Tensor | None] | None:
        """Finds the tensors to merge, their indices among the sources, and the base's tensor.

        Returns None for a head that is only an alias, and for an optional tensor that is missing in
        all models.
        """
        everyone = [model for _, model, _ in job.sources] + ([job.base[0]] if job.base else [])
        tied = role(job.name) == "head" and not job.name.endswith("bias")
        if tied and not any(model.has_own(job.name) for model in everyone):
            embedding = next((n for n in self.first.tensors if role(n) == "embedding"), None)
            if embedding is not None and any(model.tied is True for model in everyone):
                self.aliases[job.name] = embedding
                return None
        # The width of a stored head: an embedding with another width cannot stand for it.
        width = None
        for model in everyone if tied else ():
            if model.has_own(job.name):
                width = model.tensors[job.name].shape[-1]
        base = None
        if job.base is not None:
            base, note = job.base[0].get(job.base[1], width)
            notes += [note] if note else []
        places, tensors = [], []
        for k, (source, model, name) in enumerate(job.sources):
            tensor, note = model.get(name, width)
            notes += [note] if note else []
            # Computed buffers occur in some releases of a checkpoint and not in others, without
            # significance.
            if tensor is None and is_derived(name):
                continue
            if tensor is None and self.recipe.missing == "skip":
                notes.append(text := f"it is missing in {model.ref}, which is left out")
                self._loses(text, job.name)
                continue
            if tensor is None and self.recipe.missing == "base" and base is not None:
                notes.append(f"it is missing in {model.ref}, which counts as the base")
                tensor = base
            if tensor is None:
                remedy = "missing: skip leaves it out, missing: base counts it as the base"
                raise RecipeError(
                    source.where,
                    f"{name!r} is missing in {model.ref}{nearest(name, model.tensors)}; {remedy}",
                )
            places.append(k)
            tensors.append(tensor)
        if job.base is not None and base is None:
            where = self.recipe.at("base_model")
            raise RecipeError(where, f"{job.base[1]!r} is missing in the base {job.base[0].ref}")
        if not tensors and base is None:
            return None
        if not tensors:
            tensors = [base] if base is not None else []
        return places, tensors, base

    def _shaped(
        self,
        job: Job,
        inputs: Sequence[Input],
        tensors: list[Tensor],
        base: Tensor | None,
        notes: list[str],
    ) -> tuple[list[Tensor], Tensor | None]:
        """Brings tensors to one shape; they may only differ in their number of vocabulary rows."""
        over_tokens = role(job.name) != ""
        if over_tokens and self.vocabulary is not None and not self.vocabulary.same:
            notes.append("rows by token")
            refs = [model.ref for model in inputs]
            return self._by_token(job, refs, tensors, base)
        if over_tokens and self.vocabulary is None:
            self.tables |= {m.ref: x.shape[0] for m, x in zip(inputs, tensors, strict=False)}
            if base is not None and job.base is not None:
                self.tables[job.base[0].ref] = base.shape[0]
            kept = min(x.shape[0] for x in tensors) if base is None else base.shape[0]
            self.rows = min(self.rows or kept, kept)
        shapes = {x.shape for x in tensors} | ({base.shape} if base is not None else set())
        if len(shapes) == 1:
            return tensors, base
        if not over_tokens or len({shape[1:] for shape in shapes}) > 1:
            first = base if base is not None else tensors[0]
            other = next(x for x in tensors if x.shape != first.shape)
            raise RecipeError(
                job.part.where,
                f"{job.name} has shape {list(first.shape)} in {first.source} and"
                f" {list(other.shape)} in {other.source}; shapes must be equal",
            )
        rows = min(x.shape[0] for x in tensors) if base is None else base.shape[0]
        out: list[Tensor] = []
        for tensor in tensors:
            if tensor.shape[0] > rows:
                text = f"rows {rows} to {tensor.shape[0] - 1} of {tensor.source} left out"
                notes.append(text)
                self._loses(text, job.name)
            elif tensor.shape[0] < rows:
                notes.append(
                    f"the {rows - tensor.shape[0]} rows {tensor.source} lacks are the base's"
                )
            same = tensor.shape[0] == rows
            out.append(tensor if same else head_rows(tensor, rows, base))
        return out, base

    def _by_token(
        self, job: Job, refs: list[Ref], tensors: list[Tensor], base: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """Makes tensors over the output's vocabulary from tensors over the models' vocabularies."""
        assert self.vocabulary is not None
        pool = dict(zip(refs, tensors, strict=False))
        if base is not None and job.base is not None:
            pool[job.base[0].ref] = base
        if len({x.shape[1:] for x in pool.values()}) > 1:
            shapes = ", ".join(f"{list(x.shape)} in {x.source}" for x in pool.values())
            raise RecipeError(job.part.where, f"{job.name} has several widths: {shapes}")
        sizes = {ref: x.shape[0] for ref, x in pool.items()}
        tables = self._tables(job, pool)
        donors = None if tables is None else {ref: x.shape[0] for ref, x in tables.items()}
        key = (*sizes.items(), *([None] if donors is None else donors.items()))
        # The embedding and the head have the same sizes, and share the expensive results here.
        if key not in self.rowings:
            self.rowings[key] = self.vocabulary.rowings(sizes, donors)
        parts, tables = list(pool.values()), {**pool, **(tables or {})}
        rows = {}
        for ref, rowing in self.rowings[key].items():
            made = [Transplanted(pool[ref], tables[donor], making) for donor, making in rowing.made]
            for donor, making in rowing.made:
                width = tables[donor].shape[1]
                # Measurements show that sums that reproduce a donor's rows exactly may be worse
                # than a mean.
                if making.method == "omp" and making.k >= width:
                    self.notes.append(
                        f"transplant: k {making.k} is not below the {width} columns of {donor}, so"
                        " sums fit its rows exactly; a smaller k may give better ones"
                    )
            rows[ref] = Rows([*parts, *made], rowing.part, rowing.row, rowing.means)
        if base is None or job.base is None:
            return [rows[ref] for ref in refs], None
        return [rows[ref] for ref in refs] or [rows[job.base[0].ref]], rows[job.base[0].ref]

    def _tables(self, job: Job, pool: Mapping[Ref, Tensor]) -> dict[Ref, Tensor] | None:
        """Finds the matrix of a donor that is not merged; None if no rows can be made."""
        assert self.vocabulary is not None
        donor = self.inputs[self.vocabulary.donor]
        if any(len(x.shape) != 2 for x in pool.values()):
            return None
        if self.vocabulary.spec.transplant is None or donor.ref in pool:
            return {}
        table = donor.table(role(job.name))
        assert table is not None  # a model without an embedding cannot be a donor
        return {donor.ref: table}

    def _output_vocabulary(self) -> OutputVocabulary | None:
        """Makes the output's vocabulary, if the recipe requests a tokenizer."""
        spec = self.recipe.tokenizer
        if spec is None:
            return None
        sizes = {}
        for ref, model in self.inputs.items():
            embedding = model.embedding()
            if embedding is None:
                raise RecipeError(spec.where, f"the token embedding is missing in {ref}")
            sizes[ref] = embedding.shape[0]
        vocabularies = {ref: self.vocabularies.read(m) for ref, m in self.inputs.items()}
        donor = spec.source if isinstance(spec.source, Ref) else self.first.ref
        extras = self.inputs[donor].opened.extras
        base = self.recipe.base_model
        refs = [ref for ref in self.inputs if ref in self.merged]
        names: dict[Ref, dict[str, str]] = {}
        if spec.transplant is not None:
            names = {ref: roles(m.opened.extras) for ref, m in self.inputs.items()}
        vocabulary = output_vocabulary(spec, refs, base, vocabularies, sizes, extras, names)
        self.notes += vocabulary.notes
        return vocabulary

    def _extras(self, treatments: Sequence[Treatment]) -> dict[str, bytes | Path]:
        """Collects the plain files: the first model's, with the donor's tokenizer."""
        spec = self.recipe.tokenizer
        donor = self.first
        if spec is not None and isinstance(spec.source, Ref):
            donor = self.inputs[spec.source]
        extras: dict[str, bytes | Path] = {
            name: path
            for name, path in self.first.opened.extras.items()
            if not of_tokenizer(name) and carried(name)
        }
        if self.copy_tokenizer:
            extras |= {n: p for n, p in donor.opened.extras.items() if of_tokenizer(n)}
            if self.vocabulary is not None:
                extras |= self.vocabulary.files
            sources = {ref: model.opened.extras for ref, model in self.inputs.items()}
            extras |= chat_template(self.recipe, sources, extras)
        elif self.recipe.chat_template is not None:
            self.notes.append("chat_template is not written, as no tokenizer is")
        special = self._special_ids(donor)
        if special is not None and "generation_config.json" in extras:
            stated = config_of(extras, "generation_config.json")
            special |= config_of(donor.opened.extras, "generation_config.json")
            extras["generation_config.json"] = dump(patched_config(stated, special=special))
        if donor.opened.others:
            names = donor.opened.others
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            self._loses(f"files of {donor.ref} not carried: {', '.join(names[:5])}{more}")
        config = self.first.config
        if config:
            new = self._config(treatments, donor)
            if new != config:
                extras["config.json"] = dump(new)
        return extras

    def _special_ids(self, donor: Input) -> dict[str, Any] | None:
        """Returns the ids of the donor's special tokens by key; None to keep the first input's."""
        if donor is self.first or self.vocabulary is None or self.vocabulary.same:
            return None
        ids = self.vocabulary.ids
        named = {f"{role}_id": ids.get(text) for role, text in roles(donor.opened.extras).items()}
        inner = donor.config.get("text_config")
        return {**named, **(inner if isinstance(inner, dict) else {}), **donor.config}

    def _check_layers(self, config: dict[str, Any], order: Sequence[int]) -> None:
        """Checks that each layer computes the same function at its new position."""
        if changed := layers.changed_kind(self.first.config, config, order):
            if not self.allow_crimes:
                regardless = argument("allow_crimes", "True")
                raise RecipeError(
                    self.recipe.node.where,
                    f"config.json cannot state the layers in their new order: {changed}; "
                    f"{regardless} merges them regardless",
                )
            self.notes.append(f"a layer computes another function than before: {changed}")

    def _config(self, treatments: Sequence[Treatment], donor: Input) -> dict[str, Any]:
        """Makes the output's config.json from the first input's, corrected to the tensors."""
        changes: dict[str, Any] = {"dtype": self.recipe.out_dtype or self.recipe.dtype}
        layered = [m for m in self.recipe.modules if m.slices[0].sources[0].layers]
        if len(layered) == 1 and (len(self.recipe.modules) == 1 or is_main(layered[0].name)):
            changes["layers"] = [
                i for part in layered[0].slices for i in range(*(part.sources[0].layers or (0, 0)))
            ]
        elif layered:
            self.notes.append("config.json: the numbers of layers of the towers are unchanged")
        changes["special"] = self._special_ids(donor)
        # A head that is not written is the embedding, regardless of the config of the first input.
        if self.aliases and self.first.tied is False:
            changes["tied"] = True
        if self.vocabulary is None:
            vocabulary = self.vocabularies(donor)
        else:
            vocabulary = Vocabulary(self.vocabulary.ids, {}, None, "")
        written = {t.name: t for t in treatments}
        try:
            stated = patched_config(self.first.config, **changes)
        except ValueError as error:
            raise RecipeError(self.recipe.node.where, str(error)) from error
        if "layers" in changes and layers.available():
            self._check_layers(stated, changes["layers"])
        config, left = following(stated, written, vocabulary)
        for found in contradictions(stated, written):
            if found.repair == {found.key: None}:
                self.notes.append(f"config.json: {found.key} is left out, as {found.shown}")
        refused = [found for found in left if not _inherited(found, donor, vocabulary)]
        if refused and not self.allow_crimes:
            raise RecipeError(
                self.recipe.node.where,
                f"the output would contradict itself: {refused[0]}; {_remedy(refused[0])}",
            )
        self.notes += [f"the output contradicts itself: {found}" for found in left]
        return config

    def _summary(self, model: Input) -> InputSummary:
        size = sum(map(bytes_of, model.tensors.values()))
        part = "base" if model.ref == self.recipe.base_model else "model"
        part = part if model.ref in self.merged else "tokenizer"
        licence = licence_of(model.opened.path)
        return InputSummary(model.name, part, len(model.tensors), size, licence)


def _revisions(recipe: Recipe, refs: Sequence[Ref]) -> Iterator[Note]:
    """Yields a note for each requested revision of a checkpoint on this disk."""
    for ref in refs:
        for path, revision in ((ref.path, ref.revision), (ref.lora, ref.lora_revision)):
            if path is not None and revision is not None and located(path, revision) == path:
                text = f"revision {revision} has no effect: {path} lies on this disk"
                yield Note(recipe.place_of(ref), text)


def _inherited(found: Contradiction, donor: Input, vocabulary: Vocabulary | None) -> bool:
    """Checks whether an output may have a contradiction, because its donor has it and works.

    Some models have added tokens without a row, such as Gemma 3 without its vision tower. These are
    never produced, but a token of the core could be.
    """
    if found.key != TOKENIZER or vocabulary is None:
        return False
    table = donor.embedding()
    rows = 0 if table is None else table.shape[0]
    beyond = [token for token, i in vocabulary.ids.items() if i >= rows]
    same = found in contradictions_of(donor.opened, vocabulary)
    return same and all(token in vocabulary.added for token in beyond)


def _remedy(left: Contradiction) -> str:
    """Returns the advice for a contradiction that cannot be corrected."""
    if left.key == TOKENIZER:
        return "with tokenizer: {source: base} in the recipe tokens without a row are left out"
    regardless = argument("allow_crimes", "True")
    return f"correct the config.json of the input, or merge it regardless with {regardless}"


def _holds(dtype: np.dtype, other: np.dtype) -> bool:
    """Checks whether a floating-point dtype contains all numbers of another one."""
    if dtype == other:
        return True
    a, b = ml_dtypes.finfo(dtype), ml_dtypes.finfo(other)
    return a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp <= b.minexp


def _is_float(dtype: np.dtype) -> bool:
    """Checks whether a dtype is floating-point, including bfloat16 and the float8s."""
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def _dtype(name: str | None) -> np.dtype | None:
    return None if name is None else np.dtype(getattr(ml_dtypes, name, None) or name)
