"""Steps of an attempt: opened by the first who begins, closed when everyone went on.

A step closes when every live (role, rank) that takes part in steps began a later one, when its
attempt ended, or when a caller said `end_step`.
"""

from __future__ import annotations

from typing import Any

from stagescope_service.engine.completeness import judge, participants
from stagescope_service.engine.entities import RECENT_STEPS, Attempt, Process, Step
from stagescope_service.engine.instructions import Assemble, Instruction, PayloadKey, Put
from stagescope_service.engine.rows import attempt_row, process_row


def open_step(attempt: Attempt, number: int | None, wall: float) -> tuple[Step, list[Instruction]]:
    """Return a step of the attempt, opened if it is new; work without a step has its own."""
    if number is None:
        return attempt.loose, []
    step = attempt.steps.get(number)
    if step is not None:
        return step, []
    step = Step(step=number, opened_wall=wall)
    attempt.steps[number] = step
    if attempt.last_closed_step is not None and number <= attempt.last_closed_step:
        # It left memory, or this rank alone came late to it: what is stored of it stays.
        step.ghost, step.closed_wall = True, wall
        return step, [Put("steps", _key(attempt, number))]
    out: list[Instruction] = [Put("steps", {**_key(attempt, number), "opened_wall": wall})]
    if attempt.first_step is None or number < attempt.first_step:
        attempt.first_step = number
        if attempt.number > 1 and attempt.resumed_from_step is None:
            attempt.resumed_from_step = number - 1
        out.append(attempt_row(attempt))
    return step, out


def advance(attempt: Attempt, process: Process, number: int, wall: float) -> list[Instruction]:
    """Note that a process stands at `number`, and close what everyone has left behind."""
    if process.max_step is not None and number <= process.max_step:
        return []
    before = process.max_step
    process.max_step = number
    out: list[Instruction] = [process_row(process)]
    if not process.live:
        return out + after_leaving(attempt, wall)
    if before is None:
        _replace_older(attempt, process)
    else:
        _leave_clock(attempt, before)
    attempt.clock[number] += 1
    return out + close_through(attempt, min(attempt.clock) - 1, wall, "everyone went on")


def retire(attempt: Attempt, process: Process) -> None:
    """Stop waiting for a process (call before it is marked as not live)."""
    if process.live and process.max_step is not None:
        _leave_clock(attempt, process.max_step)


def rejoin(attempt: Attempt, process: Process) -> None:
    """Wait for a process again (call after it is marked as live)."""
    if process.live and process.max_step is not None:
        attempt.clock[process.max_step] += 1


def after_leaving(attempt: Attempt, wall: float) -> list[Instruction]:
    """Close what nobody holds open any more, and end the attempt where nobody is left."""
    if attempt.clock:
        return close_through(attempt, min(attempt.clock) - 1, wall, "everyone went on")
    if any(process.live for process in attempt.processes.values()):
        return []
    out: list[Instruction] = []
    if attempt.steps:
        out = close_through(attempt, max(attempt.steps), wall, "attempt ended")
    if attempt.ended_wall is None:
        attempt.ended_wall = wall
        finished = all(process.finished for process in attempt.processes.values())
        reason = "finished" if finished else "its processes fell silent"
        out.append(attempt_row(attempt, end_reason=reason))
    return out


def close_through(attempt: Attempt, number: int, wall: float, reason: str) -> list[Instruction]:
    """Close every open step up to `number`, lowest first."""
    out: list[Instruction] = []
    for step in sorted(attempt.steps.values(), key=lambda step: step.step):
        if step.step <= number and step.closed_wall is None:
            out += _close(attempt, step, wall, reason)
    return out


def _close(attempt: Attempt, step: Step, wall: float, reason: str) -> list[Instruction]:
    step.closed_wall, step.close_reason = wall, reason
    out: list[Instruction] = [_judged(attempt, step, closed_wall=wall, close_reason=reason)]
    if attempt.last_closed_step is None or step.step > attempt.last_closed_step:
        attempt.last_closed_step = step.step
        attempt.last_closed_ranks = participants(step)
        out.append(attempt_row(attempt))
    if not step.pending:
        out.append(Assemble(attempt.attempt_id, step.step))
    _forget(attempt)
    return out


def rejudge(attempt: Attempt, step: Step) -> list[Instruction]:
    """Judge a closed step again after something of it came late."""
    return [] if step.ghost else [_judged(attempt, step)]


def payload_settled(attempt: Attempt, number: int | None, key: PayloadKey) -> list[Instruction]:
    """Form the whole of a closed step (again) once nothing of it is still to be read."""
    if number is None:
        attempt.loose.pending.discard(key)
        return []
    step = attempt.steps.get(number)
    if step is None:
        return [Assemble(attempt.attempt_id, number)]
    step.pending.discard(key)
    if step.closed_wall is None or step.pending:
        return []
    return [Assemble(attempt.attempt_id, number)]


def _judged(attempt: Attempt, step: Step, **columns: Any) -> Put:
    verdict = judge(attempt, step, all_stages=step.close_reason == "attempt ended")
    return Put(
        "steps",
        {
            **_key(attempt, step.step),
            "completeness": verdict.verdict,
            "expected": verdict.expected,
            "missing": [missing._asdict() for missing in verdict.missing],
            **columns,
        },
    )


def _replace_older(attempt: Attempt, process: Process) -> None:
    """Of two incarnations of a rank in one attempt, wait for the newer alone."""
    for other in attempt.processes.values():
        same = (other.role, other.rank) == (process.role, process.rank)
        if other is not process and same and other.live and other.started < process.started:
            retire(attempt, other)
            other.replaced = True


def _leave_clock(attempt: Attempt, number: int) -> None:
    attempt.clock[number] -= 1
    if attempt.clock[number] <= 0:
        del attempt.clock[number]


def _forget(attempt: Attempt) -> None:
    closed = sorted(
        number
        for number, step in attempt.steps.items()
        if step.closed_wall is not None and not step.pending
    )
    for number in closed[:-RECENT_STEPS]:
        del attempt.steps[number]


def _key(attempt: Attempt, number: int) -> dict[str, Any]:
    return {"attempt_id": attempt.attempt_id, "step": number}
