"""Records the trials of a search in a file, to resume an interrupted search.

The first line identifies the search. Each further line is the JSON of one trial. An incomplete line
is dropped, with everything after it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sail_jax import disk
from sail_jax.searching.outcome import Trial

_MOST = 1 << 30


class Journal:
    """The trials of a search, in a file.

    Args:
      path: The file.
      search: The arguments that identify the search, as JSON data.

    Attributes:
      trials: The trials that an earlier process recorded.
    """

    def __init__(self, path: Path, search: Mapping[str, Any]):
        self._path, self._search = path, json.loads(json.dumps(search))
        self.trials: tuple[Trial, ...] = ()

    def resume(self) -> None:
        """Reads the trials of an earlier process, if any.

        Raises:
          StoreError: If the file cannot be read.
          ValueError: If it belongs to a search with other arguments. The message contains one of
            them.
        """
        if not self._path.exists():
            return
        lines = disk.read_bytes(self._path, _MOST).decode(errors="replace").split("\n")[:-1]
        try:
            records = [disk.parsed(line) for line in lines[:1]]
        except (ValueError, RecursionError):
            records = []
        if not records or not isinstance(records[0], dict):
            return
        for key in self._search.keys() | records[0].keys():
            then, now = records[0].get(key), self._search.get(key)
            if then != now:
                raise ValueError(
                    f"{self._path}: holds a search with another {key}: {then!r:.80}, not "
                    f"{now!r:.80}"
                )
        trials = []
        for line in lines[1:]:
            try:
                trials.append(_trial(disk.parsed(line)))
            except (ValueError, RecursionError, KeyError, TypeError):
                break
        self.trials = tuple(trials)

    def begin(self) -> None:
        """Rewrites the file with the kept trials."""
        lines = [json.dumps(self._search), *(json.dumps(_recorded(t)) for t in self.trials)]
        disk.write_atomic(self._path, "".join(f"{line}\n" for line in lines).encode())

    def add(self, trial: Trial) -> None:
        """Appends a trial.

        Args:
          trial: The trial.

        Raises:
          StoreError: If the file cannot be written.
        """
        with disk.explained("write to", self._path), self._path.open("ab") as file:
            file.write(json.dumps(_recorded(trial)).encode() + b"\n")


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Converts hyperparameters to JSON data.

    Args:
      options: The hyperparameters.

    Returns:
      Numbers and lists of them, by name.
    """
    return {name: np.asarray(value).tolist() for name, value in options.items()}


def _recorded(trial: Trial) -> dict[str, Any]:
    return {
        "name": trial.name,
        "options": plain(trial.options),
        "examples": trial.examples.tolist(),
        "scores": trial.scores.tolist(),
        "by_task": trial.by_task.tolist(),
    }


def _trial(record: Mapping[str, Any]) -> Trial:
    options = {
        str(name): np.asarray(value, float) if isinstance(value, list) else value
        for name, value in record["options"].items()
    }
    arrays = (np.asarray(record[key], float) for key in ("scores", "by_task"))
    return Trial(str(record["name"]), options, np.asarray(record["examples"], int), *arrays)
