"""A comparison as JSON, as NexRL's report, and as one HTML file with figures.

`stagescope_wire.comparison_texts` renders it as lines for a terminal, from the JSON.
"""

from __future__ import annotations

from stagescope_service.compare.report.as_json import SCHEMA_FILE, as_json

__all__ = ["SCHEMA_FILE", "as_json"]
