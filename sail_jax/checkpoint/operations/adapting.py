"""Extracts adapters from tuned models, merges them, and adds them to a base, on disk."""

import fnmatch
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from sail_jax import disk
from sail_jax.checkpoint.contents.layers import role
from sail_jax.checkpoint.executor import execute
from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.formats.files import DTYPES, CheckpointError
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.formats.table import of_output
from sail_jax.checkpoint.operations.results import Result
from sail_jax.checkpoint.operations.running import (
    DEFAULTS,
    Inputs,
    Path_,
    R,
    R_co,
    Ready,
    Request,
    RunOptions,
    bounds,
    carried_out,
    check_whole,
    state_of,
    unselected,
)
from sail_jax.checkpoint.operations.spooling import FactorSpool
from sail_jax.checkpoint.sources.adapted import Named, same
from sail_jax.checkpoint.sources.adapter_config import AdapterConfig, checked, ends_with
from sail_jax.checkpoint.sources.adapter_formats import in_peft
from sail_jax.checkpoint.sources.adapter_keys import PREFIX, Pair, read_keys
from sail_jax.checkpoint.sources.adapter_weights import KERNEL, head_of, is_conv1d
from sail_jax.checkpoint.sources.adapters import (
    config_for,
    notes_on,
    tokenizer_files,
    with_adapter,
)
from sail_jax.checkpoint.sources.factored import Difference, Factored, Joint, Scaled, Target
from sail_jax.checkpoint.sources.renamings import in_memory
from sail_jax.checks import argument, nearest, one_of
from sail_jax.configurations import class_of, look_up
from sail_jax.lora import check_energy, check_rank
from sail_jax.merging.merge import Merge
from sail_jax.merging.tensors import Tensor
from sail_jax.merging.work import Work, copy
from sail_jax.trees import some_paths

REST = "rest"
"""The pattern in `modules_to_save` that stands for all tensors without factors."""
_FILE = "adapter_model.safetensors"
_NARROW = ("float32", "bfloat16", "float16")
# Prefixes of names in models with a head. GPT-2 was published without its head.
_PREFIXES = {"gpt2": "transformer."}
# The embedding of T5 and similar models, which several modules share.
_SHARED = "shared.weight"
# Tasks for which PEFT adds no module of its own.
_TASKS = (
    (("ForCausalLM", "LMHeadModel"), "CAUSAL_LM"),
    (("ForConditionalGeneration",), "SEQ_2_SEQ_LM"),
)


class FactorRow(NamedTuple):
    """The factors of one module, and their error.

    Attributes:
      name: The name of the module.
      shape: The shape of the change in PEFT's order, (out, in).
      rank: The rank of the factors.
      norm: The Frobenius norm of the change.
      error: The Frobenius norm of the change minus the factors' product, divided by `norm`.
      energy: The fraction of `norm` squared that the factors keep.
    """

    name: str
    shape: tuple[int, int]
    rank: int
    norm: float
    error: float
    energy: float


@dataclass(frozen=True, kw_only=True, repr=False)
class Extracted(Result):
    """The result of `extract_adapter`.

    Attributes:
      rows: The modules with factors, in the order of the base.
      saved: The tensors that are stored whole.
      lost: Changed tensors that are missing in the adapter, with the reason.
    """

    rows: tuple[FactorRow, ...]
    saved: tuple[str, ...]
    lost: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, repr=False)
