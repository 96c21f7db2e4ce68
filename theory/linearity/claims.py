"""The ledger of cross-task linearity (arXiv 2402.03660), in the order of its statements.

Simulators are forward passes of networks trained by gradient descent, merged and measured; Hessians
and second derivatives by autodiff.
"""

from theory.linearity import (
    arithmetic_claims,
    correlation_claims,
    lemma_claims,
    theorem_claims,
)

CLAIMS = (
    *lemma_claims.CLAIMS,
    *arithmetic_claims.CLAIMS,
    *theorem_claims.CLAIMS,
    *correlation_claims.CLAIMS,
)
