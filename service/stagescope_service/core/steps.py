"""Steps of an attempt: opened by the first BEGIN, closed when every rank went on.

A step closes when every live (role, rank) that takes part in steps has begun a later one, when its
attempt ends, or on an END_STEP. Later events of a closed step update its verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stagescope_service.core.catalogue_rows import attempt_row
from stagescope_service.core.completeness import (
    NOT_BEGUN,
    participants,
)
from stagescope_service.core.entities import (
    CRASHED,
    FINISHED,
    LEFT_BEHIND,
    OPEN_STEPS,
    RECENT_STEPS,
    SAID,
    WENT_ON,
    Attempt,
    Process,
    Step,
)
from stagescope_service.core.findings import finding, of_attempt
from stagescope_service.core.instructions import (
    Aggregate,
    Delete,
    Instruction,
    PayloadKey,
    Put,
)
from stagescope_service.core.verdicts import (
    judged,
    step_key,
    update_next_verdict,
    update_top_verdict,
)
from stagescope_service.store.tables.training import ENDED, INTERRUPTED, SILENT

RANKS_SECONDS: Final = 30.0
"""How long after its start an attempt waits for the first event of each expected rank."""

_NAMED_RANKS: Final = 10


def open_step(attempt: Attempt, number: int | None, wall: float) -> tuple[Step, list[Instruction]]:
    """Return a step of the attempt, opened if new; None is the step of work without one."""
    if number is None:
        return attempt.stepless, []
    step = attempt.steps.get(number)
    if step is None:
        return _open(attempt, number, wall)
    if wall < step.opened_wall:
        step.opened_wall = wall
        return step, [Put("steps", {**step_key(attempt, number), "opened_wall": wall})]
    return step, []


def _open(attempt: Attempt, number: int, wall: float) -> tuple[Step, list[Instruction]]:
    out: list[Instruction] = []
    if attempt.first_step is None or number < attempt.first_step:
        attempt.first_step = number
        if attempt.number > 1 and not attempt.resume_reported:
            attempt.resumed_from_step = number - 1
        out.append(attempt_row(attempt))
    if attempt.forgotten_through is not None and number <= attempt.forgotten_through:
        # It has left memory: its stored rows stay.
        out.append(Put("steps", step_key(attempt, number)))
        return Step(step=number, opened_wall=wall, closed_wall=wall, evicted=True), out
    step = attempt.steps[number] = Step(step=number, opened_wall=wall)
    attempt.open.add(number)
    out.append(Put("steps", {**step_key(attempt, number), "opened_wall": wall}))
    if attempt.top_step is None or number > attempt.top_step:
        attempt.top_step = number
    if len(attempt.open) > OPEN_STEPS:
        out += _close(attempt, attempt.steps[min(attempt.open)], wall, LEFT_BEHIND)
    return step, out


def advance(attempt: Attempt, process: Process, number: int) -> list[Instruction]:
    """Record that a process has begun step `number`."""
    before = process.max_step
    if before is not None and number <= before:
        return []
    process.max_step = number
    if before is None:
        _replace_older(attempt, process)
    elif process.live:
        _leave_clock(attempt, before)
    if process.live:
        attempt.clock[number] += 1
    return [Put("processes", {"incarnation": process.incarnation, "max_step": number})]


def retire(attempt: Attempt, process: Process) -> None:
    """Stop waiting for a process; call it before the process is marked as not live."""
    if process.live and process.max_step is not None:
        _leave_clock(attempt, process.max_step)


def rejoin(attempt: Attempt, process: Process) -> None:
    """Wait for a process again; call it after the process is marked as live."""
    if process.live and process.max_step is not None:
        attempt.clock[process.max_step] += 1


def end_if_left(attempt: Attempt) -> list[Instruction]:
    """End the attempt if no process is left."""
    if attempt.clock or any(_holds(attempt, process) for process in attempt.processes.values()):
        return []
    gone = [process for process in attempt.processes.values() if process.left_wall is not None]
    ended = max(map(_left_on_our_clock, gone), default=attempt.opened_wall)
    probes = any(not process.raw for process in gone)
    last = [each for each in gone if not each.replaced and not (probes and each.raw)]
    stopped = INTERRUPTED if attempt.interrupted else FINISHED
    reason = CRASHED if attempt.crashed else stopped
    if not (attempt.cut_off or all(process.finished for process in last)):
        reason = SILENT
    if (attempt.ended_wall, attempt.end_reason) == (ended, reason):
        return []
    attempt.ended_wall, attempt.end_reason = ended, reason
    return [attempt_row(attempt), *update_top_verdict(attempt)]


def _left_on_our_clock(process: Process) -> float:
    offset = process.clock[0] if process.finished else None  # a lapse is on the service's clock
    return (process.left_wall or 0.0) + (offset or 0.0)


def took_leave(attempt: Attempt) -> bool:
    """Return whether the attempt is over because all its processes reported their end."""
    return attempt.over and attempt.end_reason in (FINISHED, INTERRUPTED, CRASHED)


def stopped_midway(attempt: Attempt) -> bool:
    """Return whether the attempt is over because its driver was cut off, or without any report."""
    return attempt.over and (attempt.cut_off or not took_leave(attempt))


def resume(attempt: Attempt, process: Process) -> list[Instruction]:
    """Reopen an ended attempt if one of its processes is live again."""
    if attempt.ended_wall is None or not _holds(attempt, process):
        return []
    attempt.ended_wall = attempt.end_reason = None
    return [attempt_row(attempt), *update_top_verdict(attempt)]


def close_due(attempt: Attempt, wall: float) -> list[Instruction]:
    """Close every open step that no process holds open, lowest first."""
    if not attempt.open:
        return []
    through = attempt.ended_through
    left = min(attempt.clock) - 1 if attempt.clock else None
    out: list[Instruction] = []
    for number in sorted(attempt.open) if len(attempt.open) > 1 else [*attempt.open]:
        if through is not None and number <= through:
            reason = SAID
        elif left is not None and number <= left:
            reason = WENT_ON
        elif attempt.over:
            reason = ENDED
        else:
            break
        out += _close(attempt, attempt.steps[number], wall, reason)
    return out


def end_step(attempt: Attempt, number: int, wall: float) -> list[Instruction]:
    """Close a step and all before it, as a caller requested."""
    _, out = open_step(attempt, number, wall)
    if attempt.ended_through is None or number > attempt.ended_through:
        attempt.ended_through = number
    return out + close_due(attempt, wall)


def _close(attempt: Attempt, step: Step, wall: float, reason: str) -> list[Instruction]:
    step.closed_wall, step.close_reason = wall, reason
    attempt.open.discard(step.step)
    attempt.note_closed(wall)
    out = judged(attempt, step, closed_wall=wall, close_reason=reason)
    out += update_next_verdict(attempt, step)
    if attempt.last_closed_step is None or step.step > attempt.last_closed_step:
        attempt.last_closed_step = step.step
        out.append(attempt_row(attempt))
    if not attempt.pending.get(step.step):
        out += aggregate(attempt, step.step, wall)
    if reason == ENDED or wall - attempt.opened_wall > RANKS_SECONDS:
        out += _note_silent_roles(attempt, f"step {step.step} closed", wall)
        out += _note_absent_ranks(attempt, _absent_from(attempt, step), step.step, wall)
    return out + _forget(attempt)


def note_never_came(attempt: Attempt, wall: float) -> list[Instruction]:
    """Return findings of expected roles and ranks without any report when the attempt is over.

    A short attempt may have closed all its steps before `RANKS_SECONDS`, or have had none.
    """
    if not attempt.over:
        return []
    absent: dict[str, set[int]] = {}
    for role, rank, has_reported in attempt.missing():
        if not has_reported:
            absent.setdefault(role, set()).add(rank)
    out = _note_silent_roles(attempt, "the attempt ended", wall)
    return out + _note_absent_ranks(attempt, absent, None, wall)


def _note_silent_roles(attempt: Attempt, when: str, wall: float) -> list[Instruction]:
    """Return findings of expected roles without any report; once an attempt.

    `when`: what happened without them, a clause.
    """
    out: list[Instruction] = []
    for role in sorted(attempt.unheard_roles - attempt.silent_roles.keys()):
        put = finding(
            "silent_ranks",
            f"{when} with what the trainer's process reported alone: no rank of role {role} has "
            "reported anything",
            **of_attempt(attempt, wall),
            severity="error",
            role=role,
            advice="the log of the ranks says why. Over Ray, each rank needs the package. Over "
            "HTTP, each needs STAGESCOPE_URL, and STAGESCOPE_TOKEN_FILE (a path it can read) or "
            "STAGESCOPE_TOKEN, in the environment of `ray start` on its node",
        )
        attempt.silent_roles[role] = {**put.row, "over_wall": None}
        out.append(Put("findings", attempt.silent_roles[role]))
    return out


def _absent_from(attempt: Attempt, step: Step) -> Mapping[str, set[int]]:
    """Return role -> ranks that are missing in a step and that no process reports for."""
    absent: dict[str, set[int]] = {}
    for (role, _, rank), status in step.missing.items():
        if status == NOT_BEGUN and not attempt.by_rank.get((role, rank)):
            absent.setdefault(role, set()).add(rank)
    return absent


def _note_absent_ranks(
    attempt: Attempt, absent: Mapping[str, set[int]], step: int | None, wall: float
) -> list[Instruction]:
    """Return findings of roles with absent ranks, found at a step or at the attempt's end."""
    when = "the attempt ended" if step is None else f"step {step} closed"
    out: list[Instruction] = []
    for role in sorted(absent.keys() - attempt.silent_roles.keys() - attempt.absent_ranks.keys()):
        ranks = sorted(absent[role])
        more = f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else ""
        put = finding(
            "absent_ranks",
            f"{when} without {role} rank{'s' if len(ranks) > 1 else ''} "
            f"{', '.join(map(str, ranks[:_NAMED_RANKS]))}{more}: no process reports for them. "
            f"{len(ranks)} of {attempt.world_size(role) or 'an unknown number of'} ranks "
            "are missing",
            **of_attempt(attempt, wall),
            severity="error",
            role=role,
            evidence={"ranks": ranks[:1000]},
            advice="the log of such a rank says whether it found the service. If it is not "
            "meant to report, give init the world_size of those that do",
        )
        attempt.absent_ranks[role] = (frozenset(ranks), dict(put.row))
        out.append(put)
    return out


