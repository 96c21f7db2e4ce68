"""Tiny files of the benchmarks that SAIL reports, as they are published."""

import json

# one question of each, as published; two in the layouts of ARC
RECORDS = {
    "piqa": [{"goal": "cut", "sol1": "saw", "sol2": "a saw", "label": 1}],
    "hellaswag": [
        {
            "activity_label": "Roof", "ctx_a": "A man sits. [step]", "ctx_b": "he", "label": "1",
            "ctx": "A man sits. [step] he", "endings": ["naps.", "is [x] up.", "a", "b"],
        }
    ],
    "winogrande": [
        {"sentence": "So _ was sad, as Bo won.", "option1": "Al", "option2": "Bo", "answer": "1"}
    ],
    "sciq": [
        {
            "question": "Who?", "correct_answer": "darwin", "distractor1": "a", "distractor2": "b",
            "distractor3": "c", "support": "He did. ",
        }
    ],
    "arc_easy": [
        {
            "question": "Newest?", "answerKey": "B",
            "choices": {"text": ["tv", "phone", "fridge"], "label": ["A", "B", "C"]},
        },
        {
            "id": "7", "answerKey": "2",
            "question": {
                "stem": "Oldest?", "choices": [{"text": "tv", "label": "1"},
                                               {"text": "wheel", "label": "2"}],
            },
        },
    ],
    "copa": [
        {
            "premise": "It rained.", "choice1": "We ran.", "choice2": "We sang.",
            "question": "effect", "label": 0, "idx": 0,
        }
    ],
}  # fmt: skip


def written(folder):
    """The files of all benchmarks, in a folder."""
    folder.mkdir(exist_ok=True)
    for name, records in RECORDS.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder
