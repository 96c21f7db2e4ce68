"""The ledger of unified merging (arXiv 2601.21690), in the order of its statements.

After it come the averages of one run's checkpoints (arXiv 2507.17634).

Simulators are SGD runs on drawn data with and without the other sample, merged and measured, and
the merging rules of `sail_jax` on task vectors. Sources name sections: the text that was read is
the HTML edition, which has no pages.
"""

from theory.merging import (
    averaging_claims,
    gradient_claims,
    law_claims,
    sparsification_claims,
    stability_claims,
)

CLAIMS = (
    *stability_claims.CLAIMS,
    *gradient_claims.CLAIMS,
    *sparsification_claims.CLAIMS,
    *law_claims.CLAIMS,
    *averaging_claims.CLAIMS,
)
