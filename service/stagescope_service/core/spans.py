"""Spans of work inside a step: begun, ended, repeated, superseded, and how long they took.

Every function changes only its arguments and returns the instructions that follow.

The key of a span in the catalogue is (incarnation, work key, revision). The revision is the
sequence number of its BEGIN, which its END repeats (`begin_seq`). So both find their row in any
order, even if the other is not in memory. If two spans have one identity, the later one has the
higher revision. If the BEGIN is unknown, the span is searched in memory: raw callers' calls have no
order, and an END may lack `begin_seq`.

A new incarnation of a rank may split a stage into other parts than the older one. Its spans count
from the lowest part that it began, and supersede the older ones' spans of these and later parts.
Earlier parts stay: the newer incarnation goes on where the older stopped.
"""

from __future__ import annotations

import bisect
import dataclasses
from operator import attrgetter
from typing import Final

from stagescope_service.core.catalogue_rows import (
    integer,
    number,
    said,
    span_columns,
    span_row,
    text,
)
from stagescope_service.core.entities import (
    FAILED,
    OK,
    OPEN,
    SPANS_REMEMBERED,
    UNFINISHED,
    Attempt,
    Process,
    Span,
    StageKey,
    StageTiming,
    Step,
)
from stagescope_service.core.findings import BEGUN_AGAIN, finding, of_attempt
from stagescope_service.core.instructions import Instruction, Put
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.schema import Event, Sender, Work

RAW_SEQ: Final = 1 << 60
"""From here on a seq is a raw call's delivery identity, which says nothing about order."""

_revision: Final = attrgetter("revision")


@dataclasses.dataclass(slots=True)
class ReceivedEvent:
    """An event, who sent it, and when by the service's clock, in Unix seconds."""

    sender: Sender
    event: Event
    work: Work
    arrived: float | None
    """When it arrived; None: unknown."""
    ours: float
    """When it was sent, and no later than it arrived."""
    at: float
    """When it was sent, or arrived if the sender's clock offset is unknown."""


def begin(
    attempt: Attempt, step: Step, process: Process, received: ReceivedEvent
) -> tuple[Span, list[Instruction]]:
    """Apply the BEGIN of a work; the END may have arrived first."""
    sender, event, work = received.sender, received.event, received.work
    known = _matching_spans(step, process, work)
    span = _find_begun(known, event) if known else None
    out: list[Instruction] = []
    if span is None:
        span, out = _add(attempt, step, process, event, work, _own_revision(event))
    if span.begin_seq is not None:
        return span, out  # a repetition
    span.begin_seq = event.seq
    if span.status == OPEN:
        process.open_spans[(work.key, span.revision)] = span
    if span.work.policy_version is None:
        span.work = work
    row = span_columns(attempt.attempt_id, span)
    row["begin_seq"] = event.seq
    row["begin_wall"] = event.wall
    row["begin_mono"] = event.mono
    row["begun_wall"] = received.ours
    row["device_time"] = bool(event.fields.get("device_time"))
    if span.end_seq is None:
        row["clock_offset"] = sender.clock_offset
        row["clock_error"] = sender.clock_error
    out.append(Put("stages", row))
    return span, out


def end(
    attempt: Attempt, step: Step, process: Process, received: ReceivedEvent
) -> tuple[Span, list[Instruction]]:
    """Apply the END of a work, also if its BEGIN never arrived."""
    sender, event, work = received.sender, received.event, received.work
    fields = event.fields
    begin_seq = integer(fields.get("begin_seq"))
    if begin_seq is not None and not 0 < begin_seq < event.seq:
        begin_seq = None
    known = _matching_spans(step, process, work)
    span = _find_ended(known, event, begin_seq) if known else None
    out: list[Instruction] = []
    if span is None:
        revision = _own_revision(event) if begin_seq is None else begin_seq
        span, out = _add(attempt, step, process, event, work, revision)
    if span.end_seq is not None:
        return span, out  # a repetition
    span.end_seq = event.seq
    span.status = FAILED if fields.get("status") == FAILED else OK
    if span.work.policy_version is None:
        span.work = work
    key = (work.key, span.revision)
    process.open_spans.pop(key, None)
    if process.unfinished:
        process.unfinished.pop(key, None)
    row = span_columns(attempt.attempt_id, span)
    row["end_seq"] = event.seq
    row["end_wall"] = event.wall
    row["end_mono"] = event.mono
    row["device_seconds"] = number(fields.get("device_seconds"))
    if span.status == FAILED:
        row["error_type"] = text(fields.get("error_type"))
        row["error_message"] = said(fields.get("error_message"))
    row["clock_offset"] = sender.clock_offset
    row["clock_error"] = sender.clock_error
    if span.begin_seq is None:
        for name in ("begin_wall", "begin_mono"):
            if (value := number(fields.get(name))) is not None:
                row[name] = value
        if (wall := row.get("begin_wall")) is not None:
            row["begun_wall"] = on_our_clock(sender, wall, received.arrived)[0]
    out.append(Put("stages", row))
    return span, out


