"""Searches for a merge on held-out examples, with statistical evidence for the result.

`search` tries merging methods and their hyperparameters on one part of the examples. It compares
the best merge with the single models on another part, which the search has not used.
`sail_jax.search` is the same function.
"""

from sail_jax.lazy import listed
from sail_jax.searching.arms import Arm, arms
from sail_jax.searching.evidence import Comparison, compare, examples_needed, task_numbers
from sail_jax.searching.outcome import Outcome, Trial
from sail_jax.searching.searches import InMemory, Measure, parts, search, search_with

__all__ = [
    "Arm",
    "Comparison",
    "InMemory",
    "Measure",
    "Outcome",
    "Trial",
    "arms",
    "compare",
    "examples_needed",
    "parts",
    "search",
    "search_with",
    "task_numbers",
]

__dir__ = listed(__name__)
