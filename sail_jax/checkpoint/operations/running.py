"""Work carried out from open inputs to an output that appears whole."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path

from sail_jax.checkpoint.engine.executor import Limits, Progress, Record, execute
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.open import Checkpoint, open_checkpoint
from sail_jax.checkpoint.formats.table import check_written
from sail_jax.checkpoint.output.writer import create
from sail_jax.merging.streaming import Work

__all__ = ["DEFAULTS", "RunOptions", "carried_out", "check_options", "files", "opened"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How an operation runs, and into which files it writes.

    The tensors written are the same byte for byte, whatever these options are and however often the
    operation was interrupted.

    Attributes:
      resume: Whether to go on with what an interrupted call left. An output that is finished is
        compared with what would be written, and stays.
      max_memory: Bytes that the process may use; by default what one tensor after another takes.
      threads: How many workers; by default as many as there are cores, up to 8.
      allow_nonfinite: Whether NaN and infinities are read, and outcomes may overflow.
      allow_pickle: Whether PyTorch's pickles are read; what is in them is never run.
      format: Of the output; see `create`.
      shard_bytes: The size of an output's file from which there are several; see `create`.
      sync: Whether the output is on the disk before it takes its name.
      progress: Told `(bytes done, bytes in all, tensor)` when a tensor is finished.

    Raises:
      CheckpointError: If no output has this `format`.
    """

    resume: bool = False
    max_memory: int | None = None
    threads: int | None = None
    allow_nonfinite: bool = False
    allow_pickle: bool = False
    format: str | None = None
    shard_bytes: int = 5_000_000_000
    sync: bool = True
    progress: Progress | None = None

    def __post_init__(self) -> None:
        check_written(self.format)


DEFAULTS = RunOptions()


def check_options(options: Mapping[str, object]) -> None:
    """TypeError for an option of a run among those of what is done."""
    for one in fields(RunOptions):
        if one.name in options:
            raise TypeError(
                f"{one.name} is no option of what is done: say run=RunOptions({one.name}=...)"
            )


def opened(path: str | PathLike[str], run: RunOptions) -> Checkpoint:
    """An input. CheckpointError, beside those of `open_checkpoint`, if there is no tensor in it."""
    checkpoint = open_checkpoint(Path(path), allow_pickle=run.allow_pickle)
    if not checkpoint.tensors:
        checkpoint.close()
        raise CheckpointError(f"{path} is a checkpoint without tensors")
    return checkpoint


def files(path: Path) -> list[tuple[str, int, int]]:
    """What changes when an input does: its files, their sizes and times."""
    found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    stats = [(file, file.stat()) for file in found]
    return [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats]


def carried_out(
    works: Sequence[Work],
    out: Path,
    limits: Limits,
    fingerprint: str,
    extras: Callable[[], Mapping[str, bytes | Path]],
    run: RunOptions,
    *,
    measure: bool = False,
) -> tuple[dict[str, Record], bool]:
    """All of the work written to `out`, with the extras beside it if that is a folder.

    Returns:
      What was measured, by name; whether an earlier call had finished the output.
    """
    with create(
        out, {one.name: (one.dtype, one.shape) for one in works}, fingerprint=fingerprint,
        format=run.format, shard_bytes=run.shard_bytes, resume=run.resume, sync=run.sync,
    ) as writer:  # fmt: skip
        records = execute(
            works, writer, limits, allow_nonfinite=run.allow_nonfinite, measure=measure,
            progress=run.progress,
        )  # fmt: skip
        if writer.folder:
            for name, data in extras().items():
                writer.extra(name, data)
        writer.commit()
    return records, writer.unchanged
