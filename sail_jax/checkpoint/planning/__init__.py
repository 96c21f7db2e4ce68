"""From a recipe and open checkpoints to what happens to every tensor."""