def begun_again(
    attempt: Attempt, step: Step, process: Process, span: Span, wall: float
) -> list[Instruction]:
    """Return findings of stages that a process began again after it went back to earlier steps.

    A second pass of a step (resampling) comes before the next step, and is no finding. A finding is
    training that goes back to a checkpoint inside its process: both passes of the step count.
    Rollouts of several steps may overlap. `span` is new; if it arrives late, it can show this for
    other steps than its own.
    """
    stage, number, newest = span.work.stage, step.step, process.newest_revision
    if span.revision > newest:
        process.newest_revision = span.revision
    ahead = process.max_step is not None and process.max_step > number
    if not (ahead or span.revision < newest or process.went_back):
        return []
    if stage in (None, "rollout_generate"):
        return []
    own: dict[int, list[int]] = {}
    for other in [*attempt.steps.values(), *([step] if step.evicted else [])]:
        ranks = other.ranks.get((span.role, stage or ""), {})
        revisions = [
            each.revision
            for each in ranks.get(span.rank, ())
            if each.incarnation == span.incarnation
        ]
        if revisions:
            # Assume that the process had worked on a step that has left memory.
            own[other.step] = [-1, *revisions] if other.evicted else revisions
    out: list[Instruction] = []
    for again, revisions in own.items():
        first, last = min(revisions), max(revisions)
        if again != number and span.revision > last:
            continue  # it changes nothing for that step
        after = [
            other
            for other, those in own.items()
            if any(first < each < last for each in those)
            # A later step, or an earlier one that it went back to in between.
            if other > again or (other < again and min(those) < first)
        ]
        if after:
            process.went_back = True
            out.append(_begun_again(attempt, span, again, max(after), wall))
    return out


def _begun_again(attempt: Attempt, span: Span, step: int, after: int, wall: float) -> Instruction:
    return finding(
        BEGUN_AGAIN,
        f"{span.role} rank {span.rank} began {span.work.stage} of step {step} again after step "
        f"{after}. Both executions count in step {step}",
        **of_attempt(attempt, wall),
        severity="error",
        step=step,
        stage=span.work.stage,
        role=span.role,
        rank=span.rank,
        evidence={"after_step": after},
        advice="if the training returns to a checkpoint in the same process, call init again "
        "before it goes on. init starts a new attempt, which supersedes these steps",
    )


def abandon(attempt: Attempt, process: Process) -> list[tuple[Span, Instruction]]:
    """Mark a process's open spans as unfinished."""
    out: list[tuple[Span, Instruction]] = []
    for key, span in process.open_spans.items():
        span.status = UNFINISHED
        process.unfinished[key] = span
        out.append((span, span_row(attempt.attempt_id, span)))
    process.open_spans.clear()
    return out


def revive(attempt: Attempt, process: Process) -> list[tuple[Span, Instruction]]:
    """Undo `abandon`: the process is still alive."""
    out: list[tuple[Span, Instruction]] = []
    for key, span in process.unfinished.items():
        span.status = OPEN
        process.open_spans[key] = span
        out.append((span, span_row(attempt.attempt_id, span)))
    process.unfinished.clear()
    return out


