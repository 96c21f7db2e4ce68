"""Opens the inputs of a recipe, and does to them what is asked for before they are merged.

An input may get an adapter, be grown, and be put into another's basis, in this order. The outcome
is a checkpoint whose tensors are computed when they are read (see `sail_jax.checkpoint.sources`),
which the planner takes like any other.
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
from sail_jax.merging.selection import check_weights
from sail_jax.merging.tensors import Tensor


def located(path: str, revision: str | None) -> str:
    """Tells what is opened for a checkpoint, or an adapter, that a recipe names.

    Args:
      path: Its path.
      revision: Its revision, or the step of a run; None if none is asked for.

    Returns:
      path@revision; the path alone without a revision, or if it is on this disk, where only runs
      and folders of the Hub's cache have revisions.
    """
    if revision is None:
        return path
    whole = f"{path}@{revision}"
    alone = os.path.exists(path) and not os.path.exists(whole) and not hub.has_revisions(path)
    return path if alone and runs.split(whole)[1] is None else whole


def paths(refs: Iterable[Ref]) -> Iterator[str]:
    """Lists what is opened for the inputs of a recipe.

    Args:
      refs: The inputs, as the recipe names them.

    Yields:
      The paths of checkpoints, adapters, and models that others are aligned to.
    """
    for ref in refs:
        yield located(ref.path, ref.revision)
        if ref.lora is not None:
            yield located(ref.lora, ref.lora_revision)
        yield from paths(step.to for step in ref.steps if isinstance(step, Alignment))


class Openings:
    """Opens the inputs of a recipe, each path once, and carries out each step once.

    Args:
      open: Opens a checkpoint by its path.
      select: Which tensors of each model are taken; see `sail_jax.merging.selection`.
      notes: A list to which is added what the user should know, such as what a growth loses.
    """

    def __init__(
        self, open: Callable[[str], Checkpoint], select: str | None, notes: list[str]
    ) -> None:
        self._open, self._select, self._notes = open, select, notes
        self._opened: dict[str, Checkpoint] = {}
        self._made: dict[Ref, Checkpoint] = {}

    def __call__(self, ref: Ref) -> Checkpoint:
        """Opens an input.

        Args:
          ref: The checkpoint as the recipe names it.

        Returns:
          The checkpoint, with its adapter, after all that is done to it.
        """
        if ref not in self._made:
            self._made[ref] = self._stepped(ref) if ref.steps else self._adapted(ref)
        return self._made[ref]

    def rest(self, ref: Ref) -> Mapping[str, Tensor]:
        """Returns the tensors of a model that were not selected, as they are stored.

        Args:
          ref: The checkpoint as the recipe names it.

        Returns:
          The tensors by name.
        """
        return self._path(ref.path, ref.revision).rest

    def about(self, ref: Ref) -> list[str]:
        """Lists what of a model's path was opened, if that is not all of it.

        Args:
          ref: The checkpoint as the recipe names it.

        Returns:
          Sentences; none if it is all of it.
        """
        said = self._path(ref.path, ref.revision).about()
        if ref.lora is not None:
            adapter = self._path(ref.lora, ref.lora_revision)
            said += [f"adapter: {sentence}" for sentence in adapter.about()]
        return said

    def _path(self, path: str, revision: str | None) -> Checkpoint:
        """Opens what lies at a path, once."""
        place = located(path, revision)
        if place not in self._opened:
            self._opened[place] = self._open(place)
        return self._opened[place]

    def _adapted(self, ref: Ref) -> Checkpoint:
        """Opens a model, adds its adapter, and notes what else that changes."""
        model = self._path(ref.path, ref.revision)
        # Whoever opened it may have selected what the tree shows, which is what None means.
        if self._select is not None or model.selection is None:
            model.select(self._select)
        if model.selection is not None:
            check_weights(model.selection)
        check_model(model)
        if ref.lora is None:
            return model
        view = with_adapter(model, self._path(ref.lora, ref.lora_revision))
        self._notes += [f"{ref}: {note}" for note in notes_on(model, view)]
        return view

    def _stepped(self, ref: Ref) -> Checkpoint:
        """Does the last of a model's steps, after those before it.

        Models that share their first steps (grown alike, then aligned to different ones) share
        these checkpoints, as each is kept under the steps that led to it.
        """
        *earlier, last = ref.steps
        before = self(ref._replace(steps=tuple(earlier)))
        if isinstance(last, Growth):
            return self._grown(ref, before, last)
        return self._aligned(ref, before, last)

    def _grown(self, ref: Ref, checkpoint: Checkpoint, step: Growth) -> View:
        """Grows a checkpoint, and notes what that loses.

        Both networks are run, before anything is written, if the growth is to be lossless.
        """
        from sail_jax.checkpoint.sources.agreement import verdict
        from sail_jax.checkpoint.sources.grown import growth_view, measured, require_exact

        view, growth = growth_view(checkpoint, step.to, step.method, seed=step.seed, **step.options)
        lossless = step.options.get("require_lossless")
        agreed, failed = measured(view, growth, certify=None if lossless else False)
        if lossless:
            require_exact(
                checkpoint.path, agreed, failed,
                "a recipe runs known architectures up to 1 GiB, so grow the model by itself and "
                "name the outcome",
            )  # fmt: skip
        self._notes.append(f"{ref}: grown; exactness: {verdict(agreed)}")
        lost = growth.report.lost
        self._notes += [f"{ref}: lost by its axes: {lost}"] if lost else []
        self._notes += [f"{ref}: {note}" for note in growth.notes]
        return view

    def _aligned(self, ref: Ref, checkpoint: Checkpoint, step: Alignment) -> View:
        """Puts a checkpoint into the basis of another, and notes how near that brings them."""
        from sail_jax.checkpoint.sources.aligned import align_maps, aligned_view

        reference = self(step.to)
        config = config_of(checkpoint.extras)
        if not config:
            raise ValueError("without a config.json it is not known which spaces to align")
        aligned = align_maps(reference, checkpoint, config, **step.options)
        before, after = aligned.distance
        self._notes.append(f"{ref}: at a relative distance of {after:.3g}, before {before:.3g}")
        self._notes += [f"{ref}: {note}" for note in aligned.notes]
        mark = hashlib.sha256(repr(ref).encode()).hexdigest()
        return aligned_view(checkpoint, aligned, how=f"aligned to {step.to}", mark=mark)
