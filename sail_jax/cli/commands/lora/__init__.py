"""Extract, merge and apply low-rank adapters (LoRA)."""
