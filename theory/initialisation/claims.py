"""The ledger of SAIL, in the order of its statements.

Simulators draw models, tasks and samples, descend by autodiff, or fit parameters by least squares.
Pages are those of the review copy, whose margin numbers 54 lines on each.
"""

from theory.initialisation import (
    combination_claims,
    convergence_claims,
    discriminant_claims,
    transfer_claims,
)

CLAIMS = (
    *convergence_claims.CLAIMS,
    *combination_claims.CLAIMS,
    *discriminant_claims.CLAIMS,
    *transfer_claims.CLAIMS,
)
