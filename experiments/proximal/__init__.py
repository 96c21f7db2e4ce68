"""What the experiments on proximal initialisation share."""
