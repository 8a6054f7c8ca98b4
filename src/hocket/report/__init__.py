"""Finished runs as tables, charts and one self-contained HTML page that begins with answers.

``read`` reads the files of runs, ``rows`` makes one row per configuration, ``answers`` says which strategy to choose, ``table``,
``charts`` and ``page`` show it, and :func:`build` writes it all.
"""

from hocket.report.build import Report, build
from hocket.report.rows import Row

__all__ = ["build", "Report", "Row"]
