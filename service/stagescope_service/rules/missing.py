"""The ranks that steps lack: a rank is missing only in a stage that it runs in other steps.

The verdict that is stored counts all ranks of a role in each of its stages, because a lost report
must not make a step complete. In a stage that few ranks run (rank 0 generates or scores), no other
rank is gone: every answer about a step leaves these out. Where most ranks run a stage, a rank that
never does is missing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple

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


class StageRanks(NamedTuple):
    """Which ranks run which stages, as some steps show."""

    began: Mapping[tuple[str, str], set[int]]
    """(role, stage) -> ranks that began it in one of the steps."""
    times: Mapping[tuple[str, str], int]
    """(role, stage) -> how many of the steps have it."""
    working: set[tuple[str, int]]
    """(role, rank) of those that began any stage."""

    def lacks(self, role: str, rank: int, stage: str, *, is_open: bool = False) -> bool:
        """Return whether a rank that did not begin a stage of a step is missing there.

        A rank is missing if it runs the stage in another step, or if most ranks of its role run
        it. A rank that runs no stage at all is missing, too. So is each rank in a stage that no
        other step has: nobody knows who runs it.
        """
        key = (role, stage)
        is_known = self.times.get(key, 0) > (0 if is_open else 1)
        if not is_known or rank in self.began[key] or (role, rank) not in self.working:
            return True
        return 2 * len(self.began[key]) > sum(own == role for own, _ in self.working)


def ranks_of_stages(
    catalogue: Catalogue, attempts: Sequence[ListedAttempt], read: Iterable[ListedStep]
) -> StageRanks:
    """Return which ranks run which stages.

    Args:
        catalogue: the reading side of the store.
        attempts: of the run, ascending.
        read: steps that show it beside the first ones of the newest attempts.
    """
    firsts: list[ListedStep] = []
    for attempt in attempts[-_ATTEMPTS:]:
        if attempt["first_step"] is not None:
            before = attempt["first_step"] + _FIRST
            firsts += catalogue.steps(attempt["attempt_id"], before=before, limit=_FIRST)
    rows = {(row["attempt_id"], row["step"]): row for row in chain(read, firsts)}.values()
    began = _began(rows)
    times = Counter(
        (role, stage)
        for row in rows
        for role, by_stage in (row["expected"] or {}).items()
        for stage in by_stage
    )
    working = {(role, rank) for (role, _), ranks in began.items() for rank in ranks}
    return StageRanks(began, times, working)


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
    ranks = ranks_of_stages(catalogue, attempts, read)
    return {
        (row["attempt_id"], row["step"]): [
            each
            for each in row["missing"] or ()
            if ranks.lacks(each["role"], each["rank"], each["stage"])
        ]
        for row in read
        if row["step"] in by_attempt.get(row["attempt_id"], ())
    }


def missing_then(
    catalogue: Catalogue, run: str, attempt: int, step: int, missing: Sequence[UnfinishedRank]
) -> list[UnfinishedRank]:
    """Return which of the missing ranks a step lacks, as it and what was before it show.

    Later steps change nothing: a rule finds in a stored step what it found when the step closed.

    Args:
        catalogue: the reading side of the store.
        run: its name.
        attempt: number of the step's attempt.
        step: the step.
        missing: the ranks that did not end a stage of it.
    """
    attempts = sorted(catalogue.attempts(run), key=lambda row: row["number"])
    read: list[ListedStep] = []
    for own in (row for row in attempts if row["number"] == attempt):
        read = catalogue.steps(own["attempt_id"], before=step + 1, limit=_FIRST + 1)
    ranks = ranks_of_stages(catalogue, [row for row in attempts if row["number"] < attempt], read)
    return [each for each in missing if ranks.lacks(each["role"], each["rank"], each["stage"])]


def stage_ranks_before(
    catalogue: Catalogue, attempts: Sequence[ListedAttempt], attempt_id: int, step: int
) -> StageRanks:
    """Return which ranks run which stages, as the steps up to one show."""
    read = catalogue.steps(attempt_id, before=step + 1, limit=_FIRST + 1)
    return ranks_of_stages(catalogue, attempts, read)


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
