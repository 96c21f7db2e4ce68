"""SAIL's claims about language models, judged from the stored dataset of `sail_language` alone."""

from typing import TYPE_CHECKING

import numpy as np

from experiments.lab.findings import Finding, judged, stated
from experiments.studies.proximal_gamma.findings import PUBLISHED
from experiments.studies.sail_language.config import SCRATCH, WAYS
from experiments.training import gamma_sweep as line

if TYPE_CHECKING:
    import xarray as xr

NEAR = 0.2  # how near "closely aligns" is taken to be: two steps of the paper's sweep
# Table 2, accuracy in %, in this order
COLUMNS = (SCRATCH, "ligo", "uniform", "greedy", "sweep")
TABLE_2 = {
    "PIQA": (51.96, 52.29, 54.80, 57.73, 61.92),
    "HellaSwag": (24.87, 25.33, 25.25, 27.65, 34.48),
    "Winogrande": (51.14, 50.20, 50.51, 52.09, 52.96),
    "SciQ": (22.10, 23.90, 51.90, 59.70, 70.30),
    "ARC-Easy": (27.54, 29.65, 27.19, 34.91, 42.63),
    "COPA": (58.00, 55.00, 57.00, 51.00, 63.00),
}
PRINTED = np.mean(list(TABLE_2.values()), axis=0)
_SCALE = "GPT on OpenWebText"
_OLMO = "OLMo-1B, means of the six rows"


def findings(dataset: "xr.Dataset") -> list[Finding]:
    """Judges SAIL's claims about language models.

    SAIL's own way of choosing gamma is "sweep", the least held-out loss before training. Of merged
    checkpoints only the losses are judged.

    Args:
      dataset: A finished run.

    Returns:
      The findings, "not tested" where the run lacks a training. Verdicts are not yet corrected for
      their number.
    """
    if _merged(dataset):
        return _merged_findings(dataset)
    ways = set(dataset["way"].values.astype(str))
    first, last = (dataset["loss"].isel(step=at) for at in (0, -1))
    declared = []

    def compared(where: str, claim: str, paper: str, values: "xr.DataArray", other: str) -> None:
        """Declares the claim that SAIL's loss is lower than that of another start."""
        if not {"sweep", other} <= ways:
            declared.append(Finding(where, claim, paper, "not measured", "not tested"))
            return
        sail, beside = values.sel(way="sweep"), values.sel(way=other)
        ours = f"{stated(sail, 3, sign=False)} against {stated(beside, 3, sign=False)} nats"
        if "distance" in ways:
            ours += f"; with γ by eq. 11 {stated(values.sel(way='distance'), 3, sign=False)}"
        declared.append(judged(where, claim, paper, ours, (beside - sail).values))

    before = f"4.9782 against 10.8866 nats, the latter of an untrained net ({_SCALE})"
    compared(
        "SAIL, Sec. 4.4",
        "Before training, SAIL's loss on D_t is lower than a random start's",
        before,
        first,
        SCRATCH,
    )
    for other in ("uniform", "greedy"):
        compared(
            "SAIL, Sec. 4.4",
            f"Before training, SAIL's loss on D_t is lower than the {WAYS[other]}'s",
            f"an optimum of the sweep beside γ = 0, 1/2, 1 (Fig. 2b, {_SCALE})",
            first,
            other,
        )
    declared += [_near(dataset), _sooner(dataset, ways)]
    for other in (SCRATCH, "ligo"):
        compared(
            "SAIL, App. I",
            f"After training, SAIL's loss is lower than {_from(other)}",
            "higher final performance (Fig. 7, perplexities not printed)",
            last,
            other,
        )
    return [*declared, *_answers(dataset, ways), _series(dataset)]


def _from(way: str) -> str:
    """Names a start in the claim on final losses."""
    return "from scratch" if way == SCRATCH else "LiGO's"


def _near(dataset: "xr.Dataset") -> Finding:
    """Judges whether eq. 11 gives a gamma near that of least loss."""
    gamma = dataset["gamma"].values
    loss = dataset["gamma_loss"].sel(pair="sweep", text="held out")
    predicted = dataset["gamma_distance"]
    best = predicted.copy(data=line.lowest(gamma, loss.values))
    # what the loss at the predicted gamma lies above the least of the sweep
    cost = line.at(gamma, loss.values, predicted.values) - loss.min("gamma").values
    ours = (
        f"{stated(predicted)} against {stated(best)}, which costs "
        f"{stated(predicted.copy(data=cost), 3)} nats before training"
    )
    return judged(
        "SAIL, Sec. 4.4",
        f"γ by eq. 11 is within {NEAR:g} of the sweep's optimum",
        f"γ* = {PUBLISHED} closely aligns with the optimum (Fig. 2b, after 50 to 200 steps)",
        ours,
        NEAR - abs(predicted - best).values,
    )


