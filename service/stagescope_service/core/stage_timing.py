"""How ranks went through the parts of a step, noted as their events come in, in any order."""

from __future__ import annotations

from stagescope.wire.nonfinite import JsonObject
from stagescope.wire.schema import Sender
from stagescope_service.core.catalogue_rows import number
from stagescope_service.core.entities import Process, Span, Step
from stagescope_service.core.hang_detection import StageKey, StageTiming


def service_clock(sender: Sender, wall: float, arrived: float | None) -> float:
    """Convert a sender's wall clock to the service's by its offset, else return the arrival."""
    if sender.clock_offset is not None:
        return wall + sender.clock_offset
    return wall if arrived is None else arrived


def note_begin(step: Step, process: Process, span: Span, at: float) -> None:
    """Record that a process began a part; `at` is in seconds of the service's clock."""
    timing = _timing(step, span)
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
        step: of the part.
        process: which ended it.
        span: the part.
        at: of the service's clock, seconds.
        fields: of the END.
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
    timing = _timing(step, span)
    if timing is not None and seconds is not None:
        timing.took(seconds)


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
