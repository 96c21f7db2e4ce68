"""Plans a merge: decides the treatment of every tensor from a recipe and open checkpoints."""