def of_stage(step: Step, incarnation: str, work: Work) -> list[Span]:
    """Return a process's spans of a stage, in all its parts."""
    return [
        span
        for ranks in step.ranks.values()
        for spans in ranks.values()
        for span in spans
        if span.incarnation == incarnation
        and span.work.stage == work.stage
        and (work.step is not None or span.work.policy_version == work.policy_version)
    ]


def keep(step: Step, span: Span) -> bool:
    """Add a span to the indexes of `step`.

    Returns whether its process did this work before, or another incarnation worked on the stage.
    """
    incarnation, work = span.incarnation, span.work
    # Of the keys, those of a rank are new with each span: their containers hold it from the start.
    revisions = step.spans.get(key := (incarnation, work.key))
    if revisions is None:
        revisions = step.spans[key] = [span]
    else:
        bisect.insort(revisions, span, key=_revision)
    holders = step.holders.get(stage_key := _holders_key(span))
    if holders is None:
        holders = step.holders[stage_key] = {incarnation: work.part}
    elif (lowest := holders.get(incarnation)) is None or work.part < lowest:
        holders[incarnation] = work.part
    if work.stage is not None:
        ranks = step.ranks.setdefault((span.role, work.stage), {})
        if (spans := ranks.get(span.rank)) is None:
            ranks[span.rank] = [span]
        else:
            spans.append(span)
    return len(revisions) > 1 or len(holders) > 1


def let_go_of_ended(step: Step) -> None:
    """Bound the memory of work without a step, which never closes."""
    excess = len(step.spans) - SPANS_REMEMBERED
    if excess < SPANS_REMEMBERED:
        return
    for key in [*step.spans]:
        revisions = step.spans[key]
        if excess <= 0 or any(span.status == OPEN for span in revisions):
            continue
        del step.spans[key]
        excess -= 1
    kept = [span for revisions in step.spans.values() for span in revisions]
    step.spans, step.holders, step.ranks = {}, {}, {}
    for span in kept:
        keep(step, span)


def on_our_clock(sender: Sender, wall: float, arrived: float | None) -> tuple[float, float]:
    """Convert a sender's wall clock to the service's; see `ReceivedEvent.ours` and `at`."""
    offset = sender.clock_offset
    if offset is None:
        return (wall, wall) if arrived is None else (min(wall, arrived), arrived)
    at = wall + offset
    return (at, at) if arrived is None or at < arrived else (arrived, at)


def note_begin(step: Step, process: Process, span: Span, at: float) -> None:
    """Record that a process began a part; `at` is in seconds of the service's clock."""
    timing = span.timing = _timing(step, span)
    if timing is None:
        return
    timing.begun(at)
    span.begun = at
    if at > process.last_event:
        process.last_event = at
    key = span.work.key
    reached = process.reached
    if reached is None or at > reached[0] or (at == reached[0] and key > reached[1]):
        process.reached = (at, key, timing)


def note_end(
    step: Step, process: Process, span: Span, at: float, fields: JsonObject, mono: float
) -> None:
    """Record that a process ended a part; its begin may be known only from `fields`.

    Args:
        step: the part's step.
        process: the process that ended it.
        span: the part.
        at: seconds, by the service's clock.
        fields: the END's fields.
        mono: its monotonic time, seconds; used for durations where possible.
    """
    begin_mono = number(fields.get("begin_mono"))
    if begin_mono is not None:
        seconds = max(mono - begin_mono, 0.0)
        if span.begun is None:
            note_begin(step, process, span, at - seconds)
    elif span.begun is not None:
        seconds = max(at - span.begun, 0.0)
    else:
        seconds = None
    if at > process.last_event:
        process.last_event = at
    timing = span.timing or _timing(step, span)
    if timing is not None and seconds is not None:
        timing.took(seconds)


def _own_revision(event: Event) -> int:
    # A raw caller's seq is a hash without order; its wall clock has one.
    return event.seq if event.seq < RAW_SEQ else int(event.wall * 1e6)


def _matching_spans(step: Step, process: Process, work: Work) -> list[Span]:
    known = step.spans.get((process.incarnation, work.key))
    if known is None and step.evicted:
        left = (*process.open_spans.values(), *process.unfinished.values())
        known = [span for span in left if span.work.key == work.key]
    return known or []


