"""The report of a merge: measurements of each tensor, as JSON and as an HTML page.

`measures` adds up the records of the merge, `words` and `figures` present them, `record` and
`pages` make the two documents, and `files` writes them.
"""

from sail_jax.cli.merge_report.files import admit, write
from sail_jax.lazy import listed

__dir__ = listed(__name__)

__all__ = ["admit", "write"]
