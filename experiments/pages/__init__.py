"""Pages with results of studies, and the explorer of theories."""