class MergedAdapters(Result):
    """The result of `merge_adapters`.

    Attributes:
      rows: The modules with factors.
    """

    rows: tuple[FactorRow, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class Applied(Result):
    """The result of `apply_adapter`.

    Attributes:
      changed: The number of tensors that the adapter changes.
    """

    changed: int


@dataclass(frozen=True)
class ExtractRequest(Request[Ready[Extracted]]):
    """The arguments of `extract_adapter`."""

    base: Path_
    tuned: Path_
    out: Path_
    rank: int | None = None
    energy: float | None = None
    modules_to_save: Sequence[str] = ()
    dtype: str = "float32"
    seed: int = 0

    def plan(self, inputs: Inputs) -> Ready[Extracted]:
        """Computes the factors, whose ranks determine the shapes of the output."""
        rank, energy, dtype, seed = self.rank, self.energy, self.dtype, self.seed
        _check_factors(rank, energy, dtype, Path(self.out), inputs.run)
        if rank is None and energy is None:
            raise ValueError(f"{argument('rank')} or {argument('energy')}: expected at least one")
        if isinstance(self.modules_to_save, str):
            raise ValueError(f"{argument('modules_to_save')}: expected a sequence of patterns")
        inputs.look_up([self.base, self.tuned], self.out)
        first, second = inputs(self.base), inputs(self.tuned)
        plan = _Extraction(first, second, self.modules_to_save)
        names = list(plan.pairs)
        mark = repr(["extract", rank, energy, dtype, seed, names, sorted(plan.whole)])

        def difference(name: str, spool: FactorSpool) -> Difference:
            new, old = plan.pairs[name]
            return Difference(
                name, new, old, spool.keep, rank=rank, energy=energy, dtype=DTYPES[dtype], seed=seed
            )

        spool = _spooled(difference, names, Path(self.out), mark, inputs)
        rows, works = _laid_out(spool, plan.targets, flipped=True)
        if not works and not plan.whole:
            spool.remove()
            lost = f"; changed: {some_paths([*plan.lost])}" if plan.lost else ""
            raise CheckpointError(
                f"{self.tuned} and {self.base} have equal matrices: no change to factor{lost}"
            )
        ranks = {row.name: row.rank for row in rows}
        biases = [key for key, (_, how) in plan.whole.items() if how == "bias"]
        for key, (tensor, how) in plan.whole.items():
            module = key.rpartition(".")[0]
            inner = ".base_layer" if how == "bias" and module in ranks else ""
            name = f"{PREFIX}{module}{inner}.{key.rpartition('.')[2]}"
            works.append(copy(name, tensor.dtype, Named(tensor, name)))
        kinds = {target.kind for target, _ in plan.targets if target.module in ranks}
        config = config_for(
            ranks, plan.saved, base_model=str(self.base), bias="all" if biases else "none",
            fan_in_fan_out="transposed" in kinds,
            task_type=_task(config_of(second.extras)),
        )  # fmt: skip
        make = functools.partial(
            Extracted, rows=tuple(rows), saved=tuple(plan.whole), lost=plan.lost
        )
        notes, files = (*unselected(second), *plan.notes), tokenizer_files(second.extras)
        return _adapter(make, Path(self.out), works, mark, inputs, spool, config, files, notes)


@dataclass(frozen=True)
class MergeAdaptersRequest(Request[Ready[MergedAdapters]]):
    """The arguments of `merge_adapters`."""

    adapters: Sequence[Path_]
    out: Path_
    weights: Sequence[float] | None = None
    rank: int | None = None
    method: str | Merge | None = None
    dtype: str = "float32"
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, inputs: Inputs) -> Ready[MergedAdapters]:
        """Computes the factors, whose ranks determine the shapes of the output."""
        adapters, weights, rank, dtype = self.adapters, self.weights, self.rank, self.dtype
        if isinstance(adapters, str | PathLike) or not adapters:
            raise ValueError("adapters: expected at least one, in a sequence")
        _check_factors(rank, None, dtype, Path(self.out), inputs.run)
        count = len(adapters)
        if weights is not None and (len(weights) != count or not all(map(math.isfinite, weights))):
            raise ValueError(
                f"{argument('weights')}: expected {count} finite numbers, one for each adapter, "
                f"got {list(weights)}"
            )
        merge = _merge(self.method, self.seed, self.options)
        inputs.look_up(adapters, self.out)
        opened = [inputs(x, adapters=True) for x in adapters]
        read = [_factors_of(x) for x in opened]
        targets, parts = _modules(opened, read)
        mark = repr(
            ["merge", weights, rank, dtype, merge and merge.identity, [*map(str, adapters)]]
        )
        how = {"merge": merge, "rank": rank, "dtype": DTYPES[dtype]}
        how["weights"] = [1.0] * count if weights is None else [*map(float, weights)]
        joint = lambda module, spool: Joint(module, parts[module], spool.keep, **how)  # noqa: E731
        spool = _spooled(joint, list(parts), Path(self.out), mark, inputs)
        rows, works = _laid_out(spool, [(target, target.module) for target in targets])
        if not works:
            spool.remove()
            raise CheckpointError("the merge of these adapters is 0 everywhere")
        configs = [config for config, _ in read]
        named = [config_of(x.extras, "adapter_config.json") for x in opened]
        bases = list(dict.fromkeys(x.get("base_model_name_or_path") for x in named))
        notes = []
        if len(bases) > 1:
            notes.append(f"the adapters have different bases: {', '.join(map(str, bases))}")
        config = config_for(
            {row.name: row.rank for row in rows}, base_model=bases[0],
            fan_in_fan_out=any(x.fan_in_fan_out for x in configs),
            task_type=next((x.task_type for x in configs if x.task_type), None),
        )  # fmt: skip
        files, note = _one_tokenizer(opened)
        make, notes = functools.partial(MergedAdapters, rows=tuple(rows)), (*notes, *note)
        return _adapter(make, Path(self.out), works, mark, inputs, spool, config, files, notes)


