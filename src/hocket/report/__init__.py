"""Finished runs as tables, charts and one self-contained HTML page that answers first.

``read`` finds what runs left behind, ``rows`` makes one row per configuration, ``answers`` says which strategy to take, ``table``,
``charts`` and ``page`` show it, and :func:`build` writes it all.
"""

from hocket.report.build import Report, build
from hocket.report.rows import Row

__all__ = ["build", "Report", "Row"]
