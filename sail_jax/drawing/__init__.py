"""How figures and pages look."""
