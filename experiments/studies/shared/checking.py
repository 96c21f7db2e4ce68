"""Checks of configs that involve several of their fields."""

from operator import attrgetter


def must(config: object, field: str, holds: object, do: str) -> None:
    """Checks one field of a config in relation to others.

    Args:
      config: The config.
      field: The field, including its group: "budget.steps".
      holds: Whether the field is allowed.
      do: The requirement, for the message: "be above 3".

    Raises:
      ValueError: If it is not allowed: "FIELD must DO; got VALUE".
    """
    if not holds:
        raise ValueError(f"{field} must {do}; got {attrgetter(field)(config)}")
