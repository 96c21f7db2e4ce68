"""Trials of a search in a file, from which an interrupted search goes on.

A line of JSON for each trial, after a first line that identifies the search. A line that was cut
off is dropped, and everything after it.
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
      search: What identifies the search, as JSON data.

    Attributes:
      trials: Those that an earlier process recorded.
    """

    def __init__(self, path: Path, search: Mapping[str, Any]):
        self._path, self._search = path, json.loads(json.dumps(search))
        self.trials: tuple[Trial, ...] = ()

    def resume(self) -> None:
        """Reads the trials of an earlier process, if there was one.

        Raises:
          StoreError: If the file cannot be read.
          ValueError: If it belongs to a search with other arguments; the message names one.
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
                    f"{self._path}: a search with another {key} was begun there: {then!r:.80}, not "
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
        """Writes the file anew, with the trials that are kept."""
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
    """Writes hyperparameters as JSON data.

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
