"""Rebuilds the state machine from the catalogue, after a crash or a restart.

Refs do not survive a coordinator: payloads that were announced and not read are restored as not in
flight. They are read when their process offers them again, or lost when its lease expires.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from stagescope_service.core import spans, steps, verdicts
from stagescope_service.core.catalogue_rows import (
    ATTEMPT_COLUMNS,
    OPTIONAL_PROCESS_COLUMNS,
    PROCESS_COLUMNS,
    integer,
)
from stagescope_service.core.completeness import UNKNOWN
from stagescope_service.core.entities import (
    ANNOUNCED,
    CRASHED,
    OPEN,
    RECENT_STEPS,
    SAID,
    UNFINISHED,
    Attempt,
    Drops,
    Handshake,
    Participants,
    PendingPayload,
    Process,
    Span,
    Step,
)
from stagescope_service.core.handshakes import RESTORED, reading_settings, role_names
from stagescope_service.core.instructions import PayloadKey
from stagescope_service.core.state import State
from stagescope_service.store.contract import Snapshot
from stagescope_service.store.tables import (
    AttemptRow,
    DumpRow,
    PayloadRow,
    ProcessRow,
    StageRow,
    StepColumns,
)
from stagescope_service.store.tables.declare import StageWork
from stagescope_service.store.tables.training import INTERRUPTED
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.schema import LAYOUT_COLUMNS, Part, Work


def restore(state: State, snapshot: Snapshot, now: float) -> None:
    """Fill an empty `state`; every live process gets a full lease."""
    registry = state.registry
    registry.reserve(snapshot.last_attempt_id + 1)
    for row in sorted(snapshot.attempts, key=lambda row: row["number"]):
        registry.adopt(_attempt(row))
    for process in snapshot.processes:
        attempt = registry.attempts.get(process["attempt_id"])
        if attempt is not None:
            _restore_process(state, attempt, process, now)
    for step in snapshot.steps:
        attempt = registry.attempts.get(step["attempt_id"])
        if attempt is not None:
            _restore_step(attempt, step, kept=attempt is registry.newest(attempt.run))
    for stage in snapshot.stages:
        _restore_span(state, stage)
    for payload in snapshot.payloads:
        _restore_payload(state, payload)
    for dump in snapshot.armed:
        _restore_armed_dump(state, dump)
    for finding in snapshot.findings:
        state.remember_finding(finding["finding_id"], finding["first_wall"])
    for attempt in registry.attempts.values():
        _settle(attempt)


def _columns(row: JsonObject, names: Iterable[str]) -> dict[str, Any]:
    """Return some columns of a row; a flag that is unknown is false."""
    return {name: bool(row[name]) if name in _FLAGS else row[name] for name in names}


_FLAGS: Final = frozenset({"raw", "unkeyed"})
_SPAN: Final = ("incarnation", "role", "rank", "revision", "status", "begin_seq", "end_seq")


def _attempt(row: AttemptRow) -> Attempt:
    first, resumed = row["first_step"], row["resumed_from_step"]
    # In a later attempt it may have been derived from the first step.
    derived = row["number"] > 1 and first is not None and resumed == first - 1
    is_reported = resumed is not None and not derived
    return Attempt(
        **_columns(row, ATTEMPT_COLUMNS),
        crashed=row["end_reason"] == CRASHED,
        interrupted=row["end_reason"] == INTERRUPTED,
        resume_reported=is_reported,
        resumed_restored=resumed if is_reported else None,
        has_past=True,
        # Its process is not stored: the fingerprint stays.
        fingerprint_of=None if row["fingerprint"] is None else RESTORED,
    )


def _restore_process(state: State, attempt: Attempt, row: ProcessRow, now: float) -> None:
    hello = row["hello"] or {}
    lease = state.raw_lease_seconds if row["raw"] else state.lease_seconds
    finished, lapsed = row["finished_wall"], row["lapsed_wall"]
    layout = _columns(row, LAYOUT_COLUMNS)
    process = Process(
        **_columns(row, (*PROCESS_COLUMNS, *OPTIONAL_PROCESS_COLUMNS)),
        started=row["first_wall"] or 0.0,
        captures=hello.get("captures") is not False,
        launch=hello.get("launch"),
        is_single=hello.get("single") is True,
        watchdog=hello.get("watchdog"),
        expected_roles=role_names(hello.get("expects")),
        handshake=_handshake(row),
        settings=reading_settings(row["settings"]),
        layout={
            **(hello.get("layout") or {}),
            **{name: value for name, value in layout.items() if value is not None},
        },
        lease_until=now + lease,
        last_wall=row["last_wall"] or 0.0,
        last_contact=(row["last_wall"] or 0.0) + (row["clock_offset"] or 0.0),
        clock=(row["clock_offset"], row["clock_error"]),
        finished=finished is not None,
        # A later BEGIN undoes its FINISH; earlier ones were applied.
        finish_seq=0 if finished is not None and not row["raw"] else None,
        lapsed=lapsed is not None,
        left_wall=finished if lapsed is None else lapsed,
        plan_revision=row["plan_revision"],
        bound=row["max_step"] is not None,
        drops=Drops(
            row["dropped_events"] or 0,
            row["dropped_payloads"] or 0,
            row["dropped_bytes"] or 0,
            [*(row["dropped_seqs"] or ())],
        ),
    )
    state.registry.processes[process.incarnation] = process
    attempt.add(process)


def _handshake(row: ProcessRow) -> Handshake | None:
    """Return a process's handshake, if it has not been applied to its attempt yet."""
    hello = row["hello"] or {}
    wall = hello.get("said_wall")
    if row["max_step"] is not None or not hello:
        return None
    return Handshake(
        (row["first_wall"] or 0.0) if wall is None else wall,
        fingerprint=hello.get("fingerprint"),
        settings=row["settings"],
        resumed_from_step=integer(hello.get("resumed_from_step")),
        world_size=integer(hello.get("world_size")),
    )


