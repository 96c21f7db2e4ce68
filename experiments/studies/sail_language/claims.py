"""Claims that `sail_language` tests both on its own networks and on checkpoints.

They need a dataset in which `loss` is `(way, seed, step)` and `accuracy` `(way, seed, when, task)`,
as `run.run` makes it. `merges.trained` converts checkpoints' results to this form.
"""

from typing import TYPE_CHECKING

import numpy as np

from experiments.data.benchmarks import BENCHMARKS
from experiments.lab.findings import Finding, judged, stated
from experiments.studies.sail_language.config import RETRAINED, SCRATCH
from experiments.studies.shared import gamma_sweep as line
from experiments.studies.shared.gamma_sweep import PUBLISHED

if TYPE_CHECKING:
    import xarray as xr

# The difference allowed by "closely aligns": two steps of the paper's sweep.
NEAR = 0.2
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
_OLMO = "OLMo-1B, means of the six rows"
_NOT = "not measured", "not tested"


def lower(
    dataset: "xr.Dataset",
    where: str,
    claim: str,
    paper: str,
    *,
    other: str,
    step: int,
    way: str = "sweep",
    beside: str | None = None,
) -> Finding:
    """Judges whether one start's loss on D_t is lower than another's.

    - `way`: the start with the supposedly lower loss; by default SAIL's.
    """
    ways = set(dataset["way"].values.astype(str))
    if not {way, other} <= ways:
        return Finding(where, claim, paper, *_NOT)
    loss = dataset["loss"].isel(step=step)
    ours, theirs = loss.sel(way=way), loss.sel(way=other)
    more = ""
    if beside in ways:
        more = f"; with γ by eq. 11 {stated(loss.sel(way=beside), 3, sign=False)}"
    return less(where, claim, paper, ours, theirs, more)


def less(
    where: str, claim: str, paper: str, ours: "xr.DataArray", theirs: "xr.DataArray", more: str = ""
) -> Finding:
    """Judges whether one loss is less than another, seed by seed; `more` is added to the text."""
    here = f"{stated(ours, 3, sign=False)} against {stated(theirs, 3, sign=False)} nats{more}"
    return judged(where, claim, paper, here, (theirs - ours).values)


def final(dataset: "xr.Dataset") -> list[Finding]:
    """Judges whether SAIL's loss after training is lower than from scratch and from LiGO."""
    named = {SCRATCH: "from scratch", "ligo": "LiGO's"}
    return [
        lower(
            dataset,
            "SAIL, App. I",
            f"After training, SAIL's loss is lower than {name}",
            "higher final performance (Fig. 7, perplexities not printed)",
            other=other,
            step=-1,
            beside="distance",
        )
        for other, name in named.items()
    ]


def sooner(dataset: "xr.Dataset", *, where: str = "SAIL, Sec. 4.4") -> Finding:
    """Judges whether SAIL's start saves steps against training from scratch."""
    claim = "SAIL reaches the loss of training from scratch sooner"
    paper = "faster convergence (Figs. 2b, 7; steps not printed, sources not counted)"
    if "sweep" not in dataset["way"].values:
        return Finding(where, claim, paper, *_NOT)
    at = dataset.sel(way="sweep")
    ours = (
        f"{stated(at['saved'], 0)} of {stated(at['scratch_steps'], 0, sign=False)} steps saved, "
        f"{stated(100 * at['compute_saved'], 0)} % of compute"
    )
    if "compute_saved_with_sources" in at:
        ours += f", with the sources' {stated(100 * at['compute_saved_with_sources'], 0)} %"
    return judged(where, claim, paper, ours, at["saved"].values)


def near(
    dataset: "xr.Dataset", predicted: "xr.DataArray", loss: "xr.DataArray", after: str, claim: str
) -> Finding:
    """Judges whether eq. 11 gives a gamma close to the gamma with the smallest loss.

    - `predicted`: the gamma by eq. 11, `(seed,)`.
    - `loss`: the losses on held-out text, `(seed, gamma)`.
    """
    gamma = dataset["gamma"].values
    loss = loss.transpose("seed", "gamma")
    best = predicted.copy(data=line.lowest(gamma, loss.values))
    # The loss at the predicted gamma minus the smallest loss of the sweep.
    cost = line.at(gamma, loss.values, predicted.values) - loss.min("gamma").values
    ours = (
        f"{stated(predicted)} against {stated(best)}, which costs "
        f"{stated(predicted.copy(data=cost), 3)} nats {after}"
    )
    return judged(
        "SAIL, Sec. 4.4",
        claim,
        f"γ* = {PUBLISHED} closely aligns with the optimum (Fig. 2b, after 50 to 200 steps)",
        ours,
        NEAR - abs(predicted - best).values,
    )


