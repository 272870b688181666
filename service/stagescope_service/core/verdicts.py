"""Verdicts on the completeness of steps, and whether later reports change them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from stagescope_service.core.completeness import (
    NOT_BEGUN,
    expect,
    participants,
    status_of,
    statuses_of,
    verdict_of,
)
from stagescope_service.core.entities import (
    Attempt,
    Participants,
    Span,
    Step,
)
from stagescope_service.core.instructions import (
    Instruction,
    Put,
    Rejudge,
)
from stagescope_service.store.tables.training import SILENT
from stagescope_wire.schema import Part

LONG_VERDICT: Final = 200
"""With more missing ranks a verdict is judged again later, once for many events. To judge it with
every event would take time in the square of the ranks."""


def rejudge_rank(attempt: Attempt, step: Step, span: Span) -> list[Instruction]:
    """Update the verdict of a closed step after a late event of one rank."""
    if step.closed_wall is None or step.evicted or span.work.stage is None:
        return []
    stage = (span.role, span.work.stage)
    if span.rank not in step.expected.get(stage, ()):
        return [*_rejudged(attempt, step), *update_next_verdict(attempt, step)]
    key = (*stage, span.rank)
    first_of_it = step.missing.get(key) == NOT_BEGUN
    status = status_of(step.ranks[stage][span.rank])
    if status == step.missing.get(key):
        return []
    if status is None:
        del step.missing[key]
    else:
        step.missing[key] = status
    is_long = len(step.missing) > LONG_VERDICT
    out: list[Instruction] = [_stale(attempt, step) if is_long else _verdict_row(attempt, step)]
    # The participants of this step are expected in the next.
    return out + update_next_verdict(attempt, step) if first_of_it else out


def rejudge_number(attempt: Attempt, number: int) -> list[Instruction]:
    """Update the verdict of a step that is closed and in memory."""
    step = attempt.steps.get(number)
    return [] if step is None or step.closed_wall is None else _rejudged(attempt, step)


def rejudge_now(attempt: Attempt, number: int) -> list[Instruction]:
    """Return the verdict of a step that is closed and in memory."""
    step = attempt.steps.get(number)
    if step is None or step.closed_wall is None or step.evicted:
        return []
    return judged(attempt, step)


def rejudge_all(attempt: Attempt) -> list[Instruction]:
    """Update the verdicts of all closed steps in memory after a world size became known."""
    return [row for number in sorted(attempt.steps) for row in rejudge_number(attempt, number)]


def update_top_verdict(attempt: Attempt) -> list[Instruction]:
    """Update the verdict of the attempt\'s newest step."""
    return [] if attempt.top_step is None else rejudge_number(attempt, attempt.top_step)


def update_next_verdict(attempt: Attempt, step: Step) -> list[Instruction]:
    """Update the verdict of the next closed step: `step` decides which ranks it expects."""
    closed = [number for number in attempt.steps if number > step.step]
    following = min((number for number in closed if number not in attempt.open), default=None)
    return [] if following is None else rejudge_number(attempt, following)


def judge_in_memory(attempt: Attempt, step: Step) -> None:
    """Form the verdict on a step."""
    statuses = statuses_of(step)
    step.expected, step.unknown = expect(
        statuses,
        size_of=attempt.world_size,
        before=_before(attempt, step),
        all_stages=broke_off_in(attempt, step),
    )
    step.missing = {
        (*key, rank): status
        for key, ranks in step.expected.items()
        for rank in ranks
        if (status := statuses.get(key, {}).get(rank, NOT_BEGUN)) is not None
    }
    if not step.missing and attempt.expected_roles - {role for role, _ in statuses}:
        # A step with reports of its driver alone: the number of missing ranks is unknown.
        step.unknown = True
    if broke_off_in(attempt, step) and _has_fewer_parts(attempt, step):
        # A killed process never sends the last parts that it did: how many is unknown.
        step.unknown = True


def _rejudged(attempt: Attempt, step: Step) -> list[Instruction]:
    return [_stale(attempt, step)] if len(step.missing) > LONG_VERDICT else judged(attempt, step)


def _stale(attempt: Attempt, step: Step) -> Rejudge:
    step.stale = True
    return Rejudge(attempt.attempt_id, step.step)


def judged(attempt: Attempt, step: Step, **columns: object) -> list[Instruction]:
    """Judge a closed step, and return the row of its verdict."""
    judge_in_memory(attempt, step)
    return [_verdict_row(attempt, step, **columns)]


def _verdict_row(attempt: Attempt, step: Step, **columns: object) -> Put:
    step.stale = False
    verdict = verdict_of(step.expected, step.missing, step.unknown)
    row = {
        **step_key(attempt, step.step),
        "completeness": verdict.verdict,
        "expected": verdict.expected,
        "missing": [
            {"role": role, "rank": rank, "stage": stage, "status": status}
            for role, rank, stage, status in verdict.missing
        ],
    }
    return Put("steps", {**row, **columns})


def _before(attempt: Attempt, step: Step) -> Participants | None:
    earlier = [number for number in attempt.steps if number < step.step]
    previous = max((number for number in earlier if number not in attempt.open), default=None)
    return step.before if previous is None else participants(attempt.steps[previous])


def _has_fewer_parts(attempt: Attempt, step: Step) -> bool:
    """Return whether a rank did fewer parts of a stage than in the closed step before, if known."""
    earlier = [number for number in attempt.steps if number < step.step]
    previous = max((number for number in earlier if number not in attempt.open), default=None)
    if previous is None:
        return False
    return any(
        spans and len(_parts(spans)) < len(_parts(attempt.steps[previous].ranks[key].get(rank, ())))
        for key, ranks in step.ranks.items()
        if key in attempt.steps[previous].ranks
        for rank, spans in ranks.items()
    )


def _parts(spans: Iterable[Span]) -> set[Part]:
    return {span.work.part for span in spans if not span.superseded}


def broke_off_in(attempt: Attempt, step: Step) -> bool:
    """Return whether an attempt fell silent, or its driver was cut off, in this step, its last."""
    is_midway = attempt.end_reason == SILENT or (attempt.over and attempt.cut_off)
    if not is_midway or step.step != attempt.top_step:
        return False
    return attempt.ended_through is None or step.step > attempt.ended_through


def step_key(attempt: Attempt, number: int) -> dict[str, object]:
    """Return the key of a row of `steps`."""
    return {"attempt_id": attempt.attempt_id, "step": number}
