"""Joins the printed output of a notebook cell."""

from typing import Any

from myst_nb.core import render


def joined(outputs: list[Any]) -> list[Any]:
    """Joins the chunks of each stream in their order, and puts standard error last.

    MyST-NB 1.4 ends a line after every chunk, but a chunk can end in the middle of a line.

    Args:
      outputs: The outputs of a cell.

    Returns:
      The outputs, with one for each stream.
    """
    streams: dict[str, Any] = {}
    kept = []
    for output in outputs:
        if output["output_type"] != "stream":
            kept.append(output)
        elif output["name"] in streams:
            streams[output["name"]]["text"] += output["text"]
        else:
            streams[output["name"]] = output
    for output in streams.values():
        output["text"] = output["text"].rstrip() + "\n"
    return [streams[name] for name in ("stdout", "stderr") if name in streams] + kept


def mend() -> None:
    """Makes MyST-NB join streams with `joined` if `nb_merge_streams` is set."""
    render.coalesce_streams = joined
