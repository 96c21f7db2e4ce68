"""Feature spaces of array axes, maps between them, and what a change of basis preserves.

`axes` and `spaces` name the feature space that every axis of every parameter lives in: a `Spec`.
`maps` and `families` describe how one space is re-expressed: a `SpaceMap`. `change_basis` applies
maps to parameters, and `certificate` says whether the network computes what it did before.
"""
