"""Plans a merge: determines the treatment of every tensor from a recipe and open checkpoints."""
