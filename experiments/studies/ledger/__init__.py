"""Which of the papers' claims hold, and which only when corrected?

Each claim of `theory.claims` has a closed form and a simulation of the same quantity. The study
compares the two and gives a verdict for each claim.
"""
