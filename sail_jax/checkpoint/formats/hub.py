"""Finds models by their names on the Hub, in this machine's cache, or downloads them into it.

A name is org/name or org/name@revision. A local file or folder of that name takes precedence. The
cache is huggingface_hub's. It has one folder models--org--name per model, with `refs` (the commit
of each revision), `snapshots` (one folder of links per commit) and `blobs` (the files). The path of
such a folder is a checkpoint too, with or without @revision.

A model in the cache is read without a request to the Hub. For any other model, safetensors,
configurations and tokenizer files are downloaded, but never code or pickles.
"""

import contextlib
import glob
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from sail_jax import disk
from sail_jax.checkpoint.formats.extras import CARD
from sail_jax.checkpoint.formats.files import (
    MAX_HEADER,
    CheckpointError,
    File,
    contained,
    explained,
    reading,
    strict_json,
)
from sail_jax.checkpoint.formats.listing import INDEX, SHARD, check_shards, is_extra, weights
from sail_jax.checkpoint.formats.safetensors_files import read_index
from sail_jax.checkpoint.formats.table import FORMATS, of_file
from sail_jax.checks import argument, escaped, storage

_WORD = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"({_WORD}/{_WORD})(?:@(.+))?", re.DOTALL)
_REVISION = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_./-]{0,198}[A-Za-z0-9_])?")
_CACHED = re.compile(
    r"(?:.*/)?models--([^/@]+)(?:/snapshots/([0-9a-f]{40})(/.+)?)?/?(@.+)?", re.DOTALL
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAIN = "main"
_FORMAT = FORMATS["safetensors"]
# Suffixes of configuration and tokenizer files: text, and SentencePiece's models.
_TEXT = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".bpe", ".vocab", ".spm")


class Snapshot(NamedTuple):
    """A model at one commit, in the cache of the Hub.

    Attributes:
      folder: The folder of its files, which are links.
      commit: The commit, 40 hexadecimal digits.
      lacking: Configuration and tokenizer files that are known to be missing from the cache.
    """

    folder: Path
    commit: str
    lacking: tuple[str, ...] = ()


class _Listed(NamedTuple):
    """A model on the Hub that is completely or partly missing from the cache.

    Attributes:
      text: The model's name in messages.
      name: Its name.
      revision: The requested revision.
      home: Its folder in the cache.
      files: The files to download.
      left: The sizes of the files missing from the cache, by digest or name."""

    text: str
    name: str
    revision: str | None
    home: Path
    files: list[str]
    left: dict[str, int]


def called(path: str | PathLike[str]) -> str:
    """Returns the Hub name of something in the cache, for records that are shared.

    Args:
      path: Any path, or a name.

    Returns:
      org/name, or org/name@commit/file, for a model in the cache, its snapshot or a file. Any
      other path is returned unchanged.

    >>> called("/home/me/hub/models--org--name"), called("models/name"), called("org/name@main")
    ('org/name', 'models/name', 'org/name@main')
    """
    text = os.fspath(path)
    if (match := _CACHED.fullmatch(text)) is None:
        return text
    model, commit, file, revision = match.groups()
    parts = (model.replace("--", "/"), commit and f"@{commit}", file, revision)
    return "".join(filter(None, parts))


# The positions of a path in the name of an input: path[@revision][+lora[@revision]] (aligned to
# path).
_PATH = re.compile(r"(^|\+|\(aligned to )([^@+(]+)")


def shortened(names: Sequence[str]) -> list[str]:
    """Removes the folders from the names of inputs, as long as the names remain distinct.

    Args:
      names: The names, path[@revision][+lora[@revision]] with or without operations in brackets.

    Returns:
      A name for each. The last part of a path is kept, with the folder before it if that is a
      number, such as the step of a run. Revisions, adapters and operations are kept.

    >>> shortened(["models/base@v1+tuned/math", "run/10"])
    ['base@v1+math', 'run/10']
    >>> shortened(["a/model", "b/model"])
    ['a/model', 'b/model']
    """

    def end(path: str, count: int) -> str:
        parts = [part for part in path.split("/") if part]
        count += parts[-1:] != [] and parts[-1].strip().isdecimal()
        return "/".join(parts[-count:]) or path

    def ended(name: str, count: int) -> str:
        return _PATH.sub(lambda match: match[1] + end(match[2], count), name)

    most = max((name.count("/") for name in names), default=0)
    tries = ([ended(name, count) for name in names] for count in range(1, most + 1))
    return next((short for short in tries if len({*short}) == len({*names})), [*names])


