"""The ledger of overtrained (Springer et al. 2025), in the order of its statements.

Sources name sections: the text that was read is the HTML edition, which has no pages.
"""

from theory.two_layer import (
    batch_claims,
    perturbation_claims,
    pretraining_claims,
    recursion_claims,
    theorem_claims,
)

CLAIMS = (
    *pretraining_claims.CLAIMS,
    *perturbation_claims.CLAIMS,
    *recursion_claims.CLAIMS,
    *batch_claims.CLAIMS,
    *theorem_claims.CLAIMS,
)
