"""docs/metrics.md, made of `statistics/definitions.py`.

    python -m tests.support.metrics_page

writes it anew.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from stagescope_service.statistics import definitions
from stagescope_service.statistics.definitions import DEFINITIONS

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def metrics_page() -> str:
    """Return the page."""
    _, notation, *notes = inspect.cleandoc(definitions.__doc__ or "").split("\n\n")
    rows = [f"| `{one.names}` | {one.unit} | {one.formula} | {one.source} |" for one in DEFINITIONS]
    table = "\n".join(["| name | unit | formula | source |", "| --- | --- | --- | --- |", *rows])
    made = (
        "`python -m tests.support.metrics_page` makes this page of "
        "`service/stagescope_service/statistics/definitions.py`."
    )
    return "\n\n".join(["# Published metrics", made, notation, table, *notes]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(metrics_page())
