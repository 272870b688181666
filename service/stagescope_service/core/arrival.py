"""How an event reaches the state machine, and which fields it must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from stagescope_service.core.hangs.stack_requests import request_of
from stagescope_wire.errors import InvalidEvent
from stagescope_wire.schema import BEGIN, DUMP, END, END_STEP, LOG, STACKS, Event, Work


class Arrival(NamedTuple):
    """How an event reached the service."""

    has_payload: bool = False
    """The payload's refs came with this END."""
    raw: bool = False
    """The sender is a raw caller, known by name and not by an incarnation."""
    late: bool = False
    """It is of an attempt that has finished; a new process is created as gone."""
    wall: float | None = None
    """When it arrived, by the service's clock; used if the sender's clock offset is unknown."""
    stored: str | None = None
    """The final state of the END's payload in the catalogue, if it is not in memory."""


PLAIN: Final = Arrival()


def work_of(event: Event) -> Work:
    """Return the work of an event after checking its required fields.

    Raises:
        InvalidEvent: a field is missing or malformed.
    """
    work = Work.parse(event.fields)
    if work.stage is None and event.kind in (BEGIN, END, DUMP):
        raise InvalidEvent(f"{event.kind} event {event.seq} has no stage", expected="a name")
    if work.step is None and event.kind == END_STEP:
        raise InvalidEvent(f"end_step event {event.seq} has no step", expected="an int")
    if event.kind == LOG and not isinstance(event.fields.get("scalars"), Mapping):
        raise InvalidEvent(
            f"log event {event.seq} has no scalars",
            expected="scalars: a dict of names to numbers, such as scalars={'loss': 0.5}",
        )
    if event.kind == STACKS:
        request_of(event.fields)
    return work
