"""Pages that show results of studies, and the explorer of theories."""
