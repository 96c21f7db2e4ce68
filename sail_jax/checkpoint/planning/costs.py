"""What merges take of a processor, as measured: CPU-seconds for each GB of inputs."""

START = 0.0
"""CPU-seconds of a whole process that merges next to nothing, its programs compiled before."""
RATES = {"linear": 0.0}
"""CPU-seconds above that for each GB of inputs that are read once, by the name of the method. How
often they are read is in the numbers."""
SOURCE = ""
"""How the numbers were found."""


def cpu_seconds(method: str, size: int) -> float | None:
    """Estimates the CPU-seconds of a merge.

    Args:
      method: The name of the method.
      size: The bytes of all inputs, each read once.

    Returns:
      The seconds on a machine as the one that was measured; None for a method that was not.

    >>> cpu_seconds("linear", 10**12) > cpu_seconds("linear", 10**9) > 0
    True
    """
    rate = RATES.get(method)
    return None if rate is None else START + rate * size / 1e9