@dataclass(frozen=True)
class ApplyRequest(Request[Ready[Applied]]):
    """The arguments of `apply_adapter`."""

    base: Path_
    adapter: Path_
    out: Path_

    def plan(self, inputs: Inputs) -> Ready[Applied]:
        """Plans the sums of weights and factors from the headers."""
        inputs.look_up([self.base, self.adapter], self.out)
        base, adapter = inputs(self.base), inputs(self.adapter, adapters=True)
        view = with_adapter(base, adapter)
        works = view.works()
        changed = sum(base.tensors.get(name) is not x for name, x in view.tensors.items())
        return Ready(
            out=Path(self.out), run=inputs.run, works=works, limits=bounds(works, inputs.run),
            fingerprint="apply an adapter", inputs=(base, adapter), view=view,
            notes=(*unselected(base), *notes_on(base, view)),
            make=functools.partial(Applied, changed=changed),
        )  # fmt: skip


def extract_adapter(
    base: Path_,
    tuned: Path_,
    out: Path_,
    *,
    rank: int | None = None,
    energy: float | None = None,
    modules_to_save: Sequence[str] = (),
    dtype: str = "float32",
    seed: int = 0,
    run: RunOptions = DEFAULTS,
) -> Extracted:
    """Extracts a LoRA adapter from a tuned model and its base, matrix by matrix.

    The output is a folder that PEFT loads. `sail_jax.lora.approximate` factors every change of a
    matrix, with nearly the least error for the rank, or the smallest rank for the energy.
    Embeddings get `lora_embedding_A` and `lora_embedding_B`. If the base ties its head to its
    embedding, both get the factors. Each alpha equals its rank, so the scale is 1.

    Changes of other tensors (norms, biases) cannot be factored. They are lost unless
    `modules_to_save` includes them. The ranks determine the shapes of the output, so the factors
    are first written to a temporary folder next to it.

    Args:
      base: The model before training.
      tuned: The model after training.
      out: The path of the adapter, a folder.
      rank: The largest rank of a module.
      energy: The fraction of each change's squared singular values to keep, in (0, 1].
      modules_to_save: Patterns of names of modules that are stored whole if they changed, such as
        "lm_head" or "*norm". The word "rest" includes all tensors without factors; biases are then
        stored as with PEFT's `bias="all"`.
      dtype: The dtype of the factors: "float32", "bfloat16" or "float16".
      seed: The seed of random columns; see `sail_jax.lora.approximate`.

    Returns:
      The result, with the error of every module.

    Raises:
      ValueError: CheckpointError for checkpoints that cannot be read or do not fit each other, for
        identical models, and for an output that cannot be written; MergeError for insufficient
        memory; and for invalid arguments.

    >>> import numpy as np, tempfile
    >>> from sail_jax.checkpoint import save_checkpoint
    >>> folder = tempfile.mkdtemp()
    >>> save_checkpoint(f"{folder}/base", {"a.weight": np.zeros((3, 2), np.float32)})
    >>> save_checkpoint(f"{folder}/tuned", {"a.weight": np.ones((3, 2), np.float32)})
    >>> done = extract_adapter(f"{folder}/base", f"{folder}/tuned", f"{folder}/lora", rank=1)
    >>> done.rows[0].name, done.rows[0].rank, round(done.rows[0].error, 4)
    ('a', 1, 0.0)
    """
    request = ExtractRequest(base, tuned, out, rank, energy, modules_to_save, dtype, seed)
    return carried_out(request, run)


