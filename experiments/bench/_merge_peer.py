"""mergekit, installed in a separate virtual environment when a benchmark requires it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sail_jax.disk import StoreError

TORCH = "torch==2.13.0"
VERSIONS = {  # of mergekit: the newest, and the one before, which fails with transformers 5
    "0.1.5": ("mergekit==0.1.5",),
    "0.1.4": ("mergekit==0.1.4", "transformers<5"),
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
# Keeps freed memory instead of returning it and faulting it in again; this is never the default.
TUNED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


class Peer:
    """A version of mergekit, installed below a folder on first use.

    Args:
      folder: The folder for virtual environments.
      version: The version, a key of `VERSIONS`.

    Raises:
      StoreError: If it cannot be installed.
    """

    def __init__(self, folder: Path, version: str = "0.1.5") -> None:
        home = folder / f"mergekit-{version}"
        self.binaries = home / ("Scripts" if os.name == "nt" else "bin")
        if not (home / "ready").exists():
            _call([sys.executable, "-m", "venv", "--clear", str(home)])
            # PyTorch is installed first and separately, so that the other packages use this build.
            for packages in ((TORCH,), (*VERSIONS[version], TORCH)):
                _call([str(self.binaries / "pip"), "install", "--quiet", *packages])
            (home / "ready").touch()

    def command(self, recipe: Path, out: Path) -> list[str]:
        """Returns the command that merges one recipe, as a user would type it."""
        return [str(self.binaries / "mergekit-yaml"), str(recipe), str(out), "--random-seed", "0"]

    def versions(self) -> dict[str, str]:
        """Returns the installed versions of mergekit, torch and transformers.

        Raises `StoreError` if the environment's Python fails.
        """
        code = (
            "import json; from importlib.metadata import version as v; "
            "print(json.dumps({p: v(p) for p in ('mergekit', 'torch', 'transformers')}))"
        )
        return json.loads(_call([str(self.binaries / "python"), "-c", code]))


def _call(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Runs a command and returns its output; raises a StoreError with its last line if it fails."""
    process = subprocess.run(
        command, env={**os.environ, **(env or {})}, capture_output=True, text=True
    )
    if process.returncode:
        said = (process.stderr or process.stdout).strip().splitlines()
        raise StoreError(f"the peer failed: {said[-1] if said else command}")
    return process.stdout
