"""Search for a merge on held-out examples, with an answer that states its evidence.

`search` tries merging methods and their hyperparameters on one part of the examples, and compares
the best with the models themselves on another part, which no choice has seen. `sail_jax.search` is
the same function.
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