def merge_adapters(
    adapters: Sequence[Path_],
    out: Path_,
    *,
    weights: Sequence[float] | None = None,
    rank: int | None = None,
    method: str | Merge | None = None,
    dtype: str = "float32",
    seed: int = 0,
    run: RunOptions = DEFAULTS,
    **options: Any,
) -> MergedAdapters:
    """Merges LoRA adapters of one base into one, module by module, without a dense matrix.

    Without a method, the exact sum of the changes is written: factors are concatenated, and ranks
    add up. A `rank` then takes the best approximation of the sum. With a method, the core matrices
    of the adapters are merged (`sail_jax.lora.core_space`).

    Args:
      adapters: Folders in PEFT's layout, at least one.
      out: The path of the merged adapter, a folder.
      weights: One for each adapter, 1 by default.
      rank: The largest rank of a module; by default there is no limit.
      method: The name of a merging method, or a merge; None for the sum.
      dtype: The dtype of the factors: "float32", "bfloat16" or "float16".
      seed: The seed of a method with random draws.
      **options: Hyperparameters of a method given by name.

    Returns:
      The result. The error of a module is the error of its factors, relative to the merge of full
      rank.

    Raises:
      ValueError: CheckpointError for adapters that cannot be read, do not fit each other, or
        contain more than factors; MergeError for insufficient memory; and for invalid arguments.

    >>> import numpy as np, tempfile
    >>> from sail_jax.checkpoint import save_checkpoint
    >>> folder, config = tempfile.mkdtemp(), b'{"peft_type": "LORA", "r": 1, "lora_alpha": 1}'
    >>> for name, value in (("a", 1.0), ("b", 2.0)):
    ...     factors = {
    ...         "base_model.model.w.lora_A.weight": np.full((1, 2), value, np.float32),
    ...         "base_model.model.w.lora_B.weight": np.ones((3, 1), np.float32),
    ...     }
    ...     save_checkpoint(f"{folder}/{name}", factors, extras={"adapter_config.json": config})
    >>> done = merge_adapters([f"{folder}/a", f"{folder}/b"], f"{folder}/both", weights=[1, 0.5])
    >>> done.rows[0].rank, round(done.rows[0].norm**2, 4)  # 1 + 0.5 * 2 = 2, six times
    (2, 24.0)
    """
    request = MergeAdaptersRequest(adapters, out, weights, rank, method, dtype, seed, options)
    return carried_out(request, run)


