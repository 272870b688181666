"""docs/metrics.md, made of the table at the top of `statistics/mismatch.py`.

    python -m tests.support.metrics_page

writes it anew.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from stagescope_service.statistics import mismatch

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def metrics_page() -> str:
    """Return the page."""
    documented = inspect.cleandoc(mismatch.__doc__ or "")
    return (
        "# Published metrics\n\n"
        "`python -m tests.support.metrics_page` makes this page of "
        "`service/stagescope_service/statistics/mismatch.py`.\n\n"
        f"{documented}\n"
    )


if __name__ == "__main__":
    PAGE.write_text(metrics_page())