def end_silence(attempt: Attempt, wall: float) -> list[Instruction]:
    """End the findings about silent roles or ranks that have reported since.

    In the attempt's first `RANKS_SECONDS` the findings are deleted instead. Their reports were only
    on the way, as in a short training that another rank ends.
    """
    was_in_time = wall - attempt.opened_wall <= RANKS_SECONDS
    columns = {"over_wall": wall, "last_wall": wall, "severity": "info"}
    over = [
        attempt.silent_roles.pop(role)
        for role in attempt.silent_roles.keys() & attempt.reporting_roles
    ]
    for role, (ranks, row) in [*attempt.absent_ranks.items()]:
        # One that has not begun a step may still turn out to be of the next attempt.
        reporting = (attempt.by_rank.get((role, rank), ()) for rank in ranks)
        if all(any(each.bound or each.finished for each in found) for found in reporting):
            del attempt.absent_ranks[role]
            over.append(row)
    return [
        Delete("findings", {"finding_id": row["finding_id"]})
        if was_in_time
        else Put("findings", {**row, **columns})
        for row in over
    ]


# --- payloads ---------------------------------------------------------------------------------
def payload_pending(attempt: Attempt, number: int | None, key: PayloadKey) -> None:
    """Record that a step has a pending payload."""
    attempt.pending.setdefault(number, set()).add(key)


