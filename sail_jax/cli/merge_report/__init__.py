"""The report of a merge: what was measured of each tensor, as JSON and as a page to read.

`measures` adds up what the merge recorded, `words` and `figures` show it, `record` and `pages` make
the two documents, and `files` writes them.
"""

from sail_jax.cli.merge_report.files import admit, write
from sail_jax.lazy import listed

__dir__ = listed(__name__)

__all__ = ["admit", "write"]