def _find_begun(known: list[Span], event: Event) -> Span | None:
    """Return the span of a BEGIN: by its seq, else one whose END did not name its BEGIN."""
    for span in known:
        if event.seq in (span.begin_seq, span.revision):
            return span
    raw = event.seq >= RAW_SEQ
    for span in known:
        # Its END has no `begin_seq`.
        lacks = span.begin_seq is None and span.revision == span.end_seq
        if span.begin_seq is None and raw:
            return span
        if lacks and span.end_seq is not None and event.seq < span.end_seq:
            return span
    return None


def _find_ended(known: list[Span], event: Event, begin_seq: int | None) -> Span | None:
    """Return the span of an END: by its seq, else the one whose BEGIN it names."""
    for span in known:
        if span.end_seq == event.seq:
            return span
    if begin_seq is not None:
        for span in known:
            if span.revision == begin_seq:
                return span
        return None
    raw = event.seq >= RAW_SEQ
    unended = [span for span in known if span.end_seq is None]
    if raw:
        return unended[0] if unended else None
    return next((span for span in reversed(unended) if span.revision < event.seq), None)


def _add(
    attempt: Attempt, step: Step, process: Process, event: Event, work: Work, revision: int
) -> tuple[Span, list[Instruction]]:
    span = Span(process.incarnation, process.role, process.rank, work, revision)
    if step.evicted:
        # It may be a repetition: whether it is superseded is only in the catalogue.
        span.superseded = None
    is_repeated = keep(step, span)
    process.worked = True
    if step is attempt.stepless:
        let_go_of_ended(step)
    if not is_repeated:
        return span, []
    out = _supersede(attempt, step, span)
    if out or span.superseded:
        out.append(_repeated(attempt, span, event.wall))
    return span, out


def _holders_key(span: Span) -> tuple[str, int, str]:
    """Return the key of a rank's stage: (role, rank, the work's key without the part)."""
    return (span.role, span.rank, span.work.stage_key)


def _supersede(attempt: Attempt, step: Step, span: Span) -> list[Instruction]:
    """Update which spans are superseded after `span` was added; return the rows of the others."""
    key = _holders_key(span)
    holders = step.holders[key]
    ages = {name: _age(attempt, name) for name in holders}
    judged = [*step.spans[(span.incarnation, span.work.key)]]
    if holders[span.incarnation] == span.work.part:
        # It may be the lowest part that its incarnation counts from.
        judged += [
            each
            for each in step.ranks[(span.role, span.work.stage or "")][span.rank]
            if each.work.part >= span.work.part
            and _holders_key(each) == key
            and ages[each.incarnation] < ages[span.incarnation]
        ]
    out: list[Instruction] = []
    for each in judged:
        replaced = any(
            lowest <= each.work.part and ages[name] > ages[each.incarnation]
            for name, lowest in holders.items()
        )
        superseded = replaced or each is not step.spans[(each.incarnation, each.work.key)][-1]
        if each.superseded != superseded:
            each.superseded = superseded
            if each is not span:  # its own row follows
                out.append(span_row(attempt.attempt_id, each))
    return out


def _age(attempt: Attempt, incarnation: str) -> tuple[float, str]:
    # After a restart, processes that left long ago are only in the catalogue.
    process = attempt.processes.get(incarnation)
    return (0.0, incarnation) if process is None else process.age


def _repeated(attempt: Attempt, span: Span, wall: float) -> Instruction:
    work = span.work
    return finding(
        "superseded_work",
        f"parts of {work.stage} in step {work.step} were reported more than once by {span.role} "
        f"rank {span.rank}; the newest answers, the older are kept as superseded",
        **of_attempt(attempt, wall),
        step=work.step,
        stage=work.stage,
        role=span.role,
        rank=span.rank,
        advice="give each start of the training its own attempt key, each part its own number",
    )


def _timing(step: Step, span: Span) -> StageTiming | None:
    timings = step.timings.get(span.role)
    if timings is None:
        timings = step.timings[span.role] = {}
    work = span.work
    timing = timings.get(work.key)
    if timing is None:
        if step.evicted or work.step is None or work.stage is None:
            return None
        timing = timings[work.key] = StageTiming(StageKey(work.step, work.stage, work.part))
    return timing