def is_name(text: str | PathLike[str]) -> bool:
    """Checks whether a text can be the name of a model, without a request to the Hub.

    Args:
      text: A path or a name.

    Returns:
      True for names on the Hub, and for a folder of its cache with @revision. False if a file or
      folder of this name exists, or the text cannot be a model's name.

    >>> is_name("org/name"), is_name("org/name@v1.0"), is_name("org/../name"), is_name("a/b.npz")
    (True, True, False, False)
    """
    text = os.fspath(text)
    return _name(text) is not None or _cached_revision(text) is not None


def has_revisions(path: str | PathLike[str]) -> bool:
    """Checks whether a path is a model's folder in the Hub's cache.

    Args:
      path: A path.

    Returns:
      Whether it is. If so, "path@revision" is one of its snapshots.
    """
    # pathlib would raise an error for a text that is too long for a path.
    snapshots = os.path.isdir(os.path.join(path, "snapshots"))
    return snapshots and any(os.path.isdir(os.path.join(path, x)) for x in ("refs", "blobs"))


def resolved(text: str | PathLike[str], *, offline: bool = False) -> Snapshot | None:
    """Finds a model by name, first in the cache and then on the Hub.

    Args:
      text: A name on the Hub, or a folder in its cache, with or without @revision.
      offline: Whether only the cache is used. HF_HUB_OFFLINE=1 has the same effect.

    Returns:
      The model; None if the text is another path, or cannot be a model's name.

    Raises:
      CheckpointError: If huggingface_hub is not installed, or the model is missing from the cache
        and the Hub, is not accessible, has no safetensors, or cannot be downloaded.
    """
    found = _found(os.fspath(text), offline)
    return _downloaded(found) if isinstance(found, _Listed) else found


def check_there(texts: Iterable[str | PathLike[str]], *, offline: bool = False) -> None:
    """Checks that all models exist and fit on the disk together, before any is downloaded."""
    found = [_found(os.fspath(text), offline) for text in texts]
    _check_room([x for x in found if isinstance(x, _Listed)])


def _found(text: str, offline: bool) -> Snapshot | _Listed | None:
    """Returns the model with this name, from the cache or from the Hub's listing."""
    if os.path.lexists(text):
        return _local(Path(text))
    if (found := _cached_revision(text)) is not None:
        return _of_revision(*found)
    return None if (name := _name(text)) is None else _looked_up(text, *name, offline)


def wanted(model: str, names: Collection[str]) -> list[str]:
    """Chooses the files of a model to download.

    Args:
      model: The model's name in messages.
      names: The names of all its files.

    Returns:
      Its safetensors with their index, configurations and tokenizer files, and its model card,
      which states the licence. Subfolders are left out. If there are several sets of weights, only
      the set that would be read is chosen.

    Raises:
      CheckpointError: If it has no safetensors, or several indexes and none of them has the usual
        name.

    >>> wanted("org/name", ["model.safetensors", "pytorch_model.bin", "config.json", "code.py"])
    ['model.safetensors', 'config.json']
    """
    plain = sorted(n for n in names if re.fullmatch(r"[^\\/.][^\\/]*", n) and n.isprintable())
    files = weights(model, plain, _FORMAT, _FORMAT.file)
    if not files:
        others = sorted(name for name in plain if of_file(name) is not None)
        found = f"found {', '.join(others[:4])}" if others else "found no tensors"
        raise CheckpointError(
            f"{model} has no safetensors, and no other tensors are downloaded: {found}"
        )
    if files[0].endswith(INDEX):
        suffix = Path(_FORMAT.file).suffix
        stem = files[0].removesuffix(suffix + INDEX)
        every = [name for name in plain if name.endswith(suffix)]
        own = [n for n in every if (match := SHARD.fullmatch(n)) and match[1] == stem]
        files += own or every
    texts = (n for n in plain if is_extra(n) and n.endswith(_TEXT))
    return [*files, *texts, *(n for n in plain if n == CARD)]


def _name(text: str) -> tuple[str, str | None] | None:
    """Returns the name and the revision of a model on the Hub; None for anything else."""
    match = _NAME.fullmatch(text)
    if match is None or os.path.lexists(text) or os.path.lexists(match[1]):
        return None
    name, revision = match.groups()
    # These are the Hub's own rules. A text with the suffix of a file is a path that does not exist.
    if len(name) > 96 or ".." in name or "--" in name or name.endswith((".git", ".json", ".yaml")):
        return None
    return (name, revision) if of_file(name) is None and _is_revision(revision) else None


