"""Benchmarks of SAIL's Table 2: tiny files in the published formats, prompts and lengths."""

import json
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_files import RECORDS, written

from experiments.data import benchmarks, choices
from experiments.data.benchmarks import Unit
from experiments.data.files import DataError

# contexts, choices and answers, by olmo/eval/downstream.py
WANTED = {
    "piqa": [(("Question: cut\nAnswer:",), (" saw", " a saw"), 1)],
    "hellaswag": [(("Roof: A man sits. He",), (" naps.", " is up.", " a", " b"), 1)],
    "winogrande": [(("So Al", "So Bo"), (" was sad, as Bo won.",), 0)],
    "sciq": [(("He did.\nQuestion: Who?\nAnswer:",), (" darwin", " a", " b", " c"), 0)],
    "arc_easy": [
        (("Question: Newest?\nAnswer:",), (" tv", " phone", " fridge"), 1),
        (("Question: Oldest?\nAnswer:",), (" tv", " wheel"), 1),
    ],
    "copa": [(("It rained therefore",), (" we ran.", " we sang."), 0)],
}


def test_questions_are_put_as_olmos_tools_put_them(tmp_path):
    assert list(RECORDS) == list(benchmarks.BENCHMARKS)
    folder = written(tmp_path)
    for name, wanted in WANTED.items():
        found = benchmarks.read(folder, name)
        for one, (contexts, offered, answer) in zip(found, wanted, strict=True):
            assert set(one.contexts) == set(contexts)
            assert tuple(dict.fromkeys(one.choices)) == offered
            assert len(one.contexts) == len(one.choices)
            assert one.answer == answer
    # the correct answer of SciQ takes every position in turn
    sciq = folder / "sciq.jsonl"
    sciq.write_text("\n".join(2 * [json.dumps(RECORDS["sciq"][0])]))
    assert [one.answer for one in benchmarks.read(folder, "sciq")] == [0, 1]
    # PIQA's labels are published in a separate file
    unlabelled = {k: v for k, v in RECORDS["piqa"][0].items() if k != "label"}
    (folder / "piqa.jsonl").write_text(json.dumps(unlabelled))
    (folder / "piqa.lst").write_text("0\n")
    assert benchmarks.read(folder, "piqa")[0].answer == 0
    (folder / "piqa.lst").write_text("0\n1\n")
    with pytest.raises(DataError, match=r"piqa.lst has 2 labels, .*piqa.jsonl has 1 questions"):
        benchmarks.read(folder, "piqa")


def of_each(questions, encode):
    """The questions as tokens, by each unit."""
    return {unit: benchmarks.pack(questions, encode, 60, unit) for unit in get_args(Unit)}


def test_lengths_are_in_the_unit_and_choices_are_scored_alone(tmp_path):
    folder = written(tmp_path)
    encode = lambda text: np.frombuffer(text, np.uint8)  # noqa: E731
    for name in benchmarks.BENCHMARKS:
        questions = benchmarks.read(folder, name)
        by_unit = of_each(questions, encode)
        for packed in by_unit.values():
            for i, one in enumerate(questions):
                for j, (context, choice) in enumerate(zip(one.contexts, one.choices, strict=True)):
                    row, scored = packed.tokens[i, j], packed.scored[i, j]
                    assert bytes(row[scored].astype(np.uint8)).decode() == choice
                    whole = (context + choice).encode()
                    assert bytes(row[: len(whole)].astype(np.uint8)) == whole
                assert not packed.scored[i, len(one.choices) :].any()
        for i, one in enumerate(questions):
            n, sizes = len(one.choices), {u: p.length[i].tolist() for u, p in by_unit.items()}
            assert sizes["sum"][:n] == n * [1]
            assert sizes["character"][:n] == [len(choice) - 1 for choice in one.choices]
            assert sizes["token"][:n] == [len(choice) for choice in one.choices]
    # the unit matters: a longer choice of more likely tokens loses by the sum
    questions = benchmarks.read(folder, "piqa")
    for unit, packed in of_each(questions, encode).items():
        rate = jnp.where(packed.tokens == ord("s"), -2.0, -0.1)
        scores = choices.scores(rate, jnp.asarray(packed.scored), jnp.asarray(packed.length))
        assert int(np.argmax(scores)) == (unit != "sum")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("piqa", {"label": 2}),
        ("piqa", {"sol2": " "}),
        ("hellaswag", {"endings": ["a"]}),
        ("hellaswag", {"ctx_b": None}),
        ("winogrande", {"sentence": "no blank"}),
        ("sciq", {"distractor1": 3}),
        ("arc_easy", {"answerKey": "E"}),
        ("copa", {"question": "why"}),
    ],
)
def test_lines_that_are_no_question_of_the_benchmark_are_named(tmp_path, name, changes):
    folder, title = written(tmp_path), benchmarks.BENCHMARKS[name].title
    (folder / f"{name}.jsonl").write_text(json.dumps(RECORDS[name][0] | changes))
    with pytest.raises(DataError, match=rf"{name}.jsonl, line 1: expected .* of {title}; got"):
        benchmarks.read(folder, name)
    (folder / f"{name}.jsonl").unlink()
    with pytest.raises(DataError, match=rf"{name}.jsonl is missing"):
        benchmarks.read(folder, name)
