"""What studies measure of networks and trainings: answers, distances of samples, costs, savings."""
