"""Gives a checkpoint the tokenizer of another one, and makes rows for new tokens."""

from typing import Literal

from sail_jax.checkpoint.operations.merging import Merged, merge_checkpoints
from sail_jax.checkpoint.operations.running import DEFAULTS, Path_, RunOptions
from sail_jax.checkpoint.recipe.parts import Ref
from sail_jax.checks import argument, integer, one_of

METHODS = ("omp", "nearest", "mean", "zero")


def transplant_checkpoint(
    base: Path_,
    donor: Path_,
    out: Path_,
    *,
    method: Literal["omp", "nearest", "mean", "zero"] = "omp",
    k: int = 64,
    pad_to_multiple_of: int | None = None,
    run: RunOptions = DEFAULTS,
) -> Merged:
    """Writes a checkpoint with the tokenizer of another one.

    Tokens of both models keep their rows of the embedding and of the head. New rows are made for
    the donor's other tokens. All other tensors stay unchanged, bit for bit. A recipe does the same
    with passthrough of one model and `tokenizer: {source: DONOR, transplant: METHOD}`.

    Args:
      base: The checkpoint.
      donor: The checkpoint with the tokenizer, of any width and architecture. Its embedding is
        read, and its head if both have a separate one.
      out: The path of the output; see `merge_recipe`.
      method: How rows are made: "omp" and "nearest" of `sail_jax.transplant`, "mean" of the rows
        that are kept, or "zero".
      k: The largest number of rows from which one row is made, by "omp" and "nearest".
      pad_to_multiple_of: The number of rows is rounded up to a multiple of this. The rows after the
        last token are means of the others. None for no padding.

    Returns:
      The result.

    Raises:
      ValueError: If a checkpoint has no tokenizer or no embedding, they share no token, or an
        argument is invalid; RecipeError, CheckpointError and MergeError.

    References:
      Goddard and Fernandes Neto, Training-Free Tokenizer Transplantation via Orthogonal Matching
      Pursuit, 2025 (arXiv 2506.06607).
    """
    one_of(argument("method"), method, METHODS)
    tokenizer = {"source": Ref(str(donor)), "transplant": method, "k": integer("k", k)}
    if pad_to_multiple_of is not None:
        tokenizer["pad_to_multiple_of"] = integer("pad_to_multiple_of", pad_to_multiple_of)
    return merge_checkpoints([base], out, method="passthrough", tokenizer=tokenizer, run=run)
