"""Measured costs of merges, in CPU-seconds per GB of inputs.

Whole processes merged a base and three models of .5 billion parameters in bfloat16 (linear: without
the base). The inputs were in the page cache. The machine had two idle cores of an AMD EPYC. Each
rate is the median of three runs in alternation, minus the time of the same merge with tensors of
6 MB and compiled programs. That time is about `START`. The page "Merge on many hosts" contains the
numbers.
"""

START = 1.0
"""CPU-seconds of a process that merges almost nothing."""
RATES = {"linear": 0.50, "dare_ties": 0.75, "ties": 0.94, "della": 3.1}
"""CPU-seconds in addition for each GB of inputs, however often they are read, by method."""
SOURCE = "rates measured with a base and three models of .5 billion parameters on 2 AMD EPYC cores"
"""The origin of the rates, for plans."""


def cpu_seconds(method: str, compat: str, size: int) -> float | None:
    """Estimates the CPU-seconds of a merge.

    Args:
      method: The name of the method.
      compat: Its conventions. Only the papers' were measured; linear has a single convention.
      size: The bytes of all inputs, each counted once.

    Returns:
      The seconds on a machine like the measured one; None for a method that was not measured.

    >>> cpu_seconds("ties", "paper", 10 * 10**9), cpu_seconds("ties", "mergekit", 10**9)
    (10.4, None)
    """
    rate = RATES.get(method) if compat == "paper" or method == "linear" else None
    return None if rate is None else START + rate * size / 1e9
