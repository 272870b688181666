"""A comparison as JSON, as NexRL's report, and as one HTML file with pictures.

As lines for a terminal it is `stagescope.compared`: the client has no more than the JSON.
"""

from __future__ import annotations

from stagescope_service.compare.report.as_json import SCHEMA_FILE, as_json

__all__ = ["SCHEMA_FILE", "as_json"]