def _is_revision(revision: str | None) -> bool:
    """Checks whether a text can be a branch, tag or commit, and not a path out of the folder."""
    if revision is None:
        return True
    return _REVISION.fullmatch(revision) is not None and not re.search(r"\.\.|//|/\.", revision)


def _cached_revision(text: str) -> tuple[Path, str] | None:
    """Returns the folder in the cache and the revision that a text has; None for anything else."""
    path, at, revision = text.rpartition("@")
    named = at and not os.path.lexists(text) and has_revisions(path)
    return (Path(path), revision) if named else None


def _local(path: Path) -> Snapshot | None:
    """Returns the model in a folder of the cache: a snapshot, or the main revision of a model."""
    if has_revisions(path):
        return _of_revision(path, None)
    match = _CACHED.fullmatch(os.path.abspath(path))
    within = match is not None and match[2] is not None and match[3] is None and path.is_dir()
    return Snapshot(path, match[2]) if match is not None and within else None


def _of_revision(home: Path, revision: str | None) -> Snapshot:
    """Finds a revision of a model in its folder of the cache."""
    commit = _commit(home, revision or _MAIN)
    if commit is None:
        here = sorted(entry.name for entry in (home / "snapshots").iterdir())
        known = f"it holds @{', @'.join(here[:4])}" if here else "it holds no model"
        raise CheckpointError(f"{home} has no revision '{revision or _MAIN}': {known}")
    return Snapshot(_folder(home, commit), commit)


def _commit(home: Path, revision: str) -> str | None:
    """Returns the commit of a revision; None if it or its snapshot is missing from the cache."""
    commit: str = revision
    if not _is_revision(revision):
        return None
    if not _COMMIT.fullmatch(revision):
        ref = home / "refs" / revision
        if not ref.is_file():
            return None
        with explained("read", ref), reading(ref):
            commit = disk.read_bytes(ref, 100).decode("ascii").strip()
        if not _COMMIT.fullmatch(commit):
            raise CheckpointError(f"{ref} is damaged: expected a commit")
    return commit if (home / "snapshots" / commit).is_dir() else None


def _folder(home: Path, commit: str) -> Path:
    """Returns the folder of a snapshot, which must not be a link."""
    folder = home / "snapshots" / commit
    if folder.is_symlink() or folder.parent.is_symlink():
        raise CheckpointError(f"{folder} is a link; expected a folder of the cache")
    return folder


def _looked_up(text: str, name: str, revision: str | None, offline: bool) -> Snapshot | _Listed:
    """Looks up a model by name: in the cache if it is complete there, otherwise on the Hub."""
    try:
        from huggingface_hub import constants
    except ImportError:
        raise CheckpointError(
            f"{text} does not exist; a model of this name on the Hub can be read after "
            "pip install 'sail-jax[hub]'"
        ) from None
    alone = offline or constants.HF_HUB_OFFLINE
    home = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    commit = _commit(home, revision or _MAIN)
    if commit is not None:
        folder = _folder(home, commit)
        with reading(folder):
            missing = _missing(folder, home / "trees" / f"{commit}.json")
        tensors = [file for file in missing if not is_extra(file)]
        if not missing or (alone and not tensors):
            return Snapshot(folder, commit, tuple(missing))
    if alone:
        how = argument("offline", "True") if offline else "HF_HUB_OFFLINE"
        what = "holds no model of this name" if commit is None else "lacks some of its tensors"
        what = f"lacks {revision}" if commit is None and revision and home.is_dir() else what
        raise CheckpointError(
            f"{text} does not exist, and the cache {what} ({home}); without {how} it is downloaded"
        )
    return _listed(text, name, revision, home)


def _missing(folder: Path, listing: Path) -> list[str]:
    """Returns the files missing from a snapshot, according to the Hub's list of files."""
    # A dangling link counts as a missing file.
    names = sorted(entry.name for entry in folder.iterdir() if entry.exists())
    if listing.is_file():
        with contextlib.suppress(disk.StoreError):
            files = strict_json(disk.read_bytes(listing, MAX_HEADER), listing).get("files")
            if isinstance(files, dict):
                return sorted(set(wanted(str(folder), files)) - set(names))
    # Other programs store no such list, so a missing shard can only be detected from the files.
    files = weights(folder, names, _FORMAT, _FORMAT.file)
    beside = {"config.json", "adapter_config.json"} & set(names)
    missing = [] if beside else ["config.json"]
    try:
        check_shards(folder, files)
        if files and files[0].endswith(INDEX):
            file = File(contained(folder, files[0]))
            try:
                read_index(file)
            finally:
                file.close()
    except CheckpointError:
        files = []
    return missing if files else [*missing, _FORMAT.file]


