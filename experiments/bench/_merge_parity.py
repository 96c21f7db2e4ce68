"""The same recipes merged by mergekit and by sail-jax, and the differences of the outputs."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from experiments.bench._llama import Llama, write
from experiments.bench._measuring import print_table, process
from experiments.bench._merge_cases import CASES, Case
from experiments.bench._merge_peer import Peer
from experiments.bench._merge_speed import write_recipe
from sail_jax.cli.progress import say

Tensors = Mapping[str, np.ndarray]
SMALL = Llama(64, 160, 3, 120, heads=4)
LONGER = Llama(64, 160, 3, 136, heads=4, added=16)
EPS = float(np.finfo(np.float32).eps)
Z = 4.0  # |z| above this has probability 6e-5 if both draw from one distribution
DTYPES = {"F32": np.dtype("<f4"), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("<f2")}


def checkpoints(folder: Path) -> dict[str, Path]:
    """Writes the small models for the cases.

    They are a base, three models fine-tuned from it, one far from its base, and one with more
    tokens, all in float32. The first four are written in bfloat16 as well.

    Returns the models' folders by name.
    """
    names = ("base", "tuned-0", "tuned-1", "tuned-2")
    write([folder / n for n in names], SMALL, dtype="float32")
    write([folder / n for n in ("far-base", "far")], SMALL, dtype="float32", delta=0.01)
    write([folder / n for n in ("longer-base", "longer")], [SMALL, LONGER], dtype="float32")
    write([folder / f"{n}-bf16" for n in names], SMALL)
    return {path.name: path for path in folder.iterdir()}


def read(folder: Path) -> dict[str, np.ndarray]:
    """Reads a single safetensors file, without any of the tested code.

    Returns the tensors by name, in float32.
    """
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return {
        name: np.frombuffer(data[start + at[0] : start + at[1]], DTYPES[entry["dtype"]])
        .reshape(entry["shape"])
        .astype(np.float32)
        for name, entry in header.items()
        if name != "__metadata__"
        for at in [entry["data_offsets"]]
    }


def located(recipe: Any, paths: Mapping[str, Path]) -> Any:
    """Replaces the names of models in a recipe by their paths.

    Args:
      recipe: A recipe, or a part of one.
      paths: The models' folders by name.

    Returns:
      The recipe with paths.
    """
    if isinstance(recipe, dict):
        spots = ("model", "base_model")
        return {k: str(paths[v]) if k in spots else located(v, paths) for k, v in recipe.items()}
    return [located(item, paths) for item in recipe] if isinstance(recipe, list) else recipe


def run(folder: Path, ours: Sequence[str], peer: Peer, wanted: str = "") -> dict[str, Any]:
    """Merges every case by both programs, compares the outputs, and prints a table.

    Args:
      folder: The folder for models and outputs; it is emptied first.
      ours: The command of sail-jax; recipe and output are appended.
      peer: mergekit.
      wanted: Only cases with this text in their names are run.

    Returns:
      The record: a row for each case, and whether all differences are within their limits.
    """
    cases = {name: case for name, case in CASES.items() if wanted in name}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    paths = checkpoints(folder / "models")
    recipes = [
        write_recipe(folder / "recipes" / f"{i}.yaml", located(case.recipe, paths))
        for i, case in enumerate(cases.values())
    ]
    outs = {side: [folder / side / str(i) for i in range(len(cases))] for side in ("peer", "ours")}
    say(f"mergekit: {len(cases)} recipes ...")
    failures = peer.merge_all(list(zip(recipes, outs["peer"], strict=True)))
    models = {name: read(path) for name, path in paths.items()}
    rows = []
    for i, (name, case) in enumerate(cases.items()):
        say(f"  {name}")
        outs["ours"][i].parent.mkdir(exist_ok=True)
        command = [*ours, str(recipes[i]), str(outs["ours"][i])]
        failure = process(command, folder / "log.txt").failure
        row: dict[str, Any] = {"case": name, "recipe": case.recipe}
        if failure or failures[i]:
            said = {"ours": failure, "peer": failures[i]}
            verdict = "FAILED: " + "; ".join(f"{k}: {v}" for k, v in said.items() if v)
            rows.append({**row, "agrees": False, "verdict": verdict})
            continue
        comparison = compare(case, read(outs["peer"][i]), read(outs["ours"][i]), models)
        rows.append({**row, **comparison})
    header = ("case", "max |difference|", "beyond tolerance", "undecided apart", "verdict")
    print_table([header, *map(_cells, rows)])
    return {"good": all(row["agrees"] for row in rows), "parity": rows}


def compare(case: Case, peer: Tensors, ours: Tensors, models: Mapping[str, Tensors]) -> dict:
    """Compares the outputs of the two programs for one case.

    Args:
      case: The case, with the allowed differences.
      peer: The tensors of mergekit's output, by name.
      ours: The tensors of sail-jax's output.
      models: The tensors of the merged models, by model and name.

    Returns:
      `agrees`, and the `verdict` as text. A random method also has `z`. Other methods have the
      largest difference, and the shares of entries beyond the tolerance (`beyond`) and of entries
      that rounding does not explain (`away`).
    """
    if peer.keys() != ours.keys():
        odd = sorted(peer.keys() ^ ours.keys())
        return {"agrees": False, "verdict": f"FAILED: {len(odd)} tensors in one only: {odd[0]}"}
    for name in peer:
        if peer[name].shape != ours[name].shape:
            shapes = f"{peer[name].shape} and {ours[name].shape}"
            return {"agrees": False, "verdict": f"FAILED: shapes of {name}: {shapes}"}
    base = models[case.recipe.get("base_model", "base")]
    if case.random:
        scores = statistics(base, peer, ours)
        agrees = max(map(abs, scores.values())) < Z
        said = ", ".join(f"{name} {score:.1f}" for name, score in scores.items())
        verdict = ("agrees" if agrees else "DIFFERS") + f"; z: {said}"
        return {"z": scores, "agrees": agrees, "verdict": verdict}
    worst, beyond, away, total = 0.0, 0, 0, 0
    for name, theirs in peer.items():
        gap = np.abs(theirs.astype(np.float64) - ours[name])
        # Negated, so a NaN counts as beyond the tolerance.
        out = ~(gap <= case.ulps * EPS * np.abs(theirs).max())
        close = undecided(case, {m: models[m][name] - base[name] for m in case.trim})
        worst = max(worst, float(gap.max()))
        beyond, away, total = beyond + out.sum(), away + (out & ~close).sum(), total + out.size
    agrees = away / total <= case.share
    verdict = "agrees" + " away from thresholds and ties" * bool(beyond > away)
    return {
        "max_difference": worst,
        "tolerance_ulps": case.ulps,
        "beyond": beyond / total,
        "away": away / total,
        "agrees": bool(agrees),
        "verdict": (verdict + f" but for {case.why}" * bool(away)) if agrees else "DIFFERS",
    }


def undecided(case: Case, deltas: Mapping[str, np.ndarray]) -> np.ndarray | bool:
    """Finds the entries of a tensor that depend on rounding, or on the order of a sort.

    An entry is undecided if a model is trimmed at exactly its magnitude, and only some of the
    entries of that magnitude stay. It is also undecided if the models' weighted terms cancel up to
    rounding, which makes the elected sign arbitrary.

    Args:
      case: The case, which has the models' densities and weights.
      deltas: The difference of each trimmed model from the base.

    Returns:
      A mask of the tensor's shape; False if nothing is trimmed.
    """
    mask: np.ndarray | bool = False
    terms: list[np.ndarray] = []
    weights = {
        m["model"]: m["parameters"]["weight"] for m in case.recipe.get("models", ()) if case.trim
    }
    for model, delta in deltas.items():
        density, gamma = case.trim[model]
        size = np.abs(delta)
        ordered = np.sort(size, axis=None)
        count = max(1, int(density * delta.size))
        low = max(0, delta.size - count - int(gamma * delta.size))
        # A threshold matters only if it falls between entries of equal magnitude.
        for edge in (low, low + count):
            if 0 < edge < delta.size and ordered[edge - 1] == ordered[edge]:
                mask |= size == ordered[edge]
        inside = (size >= ordered[low]) & (size <= ordered[low + count - 1])
        terms.append(weights[model] * np.where(inside, delta.astype(np.float64), 0))
    if terms:
        mask |= np.abs(sum(terms)) <= len(terms) * EPS * sum(map(np.abs, terms))
    return mask


def statistics(base: Tensors, peer: Tensors, ours: Tensors) -> dict[str, float]:
    """Compares the outputs of a random method by paired z-scores over all entries.

    The comparison covers the share of changed entries, and the mean, the mean magnitude and the
    mean square of the changes. If both programs draw their masks independently from one
    distribution, each entry's pair of values is exchangeable, and the scores are nearly standard
    normal.

    Args:
      base: The tensors of the base, by name.
      peer: The tensors of mergekit's output.
      ours: The tensors of sail-jax's output.

    Returns:
      The z-scores by name.
    """
    a, b = (
        np.concatenate([(out[n].astype(np.float64) - base[n]).ravel() for n in base])
        for out in (peer, ours)
    )
    looks: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "kept": lambda x: (x != 0).astype(float),
        "mean": lambda x: x,
        "magnitude": np.abs,
        "square": np.square,
    }
    pairs = {name: look(a) - look(b) for name, look in looks.items()}
    return {
        name: float(d.mean() / (d.std() / d.size**0.5)) if d.any() else 0.0
        for name, d in pairs.items()
    }


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a row of the table."""
    if "beyond" not in row:
        return (row["case"], "-", "-", "-", row["verdict"])
    shares = (f"{row[k]:.2e}" if row[k] else "0" for k in ("beyond", "away"))
    return (row["case"], f"{row['max_difference']:.1e}", *shares, row["verdict"])
