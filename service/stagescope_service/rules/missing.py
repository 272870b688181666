"""The ranks that partial steps lack: a rank is missing only in a stage that it runs in other steps.

A step counts all ranks of a role in each of its stages, because a lost report must not make it
complete. In a stage that some ranks alone run (rank 0 generates or scores), no other rank is gone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Final

from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.queries.overview import ListedAttempt, ListedStep
from stagescope_service.store.tables import UnfinishedRank

_NOT_BEGUN: Final = "not begun"
"""Status of a rank that never began the stage in the step."""
_FIRST: Final = 10
"""Steps before the partial ones, and first steps of an attempt, that show which ranks run a
stage."""
_ATTEMPTS: Final = 3
"""Newest attempts whose first steps show it."""
StepKey = tuple[int, int]
"""(attempt_id, step)."""


def missing_ranks(
    catalogue: Catalogue, attempts: Sequence[ListedAttempt], partial: Iterable[StepKey]
) -> dict[StepKey, list[UnfinishedRank]]:
    """Return the ranks that some partial steps lack; [] for a step that lacks none.

    Args:
        catalogue: the reading side of the store.
        attempts: of the run, ascending.
        partial: the steps.
    """
    by_attempt: dict[int, list[int]] = defaultdict(list)
    for attempt_id, step in partial:
        by_attempt[attempt_id].append(step)
    if not by_attempt:
        return {}
    read: list[ListedStep] = []
    for attempt_id, steps in by_attempt.items():
        span = max(steps) - min(steps) + 1 + _FIRST
        read += catalogue.steps(attempt_id, before=max(steps) + 1, limit=span)
    firsts: list[ListedStep] = []
    for attempt in attempts[-_ATTEMPTS:]:
        if attempt["first_step"] is not None:
            before = attempt["first_step"] + _FIRST
            firsts += catalogue.steps(attempt["attempt_id"], before=before, limit=_FIRST)
    began = _began(chain(read, firsts))
    working = {(role, rank) for (role, _), ranks in began.items() for rank in ranks}
    return {
        (row["attempt_id"], row["step"]): [
            each
            for each in row["missing"] or ()
            if each["rank"] in began[each["role"], each["stage"]]
            or (each["role"], each["rank"]) not in working
        ]
        for row in read
        if row["step"] in by_attempt.get(row["attempt_id"], ())
    }


def _began(rows: Iterable[ListedStep]) -> Mapping[tuple[str, str], set[int]]:
    """Return (role, stage) -> the ranks that began it in one of some steps."""
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for row in rows:
        absent: dict[tuple[str, str], set[int]] = defaultdict(set)
        for each in row["missing"] or ():
            if each["status"] == _NOT_BEGUN:
                absent[each["role"], each["stage"]].add(each["rank"])
        for role, by_stage in (row["expected"] or {}).items():
            for stage, ranks in by_stage.items():
                found[role, stage] |= {*ranks} - absent[role, stage]
    return found