def apply_adapter(
    base: Path_, adapter: Path_, out: Path_, *, run: RunOptions = DEFAULTS
) -> Applied:
    """Adds a LoRA adapter to its base, and writes the model, tensor by tensor.

    A recipe with the single model `base+adapter` does the same. See
    `sail_jax.checkpoint.sources.adapters.adapted` for the possible contents of an adapter.

    Args:
      base: The model.
      adapter: A folder in PEFT's layout.
      out: The path of the adapted model.

    Returns:
      The result.

    Raises:
      ValueError: CheckpointError for inputs that cannot be read or do not fit each other, and for
        an output that cannot be written; MergeError for insufficient memory.

    >>> import numpy as np, tempfile
    >>> from sail_jax.checkpoint import load_checkpoint, save_checkpoint
    >>> folder = tempfile.mkdtemp()
    >>> save_checkpoint(f"{folder}/base", {"a.weight": np.zeros((3, 2), np.float32)})
    >>> save_checkpoint(f"{folder}/tuned", {"a.weight": np.full((3, 2), 2, np.float32)})
    >>> lora = extract_adapter(f"{folder}/base", f"{folder}/tuned", f"{folder}/lora", rank=1).out
    >>> done = apply_adapter(f"{folder}/base", lora, f"{folder}/out")
    >>> load_checkpoint(done.out)["a.weight"].round(4).tolist()
    [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
    """
    return carried_out(ApplyRequest(base, adapter, out), run)


# --- what a tuned model changes


class _Extraction:
    """The treatment of every tensor of a tuned model.

    Attributes:
      pairs: The tensors after and before, by the name of the factors.
      targets: Modules with factors, with the name of these factors; a tied head shares the
        embedding's factors.
      whole: Tensors that are stored, by name, with "module" or "bias".
      saved: The modules of tensors marked "module".
      lost: Tensors that changed and are not stored, with the reason.
      notes: Notes for the user.
    """

    def __init__(self, base: Checkpoint, tuned: Checkpoint, patterns: Sequence[str]) -> None:
        self._patterns = [p for p in patterns if p != REST]
        self._rest = REST in patterns
        self._model = config_of(base.extras)
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}
        self.targets: list[tuple[Target, str]] = []
        self.whole: dict[str, tuple[Tensor, str]] = {}
        self.saved: set[str] = set()
        self.lost: dict[str, str] = {}
        self.notes: list[str] = []
        model = config_of(tuned.extras) or self._model
        self._new = _prefixed(in_memory(tuned.tensors, model), model)
        self._old = _renamed(in_memory(base.tensors, self._model or model), self._new)
        self._untie(tuned)
        if not self._old.keys() & self._new.keys():
            raise CheckpointError(f"{tuned.path} and {base.path} have no tensor in common")
        if missing := [name for name in self._old if name not in self._new]:
            self.notes.append(f"{tuned.path} lacks {some_paths(missing)}")
        for pattern in self._patterns:
            for module in filter(self._named(pattern), self._modules()):
                self._save_module(module)
        self._factor(tuned.path)
        self._keep_rest()
        if unused := [p for p in self._patterns if not any(map(self._named(p), self._modules()))]:
            raise CheckpointError(
                f"{argument('modules_to_save')}: no module {unused[0]!r} in {tuned.path}"
                f"{nearest(unused[0], self._modules())}"
            )

    def _untie(self, tuned: Checkpoint) -> None:
        """Adds the head of a model with a tied head, because PEFT wraps both modules."""
        head = head_of(self._old, self._model, filter(_is_head, self._new))
        head = next(iter(in_memory({head: None}, self._model)))
        embeddings = [n for n, x in self._old.items() if role(n) == "embedding" and x.shape[1:]]
        if not head or not embeddings or embeddings[0] not in self._new:
            return
        self._old.setdefault(head, self._old[embeddings[0]])
        if head not in self._new:
            self._new[head] = self._new[embeddings[0]]

    def _modules(self) -> list[str]:
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self._new if "." in name))

    @staticmethod
    def _named(pattern: str) -> Callable[[str], bool]:
        return lambda module: ends_with(module, pattern) or fnmatch.fnmatchcase(module, pattern)

    def _changed(self, name: str) -> bool:
        """Checks whether a tensor is new, or has different values."""
        return name not in self._old or not same(self._new[name], self._old[name])

    def _save_module(self, module: str) -> None:
        """Stores all tensors of a module if it changed, because PEFT expects all of them."""
        names = [name for name in self._new if name.startswith(f"{module}.")]
        if module in self.saved or not any(map(self._changed, names)):
            return
        self.saved.add(module)
        self.whole |= {name: (self._new[name], "module") for name in names}

    def _factor(self, path: Path) -> None:
        """Pairs the matrices, and finds the tensors without factors."""
        of_pair: dict[tuple[int, int], str] = {}
        for name, new in self._new.items():
            if name in self.whole:
                continue
            old = self._old.get(name)
            if reason := self._no_factors(name, new, old):
                if self._changed(name):
                    self.lost[name] = reason
                continue
            assert old is not None
            module, _, parameter = name.rpartition(".")
            key = of_pair.setdefault((id(new), id(old)), name)
            self.pairs.setdefault(key, (new, old))
            transposed = parameter == KERNEL or is_conv1d(module, self._model)
            self.targets.append((Target.of(module, transposed), key))
        resized = [name for name in self.lost if self._resized(name)]
        if resized and not self._rest:
            raise CheckpointError(
                f"{path}: '{resized[0]}' has shape {list(self._new[resized[0]].shape)}, but "
                f"{list(self._old[resized[0]].shape)} in the base; store it whole with "
                f"{argument('modules_to_save')} {resized[0].rpartition('.')[0]}"
            )

    def _resized(self, name: str) -> bool:
        """Checks whether a tensor has a different shape in the base."""
        return name in self._old and self._new[name].shape != self._old[name].shape

    def _no_factors(self, name: str, new: Tensor, old: Tensor | None) -> str:
        """Returns the reason why a tensor gets no factors; "" if it gets some."""
        if old is None:
            return "new in the tuned model"
        if new.shape != old.shape:
            return f"its shape is {list(new.shape)}, in the base {list(old.shape)}"
        if not all(x.dtype.name.startswith(("float", "bfloat")) for x in (new, old)):
            return f"{new.dtype}, not floating"
        if len(new.shape) != 2 or 0 in new.shape:
            return f"shape {list(new.shape)}, only matrices have factors"
        module, _, parameter = name.rpartition(".")
        if not module or parameter not in ("weight", KERNEL):
            return "not the weight of a module"
        if name.endswith(_SHARED):
            return "shared by modules, and PEFT changes only one of them"
        return ""

    def _keep_rest(self) -> None:
        """Stores the tensors without factors, if requested."""
        if not self._rest:
            return
        for name in list(self.lost):
            module, _, parameter = name.rpartition(".")
            inside = any(f"{t.module}.".startswith(f"{module}.") for t, _ in self.targets)
            if parameter == "bias" and name in self._old and not self._resized(name):
                self.whole[name] = self._new[name], "bias"
            elif not module or inside or name.endswith(_SHARED):
                continue
            else:
                self._save_module(module)
            del self.lost[name]


