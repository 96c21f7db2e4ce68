"""Feature spaces of array axes, maps between them, and checks of a change of basis.

`axes` and `spaces` assign a feature space to every axis of every parameter: a `Spec`. `maps` and
`families` describe how one space is re-expressed: a `SpaceMap`. `change_basis` applies maps to
parameters, and `certificate` checks whether the network computes the same function as before.
"""
