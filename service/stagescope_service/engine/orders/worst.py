"""Which ranks an order of `worst(k)` means: by the newest step that has a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stagescope.errors import Conflict
from stagescope_service.statistics import Whole, publish_cell
from stagescope_service.store.catalogue import Catalogue


def worst_ranks(whole: Whole, count: int) -> list[int]:
    """Return the ranks with the highest mean |d|, the worst first; non-finite is worst of all."""
    found: dict[int, float] = {}
    for row in whole.ranks:
        mean = publish_cell(row.cell, whole.summary.pair)["logprob_abs_diff/mean"]
        found[row.rank] = max(found.get(row.rank, -math.inf), math.inf if mean != mean else mean)
    return sorted(found, key=lambda rank: (-found[rank], rank))[:count]


def with_ranks(catalogue: Catalogue, capture: Mapping[str, Any]) -> dict[str, Any]:
    """Return an order with the ranks that `worst(k)` stands for now, in a run's newest attempt.

    Raises:
        Conflict: nothing was measured by which a rank could be called worst.
    """
    ranks = capture["ranks"]
    if not isinstance(ranks, Mapping):
        return dict(capture)
    row = catalogue.newest_whole(capture["run"])
    if row is None:
        raise Conflict(
            "no step has numbers by which a rank could be called worst",
            expected="ranks by number, or 'all'",
        )
    chosen = worst_ranks(Whole.from_bytes(row["whole"]), ranks["worst"])
    return {**capture, "ranks": sorted(chosen)}
