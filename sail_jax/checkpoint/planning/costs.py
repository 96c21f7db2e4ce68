"""What merges take of a processor, as measured: CPU-seconds for each GB of inputs.

Whole processes merged a base and three models of .5 billion parameters in bfloat16 (linear: without
the base), in the page cache, on two cores of an AMD EPYC that others used too: medians of three
runs, in turns. What the same merge of tensors of 6 MB takes, with compiled programs, was taken off:
that is `START`, or up to 3 seconds. The page "Merge on many hosts" has the numbers.
"""

START = 1.0
"""CPU-seconds of a process that merges next to nothing."""
RATES = {"linear": 0.51, "dare_ties": 0.91, "ties": 2.4, "della": 2.6}
"""CPU-seconds above that for each GB of inputs, however often they are read, by method."""
SOURCE = "what a base and three models of .5 billion parameters took on two cores of an AMD EPYC"
"""How the rates were found, for plans."""


def cpu_seconds(method: str, compat: str, size: int) -> float | None:
    """Estimates the CPU-seconds of a merge.

    Args:
      method: The name of the method.
      compat: Its conventions: those of the papers were measured, which linear has none of.
      size: The bytes of all inputs, each counted once.

    Returns:
      The seconds on a machine like the one that was measured; None for a method that was not.

    >>> cpu_seconds("ties", "paper", 10 * 10**9), cpu_seconds("ties", "mergekit", 10**9)
    (25.0, None)
    """
    rate = RATES.get(method) if compat == "paper" or method == "linear" else None
    return None if rate is None else START + rate * size / 1e9
