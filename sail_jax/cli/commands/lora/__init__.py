"""Extract, merge and apply adapters of low rank."""
