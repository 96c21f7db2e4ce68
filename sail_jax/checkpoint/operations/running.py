"""Work carried out from open inputs to an output that appears whole."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sail_jax.checkpoint.engine.executor import Limits, Progress, Record, execute
from sail_jax.checkpoint.output.writer import Format, create
from sail_jax.merging.streaming import Work

__all__ = ["carried_out", "files"]


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
    *,
    resume: bool = False,
    measure: bool = False,
    sync: bool = True,
    allow_nonfinite: bool = False,
    format: Format | None = None,
    shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
) -> dict[str, Record]:
    """All of the work written to `out`, with the extras beside it if that is a folder."""
    metadata = {"format": "pt"} if format in (None, "safetensors") else None
    if out.suffix in (".npz", ".msgpack"):
        metadata = None
    with create(
        out, {one.name: (one.dtype, one.shape) for one in works}, fingerprint=fingerprint,
        format=format, shard_bytes=shard_bytes, metadata=metadata, resume=resume, sync=sync,
    ) as writer:  # fmt: skip
        records = execute(
            works, writer, limits,
            allow_nonfinite=allow_nonfinite, measure=measure, progress=progress,
        )  # fmt: skip
        if writer.folder:
            for name, data in extras().items():
                writer.extra(name, data)
        writer.commit()
    return records
