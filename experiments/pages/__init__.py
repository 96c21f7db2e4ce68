"""Pages that show what was found."""
