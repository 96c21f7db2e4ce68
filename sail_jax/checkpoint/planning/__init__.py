"""Plans a merge: from a recipe and open checkpoints to what happens to every tensor."""
