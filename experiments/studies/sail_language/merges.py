"""SAIL's claims about checkpoints on disk: on their merges, and on continued training."""

from typing import TYPE_CHECKING

import numpy as np

from experiments.data.benchmarks import BENCHMARKS
from experiments.lab.findings import Finding, stated
from experiments.studies.sail_language import claims
from experiments.studies.sail_language.config import WAYS

if TYPE_CHECKING:
    import xarray as xr


def is_of(dataset: "xr.Dataset") -> bool:
    """Returns whether a run used checkpoints on disk."""
    return "model" in dataset.coords


def is_trained(dataset: "xr.Dataset") -> bool:
    """Returns whether a run of checkpoints has trained networks as well."""
    return "trained_loss" in dataset


def trained(dataset: "xr.Dataset") -> "xr.Dataset":
    """Converts the trainings of a run of checkpoints to the form of a run with its own networks.

    It returns the run with `loss`, `(way, seed, step)`, and `accuracy`, `(way, seed, when, task)`,
    of the trainings.
    """
    import xarray as xr

    accuracy = dataset["trained_accuracy"].isel(step=[0, -1]).rename(step="when")
    accuracy = accuracy.assign_coords(when=["before", "after"])
    kept = dataset.drop_vars(["loss", "accuracy", "trained_loss", "trained_accuracy"])
    return xr.merge(
        [kept, dataset["trained_loss"].rename("loss"), accuracy.rename("accuracy")],
        combine_attrs="drop_conflicts",
    ).assign_attrs(dataset.attrs)


def named(way: str) -> str:
    """Returns the name of a start of a training that continues from checkpoints."""
    return "LiGO" if way == "ligo" else WAYS[way]


def findings(dataset: "xr.Dataset") -> list[Finding]:
    """Judges whether merges are better than the last checkpoint, and SAIL's merge better than the
    soups.

    If the run has trained networks, it also judges the claims about training from SAIL's start, on
    Table 2 and Fig. 7.
    """
    loss = dataset["loss"]
    last = str(dataset["checkpoint"].values[-1])
    about = [
        ("The mean of the checkpoints has a lower loss than the last of them", "uniform", last),
        ("SAIL's start has a lower loss than the uniform soup", "sweep", "uniform"),
        ("SAIL's start has a lower loss than the greedy soup", "sweep", "greedy"),
    ]
    paper = "training starts from merges of OLMo's checkpoints; their losses are not printed"
    declared = [
        claims.less("SAIL, App. I", claim, paper, loss.sel(model=model), loss.sel(model=other))
        for claim, model, other in about
    ]
    if not is_trained(dataset):
        return declared
    run = trained(dataset)
    declared += [claims.sooner(run, where="SAIL, App. I"), *claims.final(run)]
    return [*declared, *claims.retrained(run), *claims.answers(run)]


def table(dataset: "xr.Dataset") -> list[tuple[str, ...]]:
    """Tabulates loss, perplexity and correct answers, a row for each checkpoint and merge.

    If the run has trained networks, the rows are the starts instead, after training, with Table 2's
    correct answers for comparison.
    """
    return _trained_table(dataset) if is_trained(dataset) else _merges(dataset)


def _merges(dataset: "xr.Dataset") -> list[tuple[str, ...]]:
    """Tabulates loss, perplexity and correct answers of each checkpoint and merge."""
    tasks = dataset["task"].values.astype(str)
    rows = [("model", "loss", "perplexity", *(f"answers, {task}" for task in tasks))]
    for name in dataset["model"].values.astype(str):
        at = dataset.sel(model=name)
        right = [100 * at["accuracy"].sel(task=task) for task in tasks]
        cells = stated(at["loss"], 3, sign=False), stated(claims.perplexity(at), sign=False)
        rows.append((name, *cells, *(f"{stated(share, 1, sign=False)} %" for share in right)))
    return rows


def _trained_table(dataset: "xr.Dataset") -> list[tuple[str, ...]]:
    """Tabulates loss, perplexity, steps saved and correct answers of each start after training."""
    run, tasks = trained(dataset), dataset["task"].values.astype(str)
    head = ("way", "step 0", "last", "perplexity", "steps saved")
    rows: list[tuple[str, ...]] = [(*head, *(f"answers, {task}" for task in tasks))]
    for way in run["way"].values.astype(str):
        at = run.sel(way=way)
        last = at["loss"].isel(step=-1)
        cells = [
            stated(at["loss"].isel(step=0), 3, sign=False),
            stated(last, 3, sign=False),
            stated(last.copy(data=np.exp(last.values)), sign=False),
            stated(at["saved"], 0),
        ]
        for task in tasks:
            share = 100 * at["accuracy"].sel(when="after", task=task)
            cells.append(f"{stated(share, 1, sign=False)} %{_printed(task, way)}")
        rows.append((named(way), *cells))
    return rows


def _printed(task: str, way: str) -> str:
    """Returns Table 2's value for a benchmark and a way, as text; "" without such a value."""
    if task not in BENCHMARKS or way not in claims.COLUMNS:
        return ""
    row = claims.TABLE_2[BENCHMARKS[task].title]
    return f" (printed {row[claims.COLUMNS.index(way)]:.1f})"


def summary(dataset: "xr.Dataset") -> str:
    """Describes losses and answers of each checkpoint and merge, and of trained networks."""
    tasks = dataset["task"].values.astype(str)
    told = lambda right: ", ".join(f"{t} {s}" for t, s in zip(tasks, right, strict=True))  # noqa: E731
    said = [
        f"{name} {loss} nats (perplexity {ppl}; right answers: {told(right)})"
        for name, loss, ppl, *right in _merges(dataset)[1:]
    ]
    text = (
        f"Held-out text and questions (mean ± s.e. over {dataset.sizes['seed']} draws of the "
        f"text): {'; '.join(said)}. Best γ (weight of the first): {stated(dataset['gamma_swept'])}."
    )
    if not is_trained(dataset):
        return text
    after = [
        f"{way} {first} to {last} nats (perplexity {ppl}, {saved} steps saved; right answers: "
        f"{told(right)})"
        for way, first, last, ppl, saved, *right in _trained_table(dataset)[1:]
    ]
    epochs = f"{dataset.attrs['epochs']:.2g}"
    return (
        f"{text} Trained for {int(dataset['step'][-1])} steps, {epochs} epochs of the text: "
        f"{'; '.join(after)}.{claims.swept(dataset)}"
    )
