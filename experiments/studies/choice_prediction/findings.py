"""The findings of `choice_prediction`, computed from the stored dataset alone."""

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, judged
from experiments.studies.choice_prediction.scores import Case, cases, interval

SOURCES = {
    "numbers": "theory.deep_linear.transfer_risks",
    "kernels": "regression on tangent features",
    "spread": "theory.merging.gaussian",
}
SUBJECTS = {"numbers": "transfer", "kernels": "transfer", "spread": "merges"}
RULES = {"majority": "the most frequent winner of the family's other settings"}


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Judges whether each theory is better than rules that do not look at the setting.

    The margins are differences in each setting, averaged over its repetitions.
    """
    found = []
    for name, case in cases(dataset).items():
        rules = {**RULES, "always": f"always '{case.always}'"}
        hits, regrets, briers = case.hits(), case.regrets(), case.briers()
        for rule, words in rules.items():
            found.append(
                _judged(
                    name, f"its most probable choice wins more often than {words}",
                    hits["theory"], hits[rule], hits["theory"] - hits[rule],
                )
            )  # fmt: skip
        found.append(
            _judged(
                name, f"its most probable choice has less test loss than {rules['always']}",
                regrets["theory"], regrets["always"], regrets["always"] - regrets["theory"],
            )
        )  # fmt: skip
        found.append(
            _judged(
                name, "its probabilities have a smaller Brier score than the winners' frequencies",
                briers["theory"], briers["frequencies"], briers["frequencies"] - briers["theory"],
            )
        )  # fmt: skip
    return found


def _judged(
    name: str, claim: str, ours: np.ndarray, other: np.ndarray, margins: np.ndarray
) -> Finding:
    return judged(
        SOURCES[name],
        f"'{name}' ({SUBJECTS[name]}): {claim}",
        "not a claim about networks",
        f"{ours.mean():.3f} against {other.mean():.3f}, over {len(margins)} settings",
        margins,
    )


def summary(dataset: xr.Dataset) -> str:
    """States hit rates with bootstrap intervals over settings, and how often each choice won."""
    draws, seed = dataset.attrs["draws"], dataset.attrs["seed"]
    sentences = []
    for name, case in cases(dataset).items():
        rates = {k: interval(x, draws, seed) for k, x in case.hits().items()}
        said = {k: f"{x:.0%} [{low:.0%}, {high:.0%}]" for k, (x, low, high) in rates.items()}
        sentences.append(
            f"{SUBJECTS[name].capitalize()}, {len(case.loss)} settings: the most probable choice "
            f"of '{name}' wins in {said['theory']}, the majority rule's in {said['majority']}, "
            f"always '{case.always}' in {said['always']}. {_won(case)}"
        )
    return " ".join(sentences)


def _won(case: Case) -> str:
    counts = np.bincount(case.winner, minlength=len(case.choices))
    parts = [f"{choice} {n}" for choice, n in zip(case.choices, counts, strict=True)]
    return f"Winners: {', '.join(parts)}."
