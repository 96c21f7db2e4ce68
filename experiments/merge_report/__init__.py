"""The report of a merge: what was measured of every tensor, as JSON and as one page to read."""

from experiments.merge_report.files import admit, write
from experiments.merge_report.measures import kind
from experiments.merge_report.pages import page
from experiments.merge_report.record import as_json

__all__ = ["admit", "as_json", "kind", "page", "write"]
