"""Lets a rank that started again wait until it is known whether all ranks did.

Killed and started again within seconds, the ranks of a training report one after the other, and the
ones before still seem to be live. The first batch of the first rank cannot tell a new start from a
rank that is replaced alone; the HELLO of the others can, or an event of one that goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from stagescope.wire.errors import InvalidEvent
from stagescope.wire.schema import BEGIN, END, HELLO, WEIGHTS, Event, Sender, Work
from stagescope_service.core.state import State

WAIT_SECONDS: Final = 5.0
"""How long a batch waits at most: less than a sender waits for its answer."""
_LOOK_SECONDS: Final = 0.1
_ATTEMPTS_REMEMBERED: Final = 100

_BINDING: Final = frozenset({BEGIN, END, WEIGHTS})
"""Events of a step after which a process stays in its attempt."""


class Starts:
    """Looks at the first batches of ranks that started again; used from one event loop."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._looked: dict[int, float] = {}
        """Attempt id -> when it was looked at last: the answer is about the same for its ranks."""

    def step_in_question(self, sender: Sender, events: Sequence[object]) -> int | None:
        """Return the step with which a batch may begin a new start; None if it cannot."""
        registry = self._state.registry
        process = registry.processes.get(sender.incarnation)
        if process is None:
            attempt = registry.find(sender.run, sender.attempt_key)
        elif process.bound or process.raw:
            return None
        else:
            attempt = registry.attempt_of(process)
        known = () if attempt is None else attempt.by_rank.get((sender.role, sender.rank), ())
        return _first_step(events) if any(each.bound for each in known) else None

    async def wait(self, incarnation: str, step: int) -> None:
        """Wait until it is known to which start a process belongs that begins `step`.

        Its HELLO was handled before. It ends after `WAIT_SECONDS` at most.
        """
        registry = self._state.registry
        process = registry.processes.get(incarnation)
        if process is None:
            return
        attempt_id, loop = process.attempt_id, asyncio.get_running_loop()
        until = loop.time() + WAIT_SECONDS
        while not process.bound and process.attempt_id == attempt_id and loop.time() < until:
            if loop.time() >= self._looked.get(attempt_id, 0.0) + _LOOK_SECONDS:
                if len(self._looked) > _ATTEMPTS_REMEMBERED:
                    self._looked.clear()
                self._looked[attempt_id] = loop.time()
                if not registry.may_be_of_new_start(process, step):
                    return
            await asyncio.sleep(_LOOK_SECONDS)


def hellos(events: Sequence[object]) -> list[object]:
    """Return the HELLO events of a batch, as they were sent."""
    return [wire for wire in events if _kind(wire) == HELLO]


def _kind(wire: object) -> object:
    return wire[1] if isinstance(wire, tuple | list) and len(wire) > 1 else None


def _first_step(events: Sequence[object]) -> int | None:
    for wire in events:
        if isinstance(kind := _kind(wire), str) and kind in _BINDING:
            try:
                step = Work.parse(Event.parse(wire).fields).step
            except InvalidEvent:
                continue
            if step is not None:
                return step
    return None
