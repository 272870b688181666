"""Who was expected at a step, and who has not arrived (design: the word `complete`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from stagescope_service.core.entities import FAILED, OK, OPEN, Participants, Span, Step

if TYPE_CHECKING:
    from stagescope_service.store.tables import StageRow, UnfinishedRank

COMPLETE: Final = "complete"
PARTIAL: Final = "partial"
UNKNOWN: Final = "unknown"
NOT_BEGUN: Final = "not begun"

Statuses = Mapping[tuple[str, str], Mapping[int, str | None]]
"""(role, stage) -> rank -> why it has not finished the stage; None: it has."""


class Missing(NamedTuple):
    """A rank that did not finish a stage which it was expected in."""

    role: str
    rank: int
    stage: str
    status: str
    """'not begun', 'open' or 'unfinished'."""


class Completeness(NamedTuple):
    """The verdict on a step."""

    verdict: str
    """'complete', 'partial' or 'unknown' (how many ranks there are is not reported)."""
    expected: dict[str, dict[str, list[int]]]
    """role -> stage -> ranks."""
    missing: list[Missing]


def judge(
    statuses: Statuses,
    *,
    size_of: Callable[[str], int | None],
    before: Participants | None,
    all_stages: bool = False,
) -> Completeness:
    """Return the verdict on a step from the statuses of its stages' ranks.

    The expected ranks of a stage are 0 ... world_size - 1 of its role, or, if the world size is
    unknown, those of the attempt's last closed step. A stage that no rank began is not missing,
    unless `all_stages` is set: then the stages of the last closed step are expected, too.

    Args:
        statuses: status of each rank in each stage of this step.
        size_of: returns the world_size of a role, None if it is unknown.
        before: participants of the last closed step; None if there was none.
        all_stages: whether the attempt broke off in this step.
    """
    expected, unknown = expect(statuses, size_of=size_of, before=before, all_stages=all_stages)
    missing = {
        (*key, rank): status
        for key, ranks in expected.items()
        for rank in ranks
        if (status := statuses.get(key, {}).get(rank, NOT_BEGUN)) is not None
    }
    return verdict_of(expected, missing, unknown)


def expect(
    statuses: Statuses,
    *,
    size_of: Callable[[str], int | None],
    before: Participants | None,
    all_stages: bool,
) -> tuple[Participants, bool]:
    """Return the expected ranks of each stage, and whether they are unknown for any stage."""
    before = before or {}
    stages = set(statuses) | (set(before) if all_stages else set())
    # Nothing is known about a step without any stage.
    unknown = not stages
    expected: Participants = {}
    for role, stage in sorted(stages):
        size = size_of(role)
        ranks = set(before.get((role, stage), ())) if size is None else set(range(size))
        unknown = unknown or not ranks
        expected[(role, stage)] = ranks | set(statuses.get((role, stage), ()))
    return expected, unknown


def verdict_of(
    expected: Participants, missing: Mapping[tuple[str, str, int], str], unknown: bool
) -> Completeness:
    """Build the verdict from the expected and missing ranks."""
    shown: dict[str, dict[str, list[int]]] = {}
    for role, stage in sorted(expected):
        shown.setdefault(role, {})[stage] = sorted(expected[(role, stage)])
    listed = [
        Missing(role, rank, stage, status)
        for (role, stage, rank), status in sorted(missing.items())
    ]
    verdict = UNKNOWN if unknown else PARTIAL if listed else COMPLETE
    return Completeness(verdict, shown, listed)


def statuses_of(step: Step) -> Statuses:
    """Return the status of each rank in each stage of a step."""
    return {
        key: {rank: status_of(spans) for rank, spans in ranks.items()}
        for key, ranks in step.ranks.items()
    }


def status_of(spans: Iterable[Span]) -> str | None:
    """Return the status that keeps a rank from having finished a stage; None if it has finished."""
    found: str | None = NOT_BEGUN
    for span in spans:
        if not span.superseded:
            if span.status not in (OK, FAILED):
                return span.status
            found = None
    return found


def statuses_of_rows(stages: Iterable[StageRow]) -> Statuses:
    """Return the statuses from the rows of a step's stages, superseded ones left out."""
    found: dict[tuple[str, str], dict[int, str | None]] = defaultdict(dict)
    for row in stages:
        status = row["status"] or OPEN
        ranks = found[row["role"], row["stage"]]
        ranks[row["rank"]] = ranks.get(row["rank"]) if status in (OK, FAILED) else status
    return found


def corrected(
    verdict: str | None, missing: Iterable[UnfinishedRank], statuses: Statuses
) -> tuple[str | None, list[UnfinishedRank]]:
    """Update a verdict and its missing ranks by their present statuses."""
    left: list[UnfinishedRank] = []
    for item in missing:
        ranks = statuses.get((item["role"], item["stage"]), {})
        status = ranks.get(item["rank"], NOT_BEGUN)
        if status is not None:
            left.append({**item, "status": status})
    return (COMPLETE if verdict == PARTIAL and not left else verdict), left


def participants(step: Step) -> Participants:
    """Return (role, stage) -> ranks that began it in this step."""
    return {key: set(ranks) for key, ranks in step.ranks.items()}
