"""Results to one self-contained HTML page.

>>> from manydg.report import write_report  # doctest: +SKIP
>>> write_report("RESULTS", "report.html")  # doctest: +SKIP
"""

from manydg.report.card import write_card, write_checklist
from manydg.report.page import write_report

__all__ = ["write_card", "write_checklist", "write_report"]
