"""Who was expected at a step, and who has not arrived (design: the word `complete`)."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from stagescope_service.engine.entities import FAILED, OK, Attempt, Span, Step


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
    """'complete', 'partial' or 'unknown' (nobody said how many ranks there are)."""
    expected: dict[str, dict[str, list[int]]]
    """role -> stage -> ranks."""
    missing: list[Missing]


def judge(attempt: Attempt, step: Step, *, all_stages: bool) -> Completeness:
    """Judge a step by its stages' ranks.

    Expected in a stage are ranks 0 ... world_size - 1 of its role, else those of the attempt's
    last closed step. A stage that nobody began is not missed, unless `all_stages` says that the
    step was cut off (its attempt ended): then the last closed step's stages are expected too.
    """
    seen = _by_stage(step)
    stages = set(seen) | (set(attempt.last_closed_ranks) if all_stages else set())
    unknown = False
    expected: dict[str, dict[str, list[int]]] = defaultdict(dict)
    missing: list[Missing] = []
    for role, stage in sorted(stages):
        size = attempt.world_size(role)
        if size is not None:
            ranks = set(range(size))
        else:
            ranks = attempt.last_closed_ranks.get((role, stage), set())
            unknown = unknown or not ranks
        spans = seen.get((role, stage), {})
        ranks |= set(spans)
        expected[role][stage] = sorted(ranks)
        for rank in sorted(ranks):
            status = _status(spans.get(rank, []))
            if status is not None:
                missing.append(Missing(role, rank, stage, status))
    verdict = "unknown" if unknown else "partial" if missing else "complete"
    return Completeness(verdict, dict(expected), missing)


def participants(step: Step) -> dict[tuple[str, str], set[int]]:
    """Return (role, stage) -> ranks that began it in this step."""
    return {key: set(ranks) for key, ranks in _by_stage(step).items()}


def _by_stage(step: Step) -> dict[tuple[str, str], dict[int, list[Span]]]:
    found: dict[tuple[str, str], dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for revisions in step.spans.values():
        span = revisions[-1]
        if span.work.stage is not None and not span.superseded:
            found[(span.role, span.work.stage)][span.rank].append(span)
    return found


def _status(spans: list[Span]) -> str | None:
    if not spans:
        return "not begun"
    return next((span.status for span in spans if span.status not in (OK, FAILED)), None)
