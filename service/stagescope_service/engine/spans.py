"""Spans of work inside a step: begun, ended, repeated, superseded.

Every function takes what it changes and returns what must be written; none looks outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from stagescope.schema import Event, Sender, Work
from stagescope_service.engine.entities import (
    FAILED,
    OK,
    OPEN,
    UNFINISHED,
    Attempt,
    Process,
    Span,
    Step,
)
from stagescope_service.engine.findings import finding
from stagescope_service.engine.instructions import Instruction
from stagescope_service.engine.rows import span_row

RAW_SEQ: Final = 1 << 60
"""From here on a seq is a raw call's delivery identity, which says nothing about order."""


def begin(
    attempt: Attempt, step: Step, process: Process, sender: Sender, event: Event, work: Work
) -> list[Instruction]:
    """Take in that a process began `work`; the end may have come first."""
    span = _find(step, process, work, event.seq, ended=False)
    out: list[Instruction] = []
    if span is None:
        span, out = _add(attempt, step, process, event, work)
    if span.begin_seq is not None:
        return out  # a repetition
    span.begin_seq = event.seq
    if span.status == OPEN:
        process.open_spans.add((work.step, work.key, span.revision))
    columns = {
        "begin_seq": event.seq,
        "begin_wall": event.wall,
        "begin_mono": event.mono,
        "device_time": bool(event.fields.get("device_time")),
        **_clock(sender),
    }
    out.append(span_row(attempt.attempt_id, span, **columns))
    return [*out, *_supersede(attempt, step, span, event.wall)]


def end(
    attempt: Attempt, step: Step, process: Process, sender: Sender, event: Event, work: Work
) -> tuple[Span, list[Instruction]]:
    """Take in that a process ended `work`, also where its beginning never arrived."""
    span = _find(step, process, work, event.seq, ended=True)
    out: list[Instruction] = []
    if span is None:
        span, out = _add(attempt, step, process, event, work)
    if span.end_seq is not None:
        return span, out  # a repetition
    span.end_seq = event.seq
    span.status = FAILED if event.fields.get("status") == FAILED else OK
    process.open_spans.discard((work.step, work.key, span.revision))
    columns: dict[str, Any] = {
        "end_seq": event.seq,
        "end_wall": event.wall,
        "end_mono": event.mono,
        "device_seconds": _number(event.fields, "device_seconds"),
        "error_type": _text(event.fields, "error_type"),
        "error_message": _text(event.fields, "error_message"),
        **_clock(sender),
    }
    for name in ("begin_wall", "begin_mono"):
        if (value := _number(event.fields, name)) is not None:
            columns[name] = value
    out.append(span_row(attempt.attempt_id, span, **columns))
    return span, [*out, *_supersede(attempt, step, span, event.wall)]


def is_unfinished(step: Step, process: Process, work: Work) -> bool:
    """Return whether this work counts as unfinished."""
    revisions = step.spans.get((process.incarnation, work.key))
    return revisions is not None and revisions[-1].status == UNFINISHED


def abandon(attempt: Attempt, step: Step, process: Process) -> list[tuple[Span, Instruction]]:
    """Mark what a process left open in `step` as unfinished."""
    out: list[tuple[Span, Instruction]] = []
    for span in _of_process(step, process):
        if span.status == OPEN:
            span.status = UNFINISHED
            process.open_spans.discard((span.work.step, span.work.key, span.revision))
            out.append((span, span_row(attempt.attempt_id, span)))
    return out


def revive(attempt: Attempt, step: Step, process: Process) -> list[Instruction]:
    """Take back `abandon`: the process was only quiet."""
    out: list[Instruction] = []
    for span in _of_process(step, process):
        if span.status == UNFINISHED:
            span.status = OPEN
            process.open_spans.add((span.work.step, span.work.key, span.revision))
            out.append(span_row(attempt.attempt_id, span))
    return out


def _of_process(step: Step, process: Process) -> Iterator[Span]:
    for (incarnation, _), revisions in step.spans.items():
        if incarnation == process.incarnation:
            yield from revisions


def _find(step: Step, process: Process, work: Work, seq: int, *, ended: bool) -> Span | None:
    """Return the span that an event belongs to: the one that knows it, else one that lacks it."""
    revisions = step.spans.get((process.incarnation, work.key), [])
    for span in revisions:
        if seq == (span.end_seq if ended else span.begin_seq):
            return span
    for span in revisions:
        if (span.end_seq if ended else span.begin_seq) is None and _in_order(span, seq, ended):
            return span
    return None


def _in_order(span: Span, seq: int, ended: bool) -> bool:
    """Whether this end lies after the span's beginning (a raw caller's seq has no order)."""
    if ended:
        return span.begin_seq is None or span.begin_seq < seq or seq >= RAW_SEQ
    return span.end_seq is None or seq < span.end_seq or seq >= RAW_SEQ


def _add(
    attempt: Attempt, step: Step, process: Process, event: Event, work: Work
) -> tuple[Span, list[Instruction]]:
    revisions = step.spans.setdefault((process.incarnation, work.key), [])
    span = Span(process.incarnation, process.role, process.rank, work, revision=len(revisions))
    out: list[Instruction] = []
    if revisions:
        for older in revisions:
            older.superseded = True
            out.append(span_row(attempt.attempt_id, older))
        out.append(
            _repeated(attempt, span, event.wall, "the same process reported the same part twice")
        )
    revisions.append(span)
    holders = step.holders.setdefault((process.role, process.rank, work.key), [])
    if process.incarnation not in holders:
        holders.append(process.incarnation)
    return span, out


def _supersede(attempt: Attempt, step: Step, span: Span, wall: float) -> list[Instruction]:
    """Let the newest incarnation answer for a piece of work that several did."""
    holders = step.holders[(span.role, span.rank, span.work.key)]
    if len(holders) < 2:
        return []
    newest = max(holders, key=lambda name: (_started(attempt, name), name))
    out: list[Instruction] = []
    for incarnation in holders:
        latest = step.spans[(incarnation, span.work.key)][-1]
        superseded = incarnation != newest
        if latest.superseded != superseded:
            latest.superseded = superseded
            out.append(span_row(attempt.attempt_id, latest))
    out.append(_repeated(attempt, span, wall, f"{len(holders)} incarnations of a rank did it"))
    return out


def _repeated(attempt: Attempt, span: Span, wall: float, how: str) -> Instruction:
    work = span.work
    return finding(
        "superseded_work",
        f"step {work.step} {work.stage} part {work.part} of {span.role} rank {span.rank} was "
        f"reported more than once: {how}; the newest answers, the older is kept as superseded",
        run=attempt.run,
        attempt_id=attempt.attempt_id,
        wall=wall,
        step=work.step,
        stage=work.stage,
        role=span.role,
        rank=span.rank,
        advice="give each start of the training its own attempt key, each part its own number",
    )


def _clock(sender: Sender) -> dict[str, Any]:
    return {"clock_offset": sender.clock_offset, "clock_error": sender.clock_error}


def _number(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    return float(value) if isinstance(value, int | float) else None


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    return None if value is None else str(value)[:4000]


def _started(attempt: Attempt, incarnation: str) -> float:
    # After a restart, processes that left long ago are in the catalogue alone.
    process = attempt.processes.get(incarnation)
    return 0.0 if process is None else process.started
