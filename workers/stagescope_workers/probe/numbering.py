"""Which piece of which step a stage is: what is not said is numbered in order of entry."""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from stagescope.wire.errors import InvalidInput
from stagescope.wire.schema import PART_FIELDS, Part, Work
from stagescope_workers.probe.options import index, step_index
from stagescope_workers.probe.stage_tracker import StageTracker
from stagescope_workers.transport.handshake import Handshake
from stagescope_workers.transport.outbox import Outbox
from stagescope_workers.transport.sender import EventSender

_COUNTED_STEPS: Final = 64  # steps whose occurrences are remembered


class Numbering:
    """Counts the stages of a process by step, name and part; used from any thread."""

    def __init__(self) -> None:
        self._occurrences: collections.OrderedDict[object, collections.Counter[Any]] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()

    def work(
        self, name: object, step: object, version: object, given: Mapping[str, int | None]
    ) -> Work:
        """Return the work that a stage is about; its occurrence where none is given.

        Raises:
            InvalidInput: a name, a number or a part that cannot be right.
        """
        unknown = sorted(set(given) - set(PART_FIELDS))
        if unknown:
            raise InvalidInput(f"a stage has no {', '.join(unknown)}", expected=str(PART_FIELDS))
        if not (isinstance(name, str) and 0 < len(name) <= 200):
            raise InvalidInput(f"stage is {name!r:.200}", expected="a name of 1 to 200 characters")
        part = {field: index(field, given.get(field)) for field in PART_FIELDS}
        clock = (step_index(step), index("policy_version", version))
        occurrence = part.pop("occurrence")
        if occurrence is None:
            occurrence = self._next(clock, (name, *part.values()))
        return Work(*clock, name, Part(occurrence, *(number or 0 for number in part.values())))

    def _next(self, clock: tuple[int | None, int | None], piece: object) -> int:
        key = clock if clock[0] is None else clock[0]
        with self._lock:
            counts = self._occurrences.setdefault(key, collections.Counter())
            self._occurrences.move_to_end(key)
            while len(self._occurrences) > _COUNTED_STEPS:
                self._occurrences.popitem(last=False)
            counts[piece] += 1
            return counts[piece] - 1


MOST_EARLIER: Final = 4
"""Earlier starts of a probe that may still have something to send."""

BEGUN_AGAIN: Final = "step_begun_again"
"""What a REFUSED event calls a stage that seems to be that of another go of its step."""

BEGUN_AGAIN_ADVICE: Final = (
    "where this is training done anew, call probe.close() before init: what follows is then an "
    "attempt of its own; where these are passes of one step, number them (occurrence=, epoch=, "
    "minibatch= or microbatch= of probe.stage)"
)


class Start(NamedTuple):
    """A start of a probe, whose last events and payloads may be on their way."""

    event_sender: EventSender
    outbox: Outbox
    own_handshake: Handshake


def why_not(earlier: list[Start], most_bytes: int, standing: StageTracker) -> str | None:
    """Return why no new start may begin beside these earlier ones; None where it may."""
    inside = standing.oldest
    if inside is not None:
        return f"stage {inside.stage} of step {inside.step} was begun and has not been ended"
    if len(earlier) >= MOST_EARLIER:
        return f"{len(earlier)} earlier starts have still to be sent"
    if sum(each.outbox.bytes for each in earlier) > most_bytes:
        return "the payloads of earlier starts have still to be sent"
    return None


class StepOrder:
    """The steps of one start, in the order in which their stages begin."""

    def __init__(self, role: str) -> None:
        self.reached: int | None = None
        """The highest step that was begun."""
        # Rollouts are of several steps at a time.
        self._has_order = role != "rollout"
        self._first: str | None = None
        self._since_init = 0
        self._is_called_again = False

    def init_called_again(self) -> None:
        """Note that `init` was called: the next stage may be of another go."""
        self._is_called_again = True

    def goes_back(self, step: int) -> bool:
        """Say whether a stage of `step` goes back to an earlier step than was reached."""
        return self._has_order and self.reached is not None and step < self.reached

    def note(self, work: Work, *, is_numbered: bool) -> bool:
        """Note a stage that begins; say whether it seems to be that of another go of its step.

        It does where it is the first after a call of `init`, and its occurrence, which was not
        given (`is_numbered`), is a further one. A function that calls `init` for each stage may
        have several passes of one: then only the stage with which the step began counts.
        """
        if work.step is None:
            return False
        is_fresh, self._is_called_again = self._is_called_again, False
        before, self._since_init = self._since_init, 1 if is_fresh else self._since_init + 1
        if self.reached is None or work.step > self.reached:
            self.reached, self._first = work.step, work.stage
            return False
        is_further = work.step == self.reached and work.part.occurrence > 0 and not is_numbered
        is_first = work.stage == self._first
        return self._has_order and is_fresh and is_further and (is_first or before > 1)
