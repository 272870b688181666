"""Lets a rank that started again wait until it is known whether all ranks did.

If a training is killed and started again within seconds, its ranks report one after the other while
the earlier ones still seem to be live. The first batch of the first rank cannot distinguish a new
start from a rank that is replaced alone. The HELLOs of the others can, or an event or a poll of a
rank that goes on, or the end of its lease. Until then the rank must send its batch again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from stagescope_service.background import BackgroundTasks
from stagescope_service.core.entities import Process
from stagescope_service.core.restarts import OVERLAP_SECONDS
from stagescope_service.core.state import State
from stagescope_wire.errors import InvalidEvent
from stagescope_wire.schema import BEGIN, CANARY, END, FINISH, HELLO, WEIGHTS, Event, Sender, Work

WAIT_SECONDS: Final = 5.0
"""How long a call waits at most: less than a sender waits for its answer. A batch waits as long
if the ranks before do not poll."""
PAUSE_SECONDS: Final = 0.3
"""Seconds until a rank must send its batch again."""
MOST_EVENTS: Final = 256
"""A batch of this many events waits for `WAIT_SECONDS` at most: more would wait behind it."""
_LOOK_SECONDS: Final = 0.1
_REMEMBERED: Final = 10_000

_BINDING: Final = frozenset({BEGIN, END, WEIGHTS, CANARY})
"""Events of a step after which a process stays in its attempt."""


class Starts:
    """Checks the first batches of ranks that started again; used from one event loop."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._tasks = BackgroundTasks()
        self._waits: dict[tuple[int, str], asyncio.Task[None]] = {}
        """Attempt id, role -> the current wait; its end ends it for all ranks of the role."""
        self._since: dict[str, float] = {}
        """Incarnation -> since when its batch is requested again."""
        self._longest = state.lease_seconds + OVERLAP_SECONDS

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
        if attempt is None:
            return None
        known = attempt.by_rank.get((sender.role, sender.rank), ())
        is_again = any(each.bound for each in known)
        if is_again or registry.restarts.may_have_other_size(attempt, sender.role, sender.rank):
            return _first_step(events)
        return None

    def is_known(self, incarnation: str) -> bool:
        """Return whether the HELLO of a process was handled."""
        process = self._state.registry.processes.get(incarnation)
        return process is not None and process.handshake is not None

    async def is_undecided(self, incarnation: str, step: int, events: Sequence[object]) -> bool:
        """Wait until the start of a process is known, for `WAIT_SECONDS` at most.

        Its HELLO was handled before, and it begins `step`. Returns what `is_in_question` does.
        """
        if not self.is_in_question(incarnation, step, events):
            return False
        left = self._since[incarnation] + WAIT_SECONDS - asyncio.get_running_loop().time()
        if left > 0 and (waiting := self._waiting(incarnation, step)) is not None:
            await asyncio.wait([waiting], timeout=left)
        return self.is_in_question(incarnation, step, events)

    def is_in_question(self, incarnation: str, step: int, events: Sequence[object]) -> bool:
        """Return whether the sender must repeat a batch later, when its start may be known.

        Args:
            incarnation: the batch's sender.
            step: the step that the sender begins with the batch.
            events: the batch's events. A batch that takes leave, or is full, waits `WAIT_SECONDS`
                at most; any other one waits until the leases of the start before have ended.
        """
        now = asyncio.get_running_loop().time()
        process = self._state.registry.processes.get(incarnation)
        if process is not None and self._waiting(incarnation, step) is not None:
            if len(self._since) >= _REMEMBERED:  # of ranks that did not come again
                limit = now - self._longest
                self._since = {name: each for name, each in self._since.items() if each > limit}
            since = self._since.setdefault(incarnation, now)
            is_urgent = len(events) >= MOST_EVENTS or any(_kind(wire) == FINISH for wire in events)
            will_show = not is_urgent and self._state.registry.restarts.will_show(process, step)
            if now < since + (self._longest if will_show else WAIT_SECONDS):
                return True
        self._since.pop(incarnation, None)
        return False

    def _waiting(self, incarnation: str, step: int) -> asyncio.Task[None] | None:
        registry = self._state.registry
        process = registry.processes.get(incarnation)
        if process is None:
            return None
        key = (process.attempt_id, process.role)
        if (waiting := self._waits.get(key)) is not None:
            return waiting
        if not registry.restarts.may_be_of_new_start(process, step):
            return None
        waiting = self._waits[key] = self._tasks.start(self._look(process, step))
        waiting.add_done_callback(lambda _: self._waits.pop(key, None))
        return waiting

    async def _look(self, process: Process, step: int) -> None:
        registry, loop = self._state.registry, asyncio.get_running_loop()
        attempt_id, until = process.attempt_id, loop.time() + WAIT_SECONDS
        while loop.time() < until:
            await asyncio.sleep(_LOOK_SECONDS)
            if process.bound or process.attempt_id != attempt_id:
                return
            if not registry.restarts.may_be_of_new_start(process, step):
                return


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
