"""Measurements for studies: answers, distances between samples, costs of training, savings."""
