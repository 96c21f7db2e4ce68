"""Works (one tensor each) carried out by threads, under a memory limit."""
