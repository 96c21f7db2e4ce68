"""Which of the papers' claims hold, and which only when corrected?

Each closed form beside a simulation of the same quantity.
"""