def _prefixed(tensors: Mapping[str, Tensor], model: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a model by their names with the head's prefix, as PEFT wraps them."""
    prefix = _PREFIXES.get(str(look_up(model, "model_type")), "")
    headless = not class_of(model).endswith("LMHeadModel")
    if headless or any(name.startswith(prefix) for name in tensors):
        return dict(tensors)
    return {name if _is_head(name) else prefix + name: x for name, x in tensors.items()}


def _renamed(base: Mapping[str, Tensor], tuned: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a base by the names of the tuned model.

    The prefix, such as "transformer.", is missing in a model that was saved without its head.
    """
    full = {name.partition(".")[2]: name for name in tuned if name not in base}
    return {name if name in tuned else full.get(name, name): x for name, x in base.items()}


def _is_head(name: str) -> bool:
    """Checks whether a weight, not a bias, computes the output tokens."""
    return role(name) == "head" and name.endswith("weight")


def _task(model: Mapping[str, Any]) -> str | None:
    """PEFT's name for the model's task; None if PEFT adds modules for it."""
    fitting = (task for ends, task in _TASKS if class_of(model).endswith(ends))
    return next(fitting, None)


# --- the adapters that are merged


def _factors_of(adapter: Checkpoint) -> tuple[AdapterConfig, dict[str, Pair]]:
    """Returns the configuration and the factors of an adapter, which may contain nothing else."""
    tensors, content, _ = in_peft(adapter)
    if not content:
        raise CheckpointError(f"{adapter.path} is not an adapter: it lacks an adapter_config.json")
    config = checked(content, str(adapter.path))
    stated = read_keys(tensors, config)
    more = [*stated.whole, *stated.tokens]
    for pair in stated.pairs:
        shapes = [x.shape for x in pair.parts.values()]
        if pair.parts.keys() != {"A", "B"} or pair.nested or config.parameters(pair.module):
            more.append(pair.module)
        elif [*map(len, shapes)] != [2, 2] or shapes[0][0] != shapes[1][1]:
            A, B = (pair.parts[side].shape for side in "AB")
            raise CheckpointError(
                f"{adapter.path}: {pair.module!r}: expected A [rank, in] and B [out, rank], got "
                f"{A} and {B}"
            )
    if more:
        raise CheckpointError(
            f"{adapter.path}: expected only factors of matrices, got more for {some_paths(more)}; "
            "merge the adapted models with a recipe, with models 'base+adapter'"
        )
    return config, {pair.module: pair for pair in stated.pairs}


def _modules(
    inputs: Sequence[Checkpoint], read: Sequence[tuple[AdapterConfig, Mapping[str, Pair]]]
) -> tuple[list[Target], dict[str, list[Scaled | None]]]:
    """Returns all modules, and the factors of each in each adapter."""
    targets, parts = [], {}
    for module in dict.fromkeys(name for _, pairs in read for name in pairs):
        own = [
            Scaled(pairs[module], config.scale(module)) if module in pairs else None
            for config, pairs in read
        ]
        kinds = {_kind(part.pair) for part in own if part}
        if len(kinds) > 1:
            where = [str(x.path) for x, part in zip(inputs, own, strict=True) if part]
            raise CheckpointError(
                f"{' and '.join(where)} change {module!r} of different shapes or kinds: "
                + ", ".join(f"{kind} {list(shape)}" for kind, shape in sorted(kinds))
            )
        ((kind, _),) = kinds
        targets.append(Target(module, kind))
        parts[module] = own
    return targets, parts


def _kind(pair: Pair) -> tuple[str, tuple[int, int]]:
    """Returns the kind of a module, as in `Target`, and the shape of B A."""
    kind = "embedding" if pair.embedding else "linear"
    return kind, (pair.parts["B"].shape[0], pair.parts["A"].shape[1])


def _merge(method: str | Merge | None, seed: int, options: Mapping[str, Any]) -> Merge | None:
    """Returns the merge of a method by name."""
    if not isinstance(method, str):
        if options:
            raise ValueError(f"{min(options)} is an option of a method, but no method is given")
        return method
    from sail_jax import methods

    known = methods.options_of(method)
    if methods.example(method) is None:
        raise ValueError(f"{argument('method')}: {method} needs data, which adapters do not have")
    for name in options:
        if name not in known:
            raise ValueError(f"unknown option {name!r} of {method}{nearest(name, known)}")
    if "key" in known and "key" not in options:
        import jax

        options = {**options, "key": jax.random.key(seed)}
    try:
        return methods.get(method)(**options)
    except TypeError as error:
        raise ValueError(f"{method}: {error}") from error


def _one_tokenizer(
    inputs: Iterable[Checkpoint],
) -> tuple[dict[str, Path | bytes], list[str]]:
    """Returns the files of the adapters' common tokenizer, or a note that they differ."""
    found = [files for files in (tokenizer_files(x.extras) for x in inputs) if files]
    contents = {tuple(sorted((n, _bytes(f)) for n, f in files.items())) for files in found}
    if len(contents) > 1:
        return {}, ["the adapters have different tokenizers: none is written"]
    return dict(found[0]) if found else {}, []


def _bytes(file: Path | bytes) -> bytes:
    return file if isinstance(file, bytes) else file.read_bytes()


# --- what extracting and merging share


def _check_factors(
    rank: int | None, energy: float | None, dtype: str, out: Path, run: RunOptions
) -> None:
    """Checks the options of factors that are written."""
    if rank is not None:
        check_rank(rank)
    if energy is not None:
        check_energy(energy)
    one_of(argument("dtype"), dtype, _NARROW)
    check_whole(run)
    if run.format not in (None, "safetensors"):
        raise ValueError(
            f"{argument('format')}: an adapter is written as safetensors, got {run.format!r}"
        )
    if of_output(out) is not None:
        raise CheckpointError(f"{out}: an adapter is a folder, not a {out.suffix} file")


@dataclass(frozen=True, kw_only=True)
class _Laid(Ready[R_co]):
    """Factors that have been computed, laid out as an adapter.

    Attributes:
      spool: The folder of the factors, which is removed when the adapter is complete.
    """

    spool: FactorSpool

    def written(self) -> None:
        self.spool.remove()


def _spooled(
    make: Callable[[str, FactorSpool], Factored],
    names: Sequence[str],
    out: Path,
    mark: str,
    inputs: Inputs,
) -> FactorSpool:
    """Computes factors, the largest tensors first, without laying them out."""
    run, state = inputs.run, state_of(inputs.opened)
    fingerprint = disk.sha256(repr([mark, state]).encode())
    spool = inputs.holds(FactorSpool(out, fingerprint, names, run.resume))
    made = sorted((make(name, spool) for name in names), key=lambda x: -x.reads)
    works = [copy(x.name, x.dtype, x) for x in made]
    reads = {x.name: x.reads for x in made}
    total = sum(reads.values())
    done = sum(reads[name] for name in spool.finished)

    def progress(_: int, __: int, name: str) -> None:
        # The size of a work is that of its output, the rank, but most of the time is spent on
        # reading inputs.
        nonlocal done
        done += reads[name]
        if run.progress is not None:
            run.progress(done, total, name)

    execute(works, spool, bounds(works, run), allow_nonfinite=True, progress=progress)
    return spool


def _laid_out(
    spool: FactorSpool, targets: Sequence[tuple[Target, str]], *, flipped: bool = False
) -> tuple[list[FactorRow], list[Work]]:
    """Returns the rows of the table, and the works that write the factors. Rank 0 has neither.

    With `flipped`, factors belong to tensors in the file's order; otherwise they are B and A.
    """
    rows, works = [], []
    for target, name in targets:
        rank, norm, error = spool.norms(name)
        if not rank:
            continue
        turned = flipped and target.kind != "linear"
        A, B = ("left", "right") if turned else ("right", "left")
        factors = [
            spool.tensor(key, name, side, turned)
            for key, side in zip(target.keys(), (A, B), strict=True)
        ]
        works += [copy(x.name, x.dtype, x) for x in factors]
        relative = error / norm if norm else 0.0
        shape = (factors[1].shape[0], factors[0].shape[1])
        rows.append(FactorRow(target.module, shape, rank, norm, relative, 1 - relative**2))
    return rows, works


def _adapter(
    make: Callable[..., R],
    out: Path,
    works: Sequence[Work],
    mark: str,
    inputs: Inputs,
    spool: FactorSpool,
    config: Mapping[str, Any],
    files: Mapping[str, Path | bytes],
    notes: tuple[str, ...],
) -> Ready[R]:
    """Returns the plan of an adapter, from its factors in a spool."""
    text = json.dumps(config, indent=2).encode() + b"\n"
    return _Laid(
        out=out, works=tuple(works), limits=bounds(works, inputs.run), fingerprint=mark,
        run=replace(inputs.run, format=None, allow_nonfinite=True, progress=None),
        inputs=tuple(inputs.opened), make=make, notes=notes, file=_FILE, spool=spool,
        files={**files, "adapter_config.json": text},
    )  # fmt: skip
