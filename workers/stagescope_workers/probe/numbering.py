"""Numbers the stages of a process in order of entry, and notices steps that are repeated."""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping
from typing import Final, NamedTuple

from stagescope_wire.errors import InvalidInput
from stagescope_wire.schema import PART_FIELDS, Part, Work
from stagescope_workers.probe.handshake import Handshake
from stagescope_workers.probe.options import index, step_index
from stagescope_workers.probe.watchdog import StageTracker
from stagescope_workers.transport.outbox import Outbox
from stagescope_workers.transport.sender import EventSender

_COUNTED_STEPS: Final = 64  # steps whose occurrences are remembered


class Numbering:
    """Counts the stages of a process by step, name and part; used from any thread."""

    def __init__(self) -> None:
        self._occurrences: collections.OrderedDict[object, collections.Counter[object]] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()

    def work(
        self, name: object, step: object, version: object, fields: Mapping[str, int | None]
    ) -> Work:
        """Return the work of a stage, with the next occurrence where `fields` has none.

        Raises:
            InvalidInput: an invalid name, number or part.
        """
        unknown = sorted(set(fields) - set(PART_FIELDS))
        if unknown:
            raise InvalidInput(f"a stage has no {', '.join(unknown)}", expected=str(PART_FIELDS))
        if not (isinstance(name, str) and 0 < len(name) <= 200):
            raise InvalidInput(f"stage is {name!r:.200}", expected="a name of 1 to 200 characters")
        part = {field: index(field, fields.get(field)) for field in PART_FIELDS}
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


MAX_EARLIER: Final = 4
"""Earlier starts of a probe that may still have something to send."""

STEP_REPEATED: Final = "step_begun_again"
"""The `what` of a REFUSED event about a stage that seems to repeat its step."""

STEP_REPEATED_ADVICE: Final = (
    "if the training starts over, call probe.close() before init, which then starts a new attempt. "
    "If these are passes of one step, number them (occurrence=, epoch=, minibatch= or microbatch= "
    "of probe.stage)"
)


class Start(NamedTuple):
    """A start of a probe; its last events and payloads may still be unsent."""

    event_sender: EventSender
    outbox: Outbox
    handshake: Handshake


def reason_against_new_start(
    earlier: list[Start], max_bytes: int, stage_tracker: StageTracker
) -> str | None:
    """Return why no new start may begin beside these earlier ones; None where it may."""
    open_stage = stage_tracker.oldest
    if open_stage is not None:
        stage, step = open_stage.stage, open_stage.step
        return f"stage {stage} of step {step} was begun and has not been ended"
    if len(earlier) >= MAX_EARLIER:
        return f"{len(earlier)} earlier starts have still to be sent"
    if sum(each.outbox.bytes for each in earlier) > max_bytes:
        return "the payloads of earlier starts have still to be sent"
    return None


class StepOrder:
    """Follows the order in which the steps of one start begin."""

    def __init__(self, role: str) -> None:
        self.reached: int | None = None
        """The highest step that was begun."""
        # The rollouts of several steps overlap.
        self._is_ordered = role != "rollout"
        self._first_stage: str | None = None
        self._stages_since_init = 0
        self._init_was_called = False

    def init_called_again(self) -> None:
        """Note a call of `init`: the next stage may repeat its step."""
        self._init_was_called = True

    def is_earlier(self, step: int) -> bool:
        """Return whether `step` is earlier than the highest step that was begun."""
        return self._is_ordered and self.reached is not None and step < self.reached

    def note(self, work: Work, *, is_numbered: bool) -> bool:
        """Note a stage that begins; return whether it seems to repeat its step.

        It does where it is the first after a call of `init`, and its occurrence, which the caller
        did not give (`is_numbered`), is not the first. A function that calls `init` for each stage
        may have several passes of a stage: then only the first stage of the step counts.
        """
        if work.step is None:
            return False
        after_init, self._init_was_called = self._init_was_called, False
        before = self._stages_since_init
        self._stages_since_init = 1 if after_init else before + 1
        if self.reached is None or work.step > self.reached:
            self.reached, self._first_stage = work.step, work.stage
            return False
        is_further = work.step == self.reached and work.part.occurrence > 0 and not is_numbered
        is_first = work.stage == self._first_stage
        return self._is_ordered and after_init and is_further and (is_first or before > 1)
