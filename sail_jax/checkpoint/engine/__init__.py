"""Works carried out by threads, under a memory limit."""