def _listed(text: str, name: str, revision: str | None, home: Path) -> _Listed:
    """Requests the list of a model's files from the Hub, without downloading any."""
    with _explained(text, revision, "does not exist, and the Hub does not answer"):
        # Imported here because it takes 0.3 s, and cached models do not require it.
        from huggingface_hub import HfApi, constants

        about = HfApi(library_name="sail-jax").model_info(
            name, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
    listed = {file.rfilename: file for file in about.siblings or ()}
    files = wanted(text, listed)
    lacks = [listed[file] for file in files if not _is_there(home, about.sha, listed[file])]
    left = {f"{name} {_digest(file) or file.rfilename}": file.size or 0 for file in lacks}
    return _Listed(text, name, revision, home, files, left)


def _what(left: Mapping[str, int]) -> str:
    """Describes the number and the total size of the files to download."""
    return f"{len(left)} file{'s' * (len(left) > 1)}, {storage(sum(left.values()))}"


def _check_room(models: Sequence[_Listed]) -> None:
    """Refuses downloads that do not fit on the disk together."""
    if not models:
        return
    home = models[0].home
    left = {key: size for model in models for key, size in model.left.items()}
    place = next(p for p in (home, *home.parents) if p.is_dir())
    if sum(left.values()) > (free := shutil.disk_usage(place).free):
        raise CheckpointError(
            f"{', '.join(x.text for x in models)}: {_what(left)}, do not fit in {home.parent}, "
            f"where {storage(free)} are free; set HF_HUB_CACHE to another place"
        )


def _downloaded(model: _Listed) -> Snapshot:
    """Downloads a model into the cache."""
    from huggingface_hub import snapshot_download

    text, name, revision, home, files, left = model
    _check_room([model])
    if left:
        said = f"{text}: downloads {_what(left)}, to {home}"
        print(escaped(said), file=sys.stderr, flush=True)
    with _explained(text, revision, "was not downloaded whole; what came is kept"):
        # By revision and not by commit, so the cache records the revision's commit.
        folder = snapshot_download(
            name, revision=revision, library_name="sail-jax",
            allow_patterns=[glob.escape(file) for file in files],
        )  # fmt: skip
    return Snapshot(Path(folder), Path(folder).name)


def _digest(file: Any) -> str | None:
    """Returns the digest that names a file in the cache, from the Hub's listing."""
    return file.blob_id if file.lfs is None else file.lfs.sha256


def _is_there(home: Path, commit: str | None, file: Any) -> bool:
    """Checks whether a file is in the cache: in this snapshot, or as a blob of another one."""
    places = (
        home / "snapshots" / str(commit) / file.rfilename,
        home / "blobs" / str(_digest(file)),
    )
    return any(place.exists() for place in places)


@contextlib.contextmanager
def _explained(text: str, revision: str | None, failed: str) -> Iterator[None]:
    """Converts exceptions of huggingface_hub to a `CheckpointError` with advice."""
    from huggingface_hub import errors

    login = "log in (hf auth login)"
    hidden = f"the Hub shows no such model; for a private one {login}"
    known = {
        errors.GatedRepoError: f" is gated: accept its terms on its page on the Hub, and {login}",
        errors.RepositoryNotFoundError: f" does not exist, and {hidden}",
        errors.RevisionNotFoundError: f": the model has no revision '{revision}'",
    }
    try:
        yield
    # The client raises errors of several libraries. All of them mean that the Hub's answer was
    # missing or wrong.
    except Exception as exc:
        said = " ".join(str(exc).partition("For more information")[0].split())[:200]
        why = f" {failed}: {said or type(exc).__name__}"
        if getattr(getattr(exc, "response", None), "status_code", None) in (401, 403):
            why = f": the Hub refuses it to this user; {login}"
        why = next((said for kind, said in known.items() if isinstance(exc, kind)), why)
        raise CheckpointError(f"{text}{why}") from exc
