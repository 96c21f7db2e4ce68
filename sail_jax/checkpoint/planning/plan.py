"""From a recipe and the headers of its checkpoints to what happens to every tensor of the output.

No entry of a tensor is read. The rules by which tensors are matched:

* By name, after `rename`. The output has the tensors of the base, or without one of the first
  model; what others have besides is an error unless `extra: ignore`, and what one lacks is an error
  unless `missing: skip` (it is left out) or `missing: base` (it counts as the base). Buffers that
  are computed (rotary frequencies, position ids, counters) are never a reason to refuse.
* A head that is tied to the embedding in all inputs is not written. If any input has its own, the
  output is untied, and tied inputs are merged by their embedding. A stored head that its config
  calls tied is the embedding's copy.
* Rows of embeddings and heads: by token, if a tokenizer is asked for and vocabularies differ; else
  by number. Then more rows than the base has are left out, and a row that a model lacks is taken
  from the base, so that its delta is 0; without a base the rows common to all are kept.
* Other shapes have to agree. Floating dtypes may differ; the output's is out_dtype, else dtype,
  else that of the base, or first model. Integers and bools are copied and have to agree.
* Layers are what `layers.position` finds. In slices, those of the output are numbered on; tensors
  before the layers (embeddings) come from the first slice's sources and those after them from the
  last slice's, all of them.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from sail_jax.checkpoint.formats.extras import carried
from sail_jax.checkpoint.planning.hyperparameters import Hyperparameters
from sail_jax.checkpoint.planning.inputs import (
    Input,
    Opened,
    is_derived,
    patched_config,
    unmatched_renames,
)
from sail_jax.checkpoint.planning.jobs import Job, is_main, jobs
from sail_jax.checkpoint.planning.layers import role
from sail_jax.checkpoint.planning.steps import Openings
from sail_jax.checkpoint.planning.templates import chat_template
from sail_jax.checkpoint.planning.tokenizers import Alignment, align, read_vocabulary
from sail_jax.checkpoint.recipe.recipes import Recipe, RecipeError, Ref, merged_sources
from sail_jax.checkpoint.recipe.yaml_tree import Where
from sail_jax.checkpoint.sources.rows import Rows, head_rows
from sail_jax.checks import nearest
from sail_jax.disk import StoreError
from sail_jax.merging.merge import Merge, identity
from sail_jax.merging.tensors import Shape, Tensor

__all__ = ["InputSummary", "Plan", "Treatment", "fingerprint", "plan"]


class Treatment(NamedTuple):
    """What happens to one tensor of the output.

    merge: None to copy models[0], bytes as they are, where the others, if there are any, have to
    agree. models: those that are merged, and owners: whose they are, as `InputSummary` names them;
    weights and the tuples among the options have one number for each. group: tensors of one group
    share one merge, and so its statistics of the tree. note: why it is copied, cropped, ...; "" if
    there is nothing to say.
    """

    name: str
    shape: Shape
    dtype: np.dtype
    merge: Merge | None
    models: tuple[Tensor, ...]
    owners: tuple[str, ...]
    base: Tensor | None
    weights: tuple[float, ...] | None
    group: int
    note: str

    @property
    def method(self) -> str:
        """The name of the merge, or "copy"."""
        return "copy" if self.merge is None else self.merge.name

    @property
    def options(self) -> dict[str, Any]:
        """The hyperparameters of the merge, but for PRNG keys."""
        given = {} if self.merge is None else self.merge.options
        return {name: value for name, value in given.items() if name != "key"}


class InputSummary(NamedTuple):
    """An input as messages and reports show it; size in bytes."""

    name: str
    role: str
    tensors: int
    size: int


class Plan(NamedTuple):
    """A merge, ready to be run.

    aliases: names that the output does not store, each with the tensor it is tied to. extras: files
    to write beside the tensors, as bytes or to be copied. notes: what the user should know.
    """

    method: str
    treatments: tuple[Treatment, ...]
    aliases: dict[str, str]
    extras: dict[str, bytes | Path]
    inputs: tuple[InputSummary, ...]
    compat: str
    seed: int
    notes: tuple[str, ...]


def plan(recipe: Recipe, open: Callable[[str], Opened]) -> Plan:
    """What the recipe does to every tensor, by the rules above.

    open: opens a checkpoint by its path (or path@revision); called once for each, and closing them,
    after the plan has been used, is up to the caller. RecipeError, or what `open` raises.
    """
    return _Planner(recipe, open).plan()


def fingerprint(plan: Plan) -> str:
    """64 hexadecimal digits that change with anything which changes the output: what is done, by
    which merges, to which tensors (by their source, dtype and shape; not their entries)."""

    def tensor(x: Tensor | None) -> Any:
        if isinstance(x, Rows):
            runs = hashlib.sha256(repr((x.runs, sorted(x.means.items()))).encode()).hexdigest()
            return [runs, *map(tensor, x.parts)]
        if x is None:
            return None
        return [x.name, x.source, getattr(x, "mark", ""), str(x.dtype), list(x.shape)]

    merges: dict[int, str] = {}
    digest = hashlib.sha256(json.dumps([plan.method, plan.compat, plan.seed]).encode())
    for t in plan.treatments:
        if t.merge is not None and t.group not in merges:
            merges[t.group] = identity(t.merge)
        done = merges.get(t.group, "copy") if t.merge is not None else "copy"
        parts = [t.name, list(t.shape), str(t.dtype), done, t.group, t.weights]
        parts += [tensor(t.base), *map(tensor, t.models)]
        digest.update(json.dumps(parts, sort_keys=True, default=str).encode())
    for name, data in sorted(plan.extras.items()):
        digest.update(name.encode() + (data if isinstance(data, bytes) else str(data).encode()))
    return digest.hexdigest()


class _Planner:
    def __init__(self, recipe: Recipe, open: Callable[[str], Opened]):
        self.recipe, self.entry = recipe, recipe.entry
        self.hyperparameters, self.notes = Hyperparameters(recipe), list[str]()
        named = "compat" in recipe.node.value or self.entry.merge is not None
        compat = "mergekit" if recipe.compat == "paper" else "paper"
        other = recipe.model_copy(update={"compat": compat})
        self.other = None if named else Hyperparameters(other)
        self.groups: dict[Any, int] = {}
        self.aliases: dict[str, str] = {}
        self.rowings: dict[tuple, Any] = {}
        openings = Openings(open, self.notes)
        self.inputs: dict[Ref, Input] = {}
        for ref in recipe.models():
            try:
                self.inputs[ref] = Input(ref, *openings(ref), recipe=recipe)
            except (TypeError, ValueError) as error:
                if not ref.steps or isinstance(error, (StoreError, RecipeError)):
                    raise
                raise RecipeError(_where(recipe, ref), f"{ref}: {error}") from error
        unmatched_renames(recipe, self.inputs.values())
        first = recipe.base_model or recipe.modules[0].slices[0].sources[0].model
        self.first = self.inputs[first]
        self.alignment = self._align()

    def plan(self) -> Plan:
        treatments = []
        for job in jobs(self.recipe, self.inputs, self.notes):
            treated = self._treat(job)
            if treated is not None:
                treatments.append(treated)
                self._note_convention(job, treated)
        if not treatments:
            self.notes.append("nothing to merge: the inputs have no tensors")
        self.notes += self.hyperparameters.notes()
        written = {treatment.name for treatment in treatments}
        self.aliases = {a: b for a, b in self.aliases.items() if b in written and a not in written}
        notes = list(dict.fromkeys(self.notes))
        if self.recipe.dtype is not None and self.recipe.compat == "mergekit":
            notes.append("dtype: what is written, not what is computed in: that is float32")
        return Plan(
            self.recipe.method,
            tuple(treatments),
            self.aliases,
            self._extras(treatments),
            tuple(self._summary(model) for model in self.inputs.values()),
            self.recipe.compat,
            self.recipe.seed,
            tuple(notes),
        )

    def _note_convention(self, job: Job, treatment: Treatment) -> None:
        """Says which convention counts where none is named and the other would merge otherwise."""
        if self.other is None or treatment.merge is None:
            return
        used, other = self.recipe.compat, self.other.recipe.compat
        if (
            merged_sources(self.recipe, job.part) != merged_sources(self.other.recipe, job.part)
            or self.hyperparameters.differs(self.other, job)
        ):  # fmt: skip
            self.notes.append(
                f"compat: {used}, since none was named; {other} gives other numbers here: name one"
            )
            self.other = None

    def _treat(self, job: Job) -> Treatment | None:
        notes: list[str] = []
        chosen = self.hyperparameters.of(job)
        gathered = self._gather(job, notes)
        if gathered is None:
            return None
        places, tensors, base = gathered
        weights, options = chosen.of(places)
        first = base or tensors[0]
        owner = [] if job.base is None else [str(job.base[0].ref)]
        owners = [str(job.sources[k][1].ref) for k in places] or owner
        everyone = [*([base] if places and base is not None else []), *tensors]
        if not all(_is_float(x.dtype) for x in everyone):
            return self._copied(job, everyone, owner + owners if places else owner, notes)
        tensors, base = self._shaped(job, [job.sources[k][1] for k in places], tensors, base, notes)
        dtype = _dtype(self.recipe.out_dtype or self.recipe.dtype) or first.dtype
        method = self.recipe.method
        if len(places) < self.entry.least:
            who = "the first model" if base is None else "the base"
            notes.append(f"too few models have it for {method}: as it is in {who}")
            method, weights, options = "passthrough", None, {"scale": 1.0}
            tensors, owners, base = [base or tensors[0]], owner or owners[:1], None
        normalised = method == "linear" and options.get("normalize", True)
        if normalised and weights is not None and abs(sum(weights)) < 1e-12:
            raise RecipeError(
                job.part.where, f"{job.name}: the weights of linear sum to 0: {list(weights)}"
            )
        same = dtype == tensors[0].dtype
        merge: Merge | None = None
        if method == "passthrough" and options.get("scale", 1.0) == 1.0 and same:
            weights = None
        else:
            merge = self.hyperparameters.merge(job, method, options, owners, base)
        group = self.groups.setdefault(merge and id(merge), len(self.groups))
        shape = tensors[0].shape if base is None else base.shape
        note = "; ".join(dict.fromkeys(notes))
        return Treatment(
            job.name, shape, dtype, merge, tuple(tensors), tuple(owners), base, weights, group, note
        )  # fmt: skip

    def _copied(
        self, job: Job, tensors: list[Tensor], owners: list[str], notes: list[str]
    ) -> Treatment:
        first = tensors[0]
        for other in tensors[1:]:
            if other.dtype != first.dtype or other.shape != first.shape:
                if is_derived(job.name):
                    continue
                raise RecipeError(
                    job.part.where,
                    f"{job.name} is {first.dtype}{list(first.shape)} in {first.source} and"
                    f" {other.dtype}{list(other.shape)} in {other.source}; integers and bools are"
                    " copied and have to agree",
                )
        if is_derived(job.name):
            tensors, owners = [first], owners[:1]
            notes.append("computed or counted, not learned: the first is copied")
        else:
            notes.append("not floating: copied; all inputs have to agree")
        group = self.groups.setdefault(None, len(self.groups))
        return Treatment(
            job.name, first.shape, first.dtype, None, tuple(tensors), tuple(owners), None, None,
            group, "; ".join(notes),
        )  # fmt: skip

    def _gather(
        self, job: Job, notes: list[str]
    ) -> tuple[list[int], list[Tensor], Tensor | None] | None:
        """The tensors that are merged, with their places among the sources, and the base's."""
        everyone = [model for _, model, _ in job.sources] + ([job.base[0]] if job.base else [])
        tied = role(job.name) == "head" and not job.name.endswith("bias")
        if tied and not any(model.has_own(job.name) for model in everyone):
            embedding = next((n for n in self.first.tensors if role(n) == "embedding"), None)
            if embedding is not None and any(model.tied is True for model in everyone):
                self.aliases[job.name] = embedding
                return None
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
            if tensor is None and is_derived(name):
                continue
            if tensor is None and self.recipe.missing == "skip":
                notes.append(f"{model.ref} lacks it and is left out")
                continue
            if tensor is None and self.recipe.missing == "base" and base is not None:
                notes.append(f"{model.ref} lacks it and counts as the base")
                tensor = base
            if tensor is None:
                remedy = "missing: skip leaves it out, missing: base counts it as the base"
                raise RecipeError(
                    source.where,
                    f"{model.ref} lacks {name!r}{nearest(name, model.tensors)}; {remedy}",
                )
            places.append(k)
            tensors.append(tensor)
        if job.base is not None and base is None:
            where = self.recipe.at("base_model")
            raise RecipeError(where, f"the base {job.base[0].ref} lacks {job.base[1]!r}")
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
        """Tensors of one shape: vocabulary rows by token or number, all others equal."""
        over_tokens = role(job.name) != ""
        if over_tokens and self.alignment is not None and not self.alignment.same:
            notes.append("rows by token")
            refs = [model.ref for model in inputs]
            return self._by_token(job, refs, tensors, base)
        shapes = {x.shape for x in tensors} | ({base.shape} if base is not None else set())
        if len(shapes) == 1:
            return tensors, base
        if not over_tokens or len({shape[1:] for shape in shapes}) > 1:
            first = base if base is not None else tensors[0]
            other = next(x for x in tensors if x.shape != first.shape)
            raise RecipeError(
                job.part.where,
                f"{job.name} is {list(first.shape)} in {first.source} and {list(other.shape)} in"
                f" {other.source}",
            )
        rows = min(x.shape[0] for x in tensors) if base is None else base.shape[0]
        out: list[Tensor] = []
        for tensor in tensors:
            if tensor.shape[0] > rows:
                notes.append(f"rows {rows} to {tensor.shape[0] - 1} of {tensor.source} left out")
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
        assert self.alignment is not None
        pool = dict(zip(refs, tensors, strict=False))
        if base is not None and job.base is not None:
            pool[job.base[0].ref] = base
        if len({x.shape[1:] for x in pool.values()}) > 1:
            shapes = ", ".join(f"{list(x.shape)} in {x.source}" for x in pool.values())
            raise RecipeError(job.part.where, f"{job.name} is of several widths: {shapes}")
        sizes = {ref: x.shape[0] for ref, x in pool.items()}
        key = tuple(sizes.items())
        if key not in self.rowings:
            self.rowings[key] = self.alignment.rowings(sizes)
        parts = list(pool.values())
        rows = {ref: Rows(parts, *rowing) for ref, rowing in self.rowings[key].items()}
        if base is None or job.base is None:
            return [rows[ref] for ref in refs], None
        return [rows[ref] for ref in refs] or [rows[job.base[0].ref]], rows[job.base[0].ref]

    def _align(self) -> Alignment | None:
        spec = self.recipe.tokenizer
        if spec is None:
            return None
        sizes = {}
        for ref, model in self.inputs.items():
            embedding = model.embedding()
            if embedding is None:
                raise RecipeError(spec.where, f"{ref} has no token embedding to go by")
            sizes[ref] = embedding.shape[0]
        vocabularies = {
            ref: read_vocabulary(model.opened.extras) for ref, model in self.inputs.items()
        }
        donor = spec.source if isinstance(spec.source, Ref) else self.first.ref
        extras = self.inputs[donor].opened.extras
        base = self.recipe.base_model
        refs = [ref for ref in self.inputs if ref in self._merged()]
        alignment = align(spec, refs, base, vocabularies, sizes, extras)
        self.notes += alignment.notes
        return alignment

    def _merged(self) -> set[Ref]:
        parts = [part for module in self.recipe.modules for part in module.slices]
        refs = {source.model for part in parts for source in part.sources}
        refs |= {part.base_model for part in parts if part.base_model is not None}
        return refs | ({self.recipe.base_model} if self.recipe.base_model else set())

    def _extras(self, treatments: Sequence[Treatment]) -> dict[str, bytes | Path]:
        spec = self.recipe.tokenizer
        donor = self.first
        if spec is not None and isinstance(spec.source, Ref):
            donor = self.inputs[spec.source]
        extras: dict[str, bytes | Path] = {
            name: path
            for name, path in self.first.opened.extras.items()
            if not _is_tokenizer(name) and carried(name)
        }
        extras |= {n: p for n, p in donor.opened.extras.items() if _is_tokenizer(n)}
        if self.alignment is not None:
            extras |= self.alignment.files
        sources = {ref: model.opened.extras for ref, model in self.inputs.items()}
        extras |= chat_template(self.recipe, sources, extras)
        config = self.first.config
        if config:
            new = patched_config(config, **self._changes(treatments))
            if new != config:
                extras["config.json"] = (
                    json.dumps(new, indent=2, ensure_ascii=False).encode() + b"\n"
                )
        return extras

    def _changes(self, treatments: Sequence[Treatment]) -> dict[str, Any]:
        changes: dict[str, Any] = {"dtype": self.recipe.out_dtype or self.recipe.dtype}
        embeddings = [t for t in treatments if role(t.name) == "embedding" and len(t.shape) == 2]
        before = self.first.embedding()
        if embeddings and before is not None and embeddings[0].shape[0] != before.shape[0]:
            changes["rows"] = embeddings[0].shape[0]
        heads = [t for t in treatments if role(t.name) == "head" and t.name.endswith("weight")]
        if heads and self.first.tied is True:
            changes["tied"] = False
        layered = [m for m in self.recipe.modules if m.slices[0].sources[0].layers]
        if len(layered) == 1 and (len(self.recipe.modules) == 1 or is_main(layered[0].name)):
            changes["layers"] = [
                i for part in layered[0].slices for i in range(*(part.sources[0].layers or (0, 0)))
            ]
        elif layered:
            self.notes.append(
                "config.json: the numbers of layers of the towers are left as they are"
            )
        return changes

    def _summary(self, model: Input) -> InputSummary:
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in model.tensors.values())
        part = "base" if model.ref == self.recipe.base_model else "model"
        part = part if model.ref in self._merged() else "tokenizer"
        return InputSummary(str(model.ref), part, len(model.tensors), size)


def _where(recipe: Recipe, ref: Ref) -> Where:
    """Where a model is first named among those to merge, or as the base."""
    parts = [part for module in recipe.modules for part in module.slices]
    named = [source.where for part in parts for source in part.sources if source.model == ref]
    return named[0] if named else recipe.at("base_model")


def _is_tokenizer(name: str) -> bool:
    return name.startswith(
        ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")
    ) or name.endswith((".model", ".tiktoken"))


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def _dtype(name: str | None) -> np.dtype | None:
    return None if name is None else np.dtype(getattr(ml_dtypes, name, None) or name)