def _restore_step(attempt: Attempt, row: StepColumns, *, kept: bool) -> None:
    """Restore a step; `kept`: its stages were read as well, although its attempt is over."""
    number = row["step"]
    top, through = attempt.top_step, attempt.forgotten_through
    attempt.top_step = number if top is None else max(top, number)
    if row["closed_wall"] is not None:
        attempt.note_closed(row["closed_wall"])
    if row["close_reason"] == SAID:
        known_through = attempt.ended_through
        attempt.ended_through = number if known_through is None else max(known_through, number)
    if attempt.over and not kept:
        attempt.forgotten_through = number if through is None else max(through, number)
        return
    opened = row["opened_wall"]
    step = Step(number, math.inf if opened is None else opened)
    step.closed_wall, step.close_reason = row["closed_wall"], row["close_reason"]
    attempt.steps[number] = step
    if step.closed_wall is None:
        attempt.open.add(number)
    elif row["completeness"] != UNKNOWN:
        # The step before it may have left memory: its participants are taken from this row.
        step.before = _participants(row["expected"])


def _participants(expected: Mapping[str, Mapping[str, list[int]]] | None) -> Participants:
    return {
        (role, stage): set(ranks)
        for role, by_stage in (expected or {}).items()
        for stage, ranks in by_stage.items()
    }


def _work(row: StageWork) -> Work:
    return Work(row["step"], row["policy_version"], row["stage"], Part.of_columns(row))


def _restore_span(state: State, row: StageRow) -> None:
    attempt = state.registry.attempts.get(row["attempt_id"])
    if attempt is None:
        return
    work = _work(row)
    span = Span(**_columns(row, _SPAN), work=work, superseded=bool(row["superseded"]))
    step = attempt.stepless if work.step is None else attempt.steps.get(work.step)
    if step is not None:
        spans.keep(step, span)
    process = state.registry.processes.get(span.incarnation)
    if process is None:
        return
    process.worked = True
    process.newest_revision = max(process.newest_revision, span.revision)
    if step is not None:
        _restore_stage_timing(step, process, span, row)
    if span.status == OPEN:
        process.open_spans[(work.key, span.revision)] = span
    elif span.status == UNFINISHED:
        process.unfinished[(work.key, span.revision)] = span


def _restore_stage_timing(step: Step, process: Process, span: Span, row: StageRow) -> None:
    offset = row["clock_offset"] or 0.0
    if row["begin_wall"] is not None:
        spans.note_begin(step, process, span, row["begin_wall"] + offset)
    if row["end_wall"] is not None:
        mono = row["end_mono"] or 0.0
        spans.note_end(step, process, span, row["end_wall"] + offset, row, mono)


def _restore_payload(state: State, row: PayloadRow) -> None:
    attempt = state.registry.attempts.get(row["attempt_id"])
    process = state.registry.processes.get(row["incarnation"])
    if attempt is None or process is None:
        return
    if row["state"] != ANNOUNCED:
        process.settle(row["seq"], row["state"])
        return
    key, work = PayloadKey(row["incarnation"], row["seq"]), _work(row)
    process.payloads[key] = PendingPayload(key, row["attempt_id"], work)
    steps.payload_pending(attempt, work.step, key)


def _restore_armed_dump(state: State, row: DumpRow) -> None:
    process = state.registry.processes.get(row["incarnation"])
    if process is not None:
        work = _work(row)
        # The event that set it is not stored; any later event has a higher number.
        process.armed[(work.key, row["capture_id"])] = (work, {**row, "mark": 0})


def _settle(attempt: Attempt) -> None:
    """Derive what is not stored: positions of processes, steps out of memory, verdicts."""
    newest: dict[tuple[str, int], Process] = {}
    for process in attempt.processes.values():
        if process.max_step is None or process.raw:
            continue
        other = newest.get((process.role, process.rank))
        if other is None or other.age < process.age:
            newest[(process.role, process.rank)] = process
    for process in attempt.processes.values():
        if process.max_step is not None:
            # An attempt ends when no process is left: one of an ended attempt that did not finish
            # was replaced, by a process that may have left memory.
            stayed = attempt.over and not (process.finished or process.lapsed)
            is_newest = newest.get((process.role, process.rank)) is process
            process.replaced = not process.raw and (stayed or not is_newest)
            steps.rejoin(attempt, process)
    again = [
        each
        for each in newest.values()
        if any(
            not other.raw and other.age < each.age
            for other in attempt.by_rank[(each.role, each.rank)]
        )
    ]
    if again:
        attempt.stayed = max(again, key=lambda each: each.age).incarnation
    _note_who_went_back(attempt)
    closed = sorted(number for number in attempt.steps if number not in attempt.open)
    if len(closed) >= RECENT_STEPS:
        attempt.forgotten_through = closed[0] - 1
    for number in closed:
        verdicts.judge_in_memory(attempt, attempt.steps[number])


def _note_who_went_back(attempt: Attempt) -> None:
    reached: dict[str, int] = {}
    for number in sorted(attempt.steps, reverse=True):
        spans = [span for known in attempt.steps[number].spans.values() for span in known]
        for span in spans:
            process = attempt.processes.get(span.incarnation)
            if process is not None and span.revision > reached.get(span.incarnation, math.inf):
                process.went_back = True
        for span in spans:
            first = min(span.revision, reached.get(span.incarnation, span.revision))
            reached[span.incarnation] = first
