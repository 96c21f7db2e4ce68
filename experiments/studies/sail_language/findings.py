"""Verdicts on SAIL's claims about language models, from the dataset of `sail_language`."""

from typing import TYPE_CHECKING

from experiments.lab.findings import Finding, judged, stated
from experiments.studies.sail_language import claims, merges
from experiments.studies.sail_language.claims import NEAR, perplexity
from experiments.studies.sail_language.config import SCRATCH, WAYS

if TYPE_CHECKING:
    import xarray as xr

_SCALE = "GPT on OpenWebText"


def findings(dataset: "xr.Dataset") -> list[Finding]:
    """Judges SAIL's claims about language models.

    SAIL's own choice of gamma is "sweep", the smallest held-out loss before training. Checkpoints
    on disk have their own claims (`merges.findings`).

    It returns the findings, "not tested" if a training is missing. Verdicts are not yet
    corrected for their number.
    """
    if merges.is_of(dataset):
        return merges.findings(dataset)
    where = "SAIL, Sec. 4.4"
    declared = [
        claims.lower(
            dataset,
            where,
            "Before training, SAIL's loss on D_t is lower than a random start's",
            f"4.9782 against 10.8866 nats, the second of an untrained net ({_SCALE})",
            other=SCRATCH,
            step=0,
            beside="distance",
        )
    ]
    declared += [
        claims.lower(
            dataset,
            where,
            f"Before training, SAIL's loss on D_t is lower than the {WAYS[other]}'s",
            f"an optimum of the sweep, compared with γ = 0, 1/2, 1 (Fig. 2b, {_SCALE})",
            other=other,
            step=0,
            beside="distance",
        )
        for other in ("uniform", "greedy")
    ]
    near = claims.near(
        dataset,
        dataset["gamma_distance"],
        dataset["gamma_loss"].sel(pair="sweep", text="held out"),
        "before training",
        f"γ by eq. 11 is within {NEAR:g} of the sweep's optimum",
    )
    declared += [near, claims.sooner(dataset), *claims.final(dataset)]
    declared += claims.retrained(dataset)
    return [*declared, *claims.answers(dataset), _series(dataset)]


def _series(dataset: "xr.Dataset") -> Finding:
    """Judges whether the mean of one training's checkpoints has a lower loss than the last."""
    loss = dataset["series_loss"].sel(of="D_1")
    last, mean = loss.isel(checkpoint=-2), loss.sel(checkpoint="mean")
    steps = ", ".join(dataset["checkpoint"].values.astype(str)[:-1])
    return judged(
        "SAIL, App. I.1.2",
        "The mean of checkpoints of one run has a lower loss than the last of them",
        "SAIL starts from a merge of OLMo-1B's checkpoints; losses not printed",
        f"{stated(mean, 3, sign=False)} against {stated(last, 3, sign=False)} nats (steps {steps})",
        (last - mean).values,
    )


def table(dataset: "xr.Dataset") -> list[tuple[str, ...]]:
    """Tabulates the run, a row for each start, or for each checkpoint and merge.

    The columns are losses before and after training, perplexity, steps and compute saved, and
    correct answers. For merged checkpoints they are the loss, perplexity and correct answers. For
    trainings that continue from them, they also include Table 2's correct answers to each kind of
    question.
    """
    if merges.is_of(dataset):
        return merges.table(dataset)
    rows = [("way", "step 0", "last", "perplexity", "steps saved", "with sources", "answers")]
    for way in dataset["way"].values.astype(str):
        at = dataset.sel(way=way)
        last = at["loss"].isel(step=-1)
        right = 100 * claims.right(at)
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
    """Describes losses, steps saved and answers of each start, and the weights of the sources."""
    if merges.is_of(dataset):
        return merges.summary(dataset)
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
        f"{soups}.{claims.swept(dataset)}"
    )