def _sooner(dataset: "xr.Dataset", ways: set[str]) -> Finding:
    """Judges whether SAIL's start saves steps against training from scratch."""
    where, claim = "SAIL, Sec. 4.4", "SAIL reaches the loss of training from scratch sooner"
    paper = "faster convergence (Figs. 2b, 7; steps not printed, sources not counted)"
    if "sweep" not in ways:
        return Finding(where, claim, paper, "not measured", "not tested")
    at = dataset.sel(way="sweep")
    ours = (
        f"{stated(at['saved'], 0)} of {stated(at['scratch_steps'], 0, sign=False)} steps saved, "
        f"{stated(100 * at['compute_saved'], 0)} % of compute, with the sources' "
        f"{stated(100 * at['compute_saved_with_sources'], 0)} %"
    )
    return judged(where, claim, paper, ours, at["saved"].values)


def asked(dataset: "xr.Dataset") -> str:
    """Names the questions that are compared with SAIL's Table 2.

    Args:
      dataset: A run that trained networks.

    Returns:
      "file" if there were questions of a file, else the first kind, on held-out text.
    """
    tasks = dataset["task"].values.astype(str)
    return "file" if "file" in tasks else str(tasks[0])


def _answers(dataset: "xr.Dataset", ways: set[str]) -> list[Finding]:
    """Judges the shares of right answers, and how they rank the starts, against Table 2."""
    where = "SAIL, Table 2"
    best, order = (
        "SAIL answers more questions than scratch, LiGO and either soup",
        "Methods rank as in Table 2 (Kendall's τ above 0)",
    )
    names = ("scratch", "LiGO", "uniform", "greedy", "SAIL")
    paper = ", ".join(f"{n} {v:.1f}" for n, v in zip(names, PRINTED, strict=True))
    paper += f" % ({_OLMO})"
    shown = [way for way in COLUMNS if way in ways]
    if len(shown) < len(COLUMNS):
        missing = "not measured", "not tested"
        return [Finding(where, claim, paper, *missing) for claim in (best, order)]
    right = dataset["accuracy"].sel(when="after", task=asked(dataset))
    of = {way: right.sel(way=way) for way in COLUMNS}
    ours = ", ".join(
        f"{n} {stated(100 * of[way], 1, sign=False)}" for n, way in zip(names, COLUMNS, strict=True)
    )
    ours += f" % ({asked(dataset)}, {dataset.attrs['items']} items at most)"
    others = np.max([of[way].values for way in COLUMNS[:-1]], axis=0)
    values = np.stack([of[way].values for way in COLUMNS])
    from scipy.stats import kendalltau  # slow to import

    tau = np.array([kendalltau(PRINTED, column)[0] for column in values.T])
    said = f"τ = {stated(right.isel(way=0).copy(data=tau))}"
    return [
        judged(where, best, paper, ours, of["sweep"].values - others),
        judged(where, order, paper, said, tau),
    ]


def _series(dataset: "xr.Dataset") -> Finding:
    """Judges whether the mean of one training's checkpoints has a lower loss than the last."""
    loss = dataset["series_loss"].sel(of="D_1")
    last, mean = loss.isel(checkpoint=-2), loss.sel(checkpoint="mean")
    steps = ", ".join(dataset["checkpoint"].values.astype(str)[:-1])
    return judged(
        "SAIL, App. I.1.2",
        "The mean of checkpoints of one run has a lower loss than the last of them",
        "a merge of OLMo-1B's checkpoints is where SAIL starts; losses not printed",
        f"{stated(mean, 3, sign=False)} against {stated(last, 3, sign=False)} nats (steps {steps})",
        (last - mean).values,
    )


def perplexity(dataset: "xr.Dataset") -> "xr.DataArray":
    """Computes the perplexity, the exponential of the loss.

    Args:
      dataset: A finished run, or a part of one.

    Returns:
      The perplexity, with the dimensions of `loss`.
    """
    return dataset["loss"].copy(data=np.exp(dataset["loss"].values))


