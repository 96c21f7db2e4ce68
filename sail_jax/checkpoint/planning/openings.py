"""Opens the inputs of a recipe, and applies their operations before they are merged.

An input may be adapted, grown, and aligned to another, in this order. The result is a checkpoint
whose tensors are computed as they are read (see `sail_jax.checkpoint.sources`). The planner treats
it like any other.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping

from sail_jax.checkpoint.contents.kinds import check_model
from sail_jax.checkpoint.formats import hub, runs
from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.recipe.parts import Alignment, Growth, Ref
from sail_jax.checkpoint.sources.adapters import notes_on, with_adapter
from sail_jax.checkpoint.sources.view import View
from sail_jax.merging.tensors import Tensor


def located(path: str, revision: str | None) -> str:
    """Returns the path to open for a checkpoint, or an adapter, of a recipe.

    Args:
      path: Its path.
      revision: Its revision, or the step of a run; None without one.

    Returns:
      path@revision. It is the path alone if there is no revision, or for a path on this disk,
      unless it is a run or a folder of the Hub's cache.
    """
    if revision is None:
        return path
    whole = f"{path}@{revision}"
    alone = os.path.exists(path) and not os.path.exists(whole) and not hub.has_revisions(path)
    return path if alone and runs.split(whole)[1] is None else whole


def paths(refs: Iterable[Ref]) -> Iterator[str]:
    """Lists the paths to open for the inputs of a recipe.

    Args:
      refs: The inputs in the recipe.

    Yields:
      The paths of checkpoints, of adapters, and of models that others are aligned to.
    """
    for ref in refs:
        yield located(ref.path, ref.revision)
        if ref.lora is not None:
            yield located(ref.lora, ref.lora_revision)
        yield from paths(step.to for step in ref.steps if isinstance(step, Alignment))


class Openings:
    """Opens the inputs of a recipe, each path once, and applies each operation once.

    Args:
      open: Opens a checkpoint by its path.
      select: Which tensors of each model are taken; see `sail_jax.merging.selection`.
      notes: A list that collects notes for the user, such as the losses of a growth.
      rename: Renames weights of an adapter that are missing in its base; None renames none.
    """

    def __init__(
        self,
        open: Callable[[str], Checkpoint],
        select: str | None,
        notes: list[str],
        rename: Callable[[str], str] | None = None,
    ) -> None:
        self._open, self._select, self._notes, self._rename = open, select, notes, rename
        self._opened: dict[str, Checkpoint] = {}
        self._made: dict[Ref, Checkpoint] = {}

    def __call__(self, ref: Ref) -> Checkpoint:
        """Opens an input.

        Args:
          ref: The checkpoint in the recipe.

        Returns:
          The checkpoint, with its adapter, after all its operations.
        """
        if ref not in self._made:
            self._made[ref] = self._stepped(ref) if ref.steps else self._adapted(ref)
        return self._made[ref]

    def rest(self, ref: Ref) -> Mapping[str, Tensor]:
        """Returns the tensors of a model that were not selected, as they are stored.

        Args:
          ref: The checkpoint in the recipe.

        Returns:
          The tensors by name.
        """
        return self._path(ref.path, ref.revision).rest

    def about(self, ref: Ref) -> list[str]:
        """Lists which part of a model's path was opened, if not all of it.

        Args:
          ref: The checkpoint in the recipe.

        Returns:
          Sentences; empty if all of it was opened.
        """
        said = self._path(ref.path, ref.revision).about()
        if ref.lora is not None:
            adapter = self._path(ref.lora, ref.lora_revision)
            said += [f"adapter: {sentence}" for sentence in adapter.about()]
        return said

    def _path(self, path: str, revision: str | None) -> Checkpoint:
        """Opens the checkpoint at a path, once."""
        place = located(path, revision)
        if place not in self._opened:
            self._opened[place] = self._open(place)
        return self._opened[place]

    def _adapted(self, ref: Ref) -> Checkpoint:
        """Opens a model, adds its adapter, and notes the adapter's other changes."""
        model = self._path(ref.path, ref.revision)
        # With None, the function that opened it may have selected the leaves of a known state.
        if self._select is not None or model.selection is None:
            model.select(self._select)
        check_model(model)
        if ref.lora is None:
            return model
        view = with_adapter(model, self._path(ref.lora, ref.lora_revision), rename=self._rename)
        self._notes += [f"{ref}: {note}" for note in notes_on(model, view)]
        return view

    def _stepped(self, ref: Ref) -> Checkpoint:
        """Applies the last operation of a model, after the earlier ones.

        Each result is cached by its sequence of operations, so models with the same first
        operations (grown equally, then aligned to different ones) share these checkpoints.
        """
        *earlier, last = ref.steps
        before = self(ref._replace(steps=tuple(earlier)))
        if isinstance(last, Growth):
            return self._grown(ref, before, last)
        return self._aligned(ref, before, last)

    def _grown(self, ref: Ref, checkpoint: Checkpoint, step: Growth) -> View:
        """Grows a checkpoint, and notes the losses.

        If the growth must be lossless, both networks are run before anything is written.
        """
        from sail_jax.checkpoint.sources.agreement import verdict
        from sail_jax.checkpoint.sources.grown import growth_view, measured, require_exact

        view, growth = growth_view(checkpoint, step.to, step.method, seed=step.seed, **step.options)
        lossless = step.options.get("require_lossless")
        agreed, failed = measured(view, growth, certify=None if lossless else False)
        if lossless:
            require_exact(
                checkpoint.path, agreed, failed,
                "a recipe runs known architectures up to 1 GiB, so grow the model separately and "
                "use the result",
            )  # fmt: skip
        self._notes.append(f"{ref}: grown; exactness: {verdict(agreed)}")
        lost = growth.report.lost
        self._notes += [f"{ref}: known loss: {lost}"] if lost else []
        self._notes += [f"{ref}: {note}" for note in growth.notes]
        return view

    def _aligned(self, ref: Ref, checkpoint: Checkpoint, step: Alignment) -> View:
        """Aligns a checkpoint to another, and notes the distance before and after."""
        from sail_jax.checkpoint.sources.aligned import align_maps, aligned_view

        reference = self(step.to)
        config = config_of(checkpoint.extras)
        if not config:
            raise ValueError("without a config.json, the spaces to align are unknown")
        aligned = align_maps(reference, checkpoint, config, **step.options)
        before, after = aligned.distance
        self._notes.append(f"{ref}: relative distance {before:.3g}, aligned {after:.3g}")
        self._notes += [f"{ref}: {note}" for note in aligned.notes]
        mark = hashlib.sha256(repr(ref).encode()).hexdigest()
        return aligned_view(checkpoint, aligned, how=f"aligned to {step.to}", mark=mark)
