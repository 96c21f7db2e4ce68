"""The report of a merge: what was measured of every tensor, as JSON and as one page to read."""

from sail_jax.cli.merge_report.files import admit, write
from sail_jax.cli.merge_report.measures import kind
from sail_jax.cli.merge_report.pages import page
from sail_jax.cli.merge_report.record import as_json

__all__ = ["admit", "as_json", "kind", "page", "write"]