def payload_settled(
    attempt: Attempt, number: int | None, key: PayloadKey, wall: float
) -> list[Instruction]:
    """Aggregate a closed step (again) once none of its payloads is pending."""
    pending = attempt.pending.get(number)
    if pending is not None:
        pending.discard(key)
        if pending:
            return []
        del attempt.pending[number]
    if number is None or number in attempt.open:
        return []
    return aggregate(attempt, number, wall)


def aggregate(attempt: Attempt, number: int, wall: float) -> list[Instruction]:
    """Return the instruction to aggregate a closed step (again).

    The mark is committed with the rows that make it due, so that a restarted coordinator finds the
    steps that were not aggregated.
    """
    attempt.last_mark = max(attempt.last_mark + 1, int(wall * 1e6))
    marked = {**step_key(attempt, number), "parts_mark": attempt.last_mark}
    return [Put("steps", marked), Aggregate(attempt.attempt_id, number)]


# --- the inside -------------------------------------------------------------------------------
def _holds(attempt: Attempt, process: Process) -> bool:
    """Return whether a process keeps the attempt from ending.

    A raw caller that only logs, beside probes, never sends a FINISH.
    """
    if not process.live:
        return False
    if not process.raw or process.max_step is not None:
        return True
    return all(other.raw for other in attempt.processes.values())


def _replace_older(attempt: Attempt, process: Process) -> None:
    """Wait only for the newest of several incarnations of a rank in one attempt."""
    if process.raw:
        return  # identified by name: it has no incarnations
    for other in attempt.by_rank[(process.role, process.rank)]:
        if other is process or other.raw or other.max_step is None:
            continue
        if other.age > process.age:
            process.replaced = True
        elif not other.replaced:
            retire(attempt, other)
            other.replaced = True


def _leave_clock(attempt: Attempt, number: int) -> None:
    attempt.clock[number] -= 1
    if attempt.clock[number] <= 0:
        del attempt.clock[number]


def _forget(attempt: Attempt) -> list[Instruction]:
    """Remove old closed steps from memory; return their verdicts that are still to be written."""
    out: list[Instruction] = []
    if len(attempt.steps) - len(attempt.open) <= RECENT_STEPS:
        return out
    closed = sorted(number for number in attempt.steps if number not in attempt.open)
    for number in closed[:-RECENT_STEPS]:
        if attempt.steps[number].stale:
            out += judged(attempt, attempt.steps[number])
        step = attempt.steps.pop(number)
        before = attempt.forgotten_through
        attempt.forgotten_through = number if before is None else max(number, before)
        following = min((later for later in attempt.steps if later > number), default=None)
        if following is not None:
            attempt.steps[following].before = participants(step)
    return out
