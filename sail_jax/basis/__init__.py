"""Feature spaces of array axes, maps between them, and what a change of basis preserves."""
