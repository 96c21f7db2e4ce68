"""One folder a study: its question, config, run, findings and plots."""
