"""The result of a search for a merge, as a page and as a record."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from sail_jax.cli.merge_report.record import plain as as_plain
from sail_jax.drawing import style
from sail_jax.drawing.pages import Section
from sail_jax.drawing.pages import page as rendered
from sail_jax.provenance import provenance
from sail_jax.searching import Outcome, Trial
from sail_jax.searching.journal import plain
from sail_jax.searching.prediction import agreement

SCHEMA = "sail-jax search 1"


def record(outcome: Outcome, search: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a result to JSON data.

    Args:
      outcome: The result of the search.
      search: The arguments of the search, as JSON data.

    Returns:
      The record, with versions and device.
    """
    return {
        "schema": SCHEMA,
        "search": dict(search),
        **provenance(),
        "answer": str(outcome),
        "recommended": outcome.recommended,
        "is_merge": outcome.is_merge,
        "options": plain(outcome.options),
        "found": {"name": outcome.found.name, "options": plain(outcome.found.options)},
        "p": outcome.p,
        "comparisons": [comparison._asdict() for comparison in outcome.comparisons],
        "models": outcome.models,
        "tasks": list(outcome.tasks),
        "front": [_short(trial) for trial in outcome.front],
        "predictions": [prediction._asdict() for prediction in outcome.predictions],
        "examples": {"searched": outcome.searched, "judged": outcome.judged},
        "evaluations": outcome.evaluations,
        "untried": list(outcome.untried),
    }


def _short(trial: Trial) -> dict[str, Any]:
    scores = trial.by_task.tolist()
    return {"name": trial.name, "options": plain(trial.options), "score_by_task": scores}


def as_json(data: Mapping[str, Any]) -> bytes:
    """Writes a record as JSON.

    Args:
      data: The record.

    Returns:
      The text. Numbers that are not finite become null.
    """
    return json.dumps(as_plain(data), indent=2, allow_nan=False).encode() + b"\n"


def page(outcome: Outcome, about: Mapping[str, Any], recipe: str | None) -> str:
    """Writes the result as one HTML document.

    Args:
      outcome: The result of the search.
      about: Its record.
      recipe: The recipe of the best merge; None if no recipe can express it.

    Returns:
      The document.
    """
    sentences = str(outcome).split("\n")
    sections = [
        Section(
            heading=sentences[0],
            question="Is a merge better than every single model, and than merges without a search?",
            answer=" ".join(sentences[1:]),
            pictures=[("differences with intervals", style.png(_differences(outcome)))],
            tables=[_compared(outcome)],
            details={} if recipe is None else {"recipe.yaml": recipe},
            about="The comparison uses examples that played no role in choosing the merge. All "
            "intervals hold together at 95 %.",
            more="",
        ),
        Section(
            heading="What was tried",
            question="How did the score rise, and on how many examples was each merge scored?",
            answer=_tried(outcome),
            pictures=[("scores of all trials", style.png(_course(outcome)))],
            tables=[_best(outcome)],
            details={},
            about="These scores chose the merge. The best of many trials is partly luck, so the "
            "score on the other examples is usually lower.",
            more="",
        ),
    ]
    if len(outcome.tasks) > 1:
        sections.append(
            Section(
                heading="The tasks",
                question="Which merges and models are not beaten in every task by another?",
                answer=f"{len(outcome.front)} of {len(_complete(outcome))} are on the front.",
                pictures=[("scores by task", style.png(_fronts(outcome)))],
                tables=[_front(outcome)],
                details={},
                about="Scores on the examples of the search, one line for each merge or model on "
                "the front.",
                more="",
            )
        )
    if len(outcome.predictions) >= 3:
        error, rank = agreement(outcome.predictions)
        sections.append(
            Section(
                heading="What theory predicted",
                question="Is the score quadratic between the models?",
                answer=f"Error {error:.2g} of the spread of what was measured; rank correlation "
                f"{rank:.2f}, over {len(outcome.predictions)} weighted means.",
                pictures=[("predicted and measured", style.png(_predicted(outcome)))],
                tables=[],
                details={},
                about="The prediction uses the models' scores, and scores half-way between pairs.",
                more="",
            )
        )
    facts = {key: json.dumps(value) for key, value in about["search"].items()}
    facts |= {"versions": json.dumps(about["versions"]), "device": json.dumps(about["device"])}
    return rendered(f"Search: {outcome.recommended}", sections, facts)


def _compared(outcome: Outcome) -> list[list[str]]:
    rows = [["compared with", "difference", "from", "to", "p (one-sided)", "examples", "needed"]]
    for one in outcome.comparisons:
        low, high = one.interval
        needed = "–" if one.needed is None else f"{one.needed:,}"
        rows.append([
            one.against, f"{one.difference:+.4g}", f"{low:+.4g}", f"{high:+.4g}", f"{one.p:.2g}",
            f"{one.examples:,}", needed,
        ])  # fmt: skip
    return rows


