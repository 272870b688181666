"""How much of its budget a run spent on captures requested by triggers."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from stagescope_service.store.catalogue import Catalogue
from stagescope_service.triggers.budget import Spent

ORDERED_BY: Final = "trigger "
"""How `captures.by` begins where a trigger ordered it."""
_NEVER_STARTED: Final = ("refused", "given up", "too late")
_ALL: Final = 1_000_000


def spent(catalogue: Catalogue, run: str) -> Spent:
    """Return how much of its budget a run has spent."""
    ordered = [
        row
        for row in catalogue.captures(run=run)
        if (row["by"] or "").startswith(ORDERED_BY) and row["state"] not in _NEVER_STARTED
    ]
    size, seconds = 0, 0.0
    if ordered:
        by_rank: defaultdict[tuple[int, int | None], defaultdict[tuple[str, int], float]]
        by_rank = defaultdict(lambda: defaultdict(float))
        ids = [str(row["capture_id"]) for row in ordered]
        for dump in catalogue.dumps(capture_id=ids, limit=_ALL):
            size += dump["bytes"] or 0
            seconds_of = by_rank[dump["attempt_id"], dump["step"]]
            seconds_of[dump["role"], dump["rank"]] += dump["seconds"] or 0.0
        # The others of a step wait for its slowest rank.
        seconds = sum(max(ranks.values()) for ranks in by_rank.values())
    return Spent(
        captures=len(ordered),
        bytes=size,
        seconds=seconds,
        run_seconds=_run_seconds(catalogue, run),
        under_way=tuple(str(row["capture_id"]) for row in ordered if row["removed_wall"] is None),
    )


def _run_seconds(catalogue: Catalogue, run: str) -> float:
    found = 0.0
    for row in catalogue.attempts(run):
        end = row["ended_wall"] if row["ended_wall"] is not None else row["last_wall"]
        if end is not None and row["opened_wall"] is not None:
            found += max(end - row["opened_wall"], 0.0)
    return found