def retrained(dataset: "xr.Dataset") -> list[Finding]:
    """Judges gammas chosen by retraining (eq. 3) against gammas chosen before training.

    It returns the findings, "not tested" if the run does not retrain. They are: whether gammas by
    retraining end with a smaller loss; whether they are close to the gammas with the smallest loss
    before training; and, if the run uses eq. 11, whether its gammas are close to them, as in the
    paper's figure.
    """
    distant = f"γ by eq. 11 is within {NEAR:g} of the optimum after retraining"
    stays = f"γ of least loss before training is within {NEAR:g} of the one after retraining"
    paper = "eq. 3 defines γ by the loss after training; not compared with before"
    ends_lower = lower(
        dataset,
        "SAIL, eq. 3",
        "After training, SAIL's loss is lower with γ by retraining than with γ chosen before",
        paper,
        other="sweep",
        step=-1,
        way=RETRAINED,
    )
    knows = "gamma_distance" in dataset
    if "retrained_loss" not in dataset:
        found = [Finding("SAIL, eq. 3", stays, paper, *_NOT)]
        aligns = f"γ* = {PUBLISHED} closely aligns with the optimum (Fig. 2b)"
        found += [Finding("SAIL, Sec. 4.4", distant, aligns, *_NOT)] if knows else []
        return [ends_lower, *found]
    last = int(dataset["look"].values[-1])
    gamma, loss = dataset["gamma"].values, dataset["retrained_loss"]
    loss = loss.sel(look=last, text="held out").transpose("seed", "gamma")
    first = dataset["gamma_loss"].sel(text="held out")
    first = first.sel(pair="sweep") if "pair" in first.dims else first
    best, before = (
        dataset["gamma_retrained"].isel(look=0).copy(data=line.lowest(gamma, of.values))
        for of in (loss, first.transpose("seed", "gamma"))
    )
    here = f"{stated(before)} before, {stated(best)} after {last} steps"
    # Rounded, because equal vertices of parabolas differ by rounding errors.
    margins = np.round(NEAR - abs(before - best).values, 12)
    found = [judged("SAIL, eq. 3", stays, paper, here, margins)]
    if knows:
        after = f"after {last} steps"
        found.append(near(dataset, dataset["gamma_distance"], loss, after, distant))
    return [ends_lower, *found]


def perplexity(dataset: "xr.Dataset") -> "xr.DataArray":
    """Computes the perplexity, the exponential of the loss."""
    return dataset["loss"].copy(data=np.exp(dataset["loss"].values))


def swept(dataset: "xr.Dataset") -> str:
    """Describes the best gammas of eq. 3's loop.

    It returns a sentence with a leading space; empty if the run does not retrain.
    """
    if "gamma_retrained" not in dataset:
        return ""
    of = dataset["gamma_retrained"]
    told = ", ".join(f"{stated(of.sel(look=n))} after {n}" for n in of["look"].values)
    return f" Best γ by validation loss after steps of retraining: {told}."


def asked(dataset: "xr.Dataset") -> tuple[str, ...]:
    """Returns the names of the questions to compare with SAIL's Table 2.

    These are the table's benchmarks if there are any; else "file" if a file of questions was given;
    else the first kind, on held-out text.
    """
    tasks = tuple(map(str, dataset["task"].values))
    named = tuple(task for task in tasks if task in BENCHMARKS)
    return named or (("file",) if "file" in tasks else tasks[:1])


def right(dataset: "xr.Dataset") -> "xr.DataArray":
    """Computes the fraction of correct answers, averaged over the questions of `asked`."""
    return dataset["accuracy"].sel(when="after", task=list(asked(dataset))).mean("task")


def answers(dataset: "xr.Dataset") -> list[Finding]:
    """Judges the fractions of correct answers and the ranks of the starts against Table 2."""
    where = "SAIL, Table 2"
    best, order = (
        "SAIL answers more questions than scratch, LiGO and either soup",
        "Methods rank as in Table 2 (Kendall's τ above 0)",
    )
    names, kinds = ("scratch", "LiGO", "uniform", "greedy", "SAIL"), asked(dataset)
    rows = [TABLE_2[BENCHMARKS[kind].title] for kind in kinds if kind in BENCHMARKS]
    printed = np.mean(rows, axis=0) if rows else PRINTED
    paper = ", ".join(f"{n} {v:.1f}" for n, v in zip(names, printed, strict=True))
    of_rows = f"OLMo-1B, means of {len(rows)} of the six rows" if 0 < len(rows) < 6 else _OLMO
    paper += f" % ({of_rows})"
    if not set(COLUMNS) <= set(dataset["way"].values.astype(str)):
        return [Finding(where, claim, paper, *_NOT) for claim in (best, order)]
    of = {way: right(dataset).sel(way=way) for way in COLUMNS}
    ours = ", ".join(
        f"{n} {stated(100 * of[way], 1, sign=False)}" for n, way in zip(names, COLUMNS, strict=True)
    )
    ours += f" % ({', '.join(kinds)}, {dataset.attrs['items']} items at most)"
    others = np.max([of[way].values for way in COLUMNS[:-1]], axis=0)
    values = np.stack([of[way].values for way in COLUMNS])
    from scipy.stats import kendalltau  # slow to import

    tau = np.array([kendalltau(printed, column)[0] for column in values.T])
    said = f"τ = {stated(of['sweep'].copy(data=tau))}"
    return [
        judged(where, best, paper, ours, of["sweep"].values - others),
        judged(where, order, paper, said, tau),
    ]