def _complete(outcome: Outcome) -> list[Trial]:
    """Returns the trials that were scored on the whole first part."""
    return [trial for trial in outcome.trials if len(trial.examples) == outcome.searched]


def _tried(outcome: Outcome) -> str:
    text = (
        f"{len(outcome.trials)} trials took {outcome.evaluations:.3g} scores of "
        f"{outcome.searched} examples."
    )
    if outcome.untried:
        text += f" The budget did not suffice for {', '.join(outcome.untried)}."
    return text


def _best(outcome: Outcome) -> list[list[str]]:
    """Returns the best trial of each arm and model on the first part."""
    best: dict[str, Trial] = {}
    for trial in sorted(_complete(outcome), key=lambda trial: -trial.score):
        best.setdefault(trial.name, trial)
    rows = [["merge or model", "hyperparameters", "score"]]
    return rows + [[t.name, _options(t), f"{t.score:.4g}"] for t in best.values()]


def _options(trial: Trial) -> str:
    rounded = {key: np.round(np.asarray(value), 3) for key, value in trial.options.items()}
    return ", ".join(f"{key} {value.tolist()}" for key, value in rounded.items())


def _front(outcome: Outcome) -> list[list[str]]:
    rows = [["merge or model", "hyperparameters", *outcome.tasks]]
    return rows + [
        [trial.name, _options(trial), *(f"{x:.4g}" for x in trial.by_task)]
        for trial in outcome.front
    ]


def _differences(outcome: Outcome) -> Figure:
    """Draws the merge compared with each reference: a point with its interval."""
    figure, axes = style.figure(width=6.4, height=2.4)
    ax = axes[0, 0]
    for place, one in enumerate(outcome.comparisons):
        low, high = one.interval
        clear = low > 0 or high < 0
        color = style.PALETTE[0] if clear else style.FAINT
        ax.plot([low, high], [place, place], color=color, lw=2)
        ax.plot([one.difference], [place], "o", color=color)
    ax.axvline(0, color=style.INK, lw=0.8)
    ax.set_yticks(
        range(len(outcome.comparisons)),
        [style.literal(one.against, 28) for one in outcome.comparisons],
    )
    ax.set_ylim(len(outcome.comparisons) - 0.5, -0.5)
    ax.set_xlabel(f"score of {style.literal(outcome.found.name)} minus that score")
    ax.set_title("Above 0: the merge is better")
    return figure


def _course(outcome: Outcome) -> Figure:
    """Draws all trials in order, and the best so far on all examples of the search."""
    figure, axes = style.figure(width=6.4, height=3.2)
    ax = axes[0, 0]
    trials = [t for t in outcome.trials if len(t.examples) != outcome.judged] or [*outcome.trials]
    whole = [len(t.examples) == outcome.searched for t in trials]
    places = np.arange(1, len(trials) + 1)
    scores = np.array([trial.score for trial in trials])
    for part, mark, label in ((True, "o", "all examples"), (False, ".", "some examples")):
        chosen = np.array(whole) == part
        color = style.PALETTE[0] if part else style.FAINT
        ax.plot(places[chosen], scores[chosen], mark, color=color, label=label, ms=4)
    chosen = np.array(whole)
    ax.step(
        places[chosen], np.maximum.accumulate(scores[chosen]), where="post",
        color=style.PALETTE[1], label="best on all",
    )  # fmt: skip
    ax.set_xlabel("trial")
    ax.set_ylabel("score on examples of the search")
    ax.legend()
    return figure


def _fronts(outcome: Outcome) -> Figure:
    """Draws the scores by task on the front, for single models and merges."""
    figure, axes = style.figure(width=6.4, height=3.4)
    ax = axes[0, 0]
    shown: Sequence[Trial] = sorted(outcome.front, key=lambda trial: -trial.score)[:6]
    places = np.arange(len(outcome.tasks))
    for k, trial in enumerate(shown):
        color = style.PALETTE[k % len(style.PALETTE)]
        line = "--" if trial.name in outcome.models else "-"
        name = style.literal(trial.name, 24)
        ax.plot(places, trial.by_task, f"o{line}", color=color, ms=4, label=name)
    ax.set_xticks(places, [style.literal(task, 14) for task in outcome.tasks])
    ax.set_ylabel("score")
    ax.legend(fontsize=style.points(8))
    return figure


def _predicted(outcome: Outcome) -> Figure:
    """Draws predicted and measured scores of weighted means; a perfect prediction is on the
    line."""
    figure, axes = style.figure(width=4.2, height=3.6)
    ax = axes[0, 0]
    predicted, measured = np.array([p[1:] for p in outcome.predictions]).T
    ax.plot(predicted, measured, "o", color=style.PALETTE[0], ms=4)
    ends = [min(predicted.min(), measured.min()), max(predicted.max(), measured.max())]
    ax.plot(ends, ends, "--", color=style.FAINT, label="equal")
    ax.set_xlabel("predicted score")
    ax.set_ylabel("measured score")
    ax.legend()
    return figure