def table(dataset: "xr.Dataset") -> list[tuple[str, ...]]:
    """Tabulates the run, a row for each start, or for each checkpoint and merge.

    The columns are losses before and after training, perplexity, steps and compute saved, and right
    answers; of merged checkpoints the loss, perplexity and right answers.

    Args:
      dataset: A finished run.

    Returns:
      The names of the columns, then the rows.
    """
    if _merged(dataset):
        return _merged_table(dataset)
    rows = [("way", "step 0", "last", "perplexity", "steps saved", "with sources", "answers")]
    for way in dataset["way"].values.astype(str):
        at = dataset.sel(way=way)
        last = at["loss"].isel(step=-1)
        right = 100 * at["accuracy"].sel(when="after", task=asked(dataset))
        cells = (
            stated(at["loss"].isel(step=0), 3, sign=False),
            stated(last, 3, sign=False),
            stated(perplexity(at).isel(step=-1), sign=False),
            stated(at["saved"], 0),
            f"{stated(100 * at['compute_saved_with_sources'], 0)} %",
            f"{stated(right, 1, sign=False)} %",
        )
        rows.append((WAYS[way], *cells))
    return rows


def summary(dataset: "xr.Dataset") -> str:
    """Describes losses, steps saved and answers of each start, and the weights of the sources.

    Args:
      dataset: A finished run.

    Returns:
      A few sentences.
    """
    if _merged(dataset):
        return _merged_summary(dataset)
    _, *rows = table(dataset)
    said = "; ".join(
        f"{way}: {zero} to {last} nats (perplexity {perplexity}), {saved} steps saved, compute "
        f"with the sources' {share}, right answers {right}"
        for way, zero, last, perplexity, saved, share, right in rows
    )
    taken = dataset["taken"].sum("source").values
    alone = dataset["gamma_swept"].sel(pair="sweep").round(9).isin([0, 1]).values
    soups = (
        f"the greedy soup took both sources in {int((taken == 2).sum())} of {taken.size} seeds, "
        f"the sweep one of them alone (γ = 0 or 1) in {int(alone.sum())}"
    )
    swept = ", ".join(
        f"{name} {stated(dataset['gamma_swept'].sel(pair=pair))}"
        for pair, name in (("sweep", "the sources"), ("grown", "the grown ones"))
        if pair in dataset["pair"].values
    )
    return (
        f"Held-out loss on D_t before and after training (mean ± s.e. over "
        f"{dataset.sizes['seed']} seeds): {said}. Best γ before training, between {swept}; "
        f"{soups}."
    )


# of checkpoints on disk


def _merged(dataset: "xr.Dataset") -> bool:
    """Says whether the run is one of merged checkpoints."""
    return "model" in dataset.coords


def _merged_findings(dataset: "xr.Dataset") -> list[Finding]:
    """Judges whether the merges are better than the last checkpoint, and SAIL's than the soups."""
    loss = dataset["loss"]
    last = str(dataset["checkpoint"].values[-1])
    claims = [
        ("The mean of the checkpoints has a lower loss than the last of them", "uniform", last),
        ("SAIL's start has a lower loss than the uniform soup", "sweep", "uniform"),
        ("SAIL's start has a lower loss than the greedy soup", "sweep", "greedy"),
    ]
    return [
        judged(
            "SAIL, App. I",
            claim,
            "merges of OLMo's checkpoints are where training starts; their losses are not printed",
            f"{stated(loss.sel(model=model), 3, sign=False)} against "
            f"{stated(loss.sel(model=other), 3, sign=False)} nats",
            (loss.sel(model=other) - loss.sel(model=model)).values,
        )
        for claim, model, other in claims
    ]


def _merged_table(dataset: "xr.Dataset") -> list[tuple[str, ...]]:
    """Tabulates loss, perplexity and right answers of each checkpoint and merge."""
    tasks = dataset["task"].values.astype(str)
    rows = [("model", "loss", "perplexity", *(f"answers, {task}" for task in tasks))]
    for name in dataset["model"].values.astype(str):
        at = dataset.sel(model=name)
        right = [100 * at["accuracy"].sel(task=task) for task in tasks]
        cells = stated(at["loss"], 3, sign=False), stated(perplexity(at), sign=False)
        rows.append((name, *cells, *(f"{stated(share, 1, sign=False)} %" for share in right)))
    return rows


def _merged_summary(dataset: "xr.Dataset") -> str:
    """Describes losses and answers of each checkpoint and merge."""
    tasks = dataset["task"].values.astype(str)
    said = []
    for name, loss, ppl, *right in _merged_table(dataset)[1:]:
        answers = ", ".join(f"{task} {share}" for task, share in zip(tasks, right, strict=True))
        said.append(f"{name} {loss} nats (perplexity {ppl}; right answers: {answers})")
    return (
        f"Held-out text and questions (mean ± s.e. over {dataset.sizes['seed']} draws of the "
        f"text): {'; '.join(said)}. Best γ, weight of the first, {stated(dataset['gamma_swept'])}."
    )
