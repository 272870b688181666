"""The starts of a probe: what an earlier one has still to send, and which step one has reached.

`init` may be called again for an open probe. A function that calls it for each stage goes on; a
notebook's cell that is run again goes back in its steps, and begins anew.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from stagescope.schema import Work
from stagescope_workers.courier import Courier
from stagescope_workers.introduction import Introduction
from stagescope_workers.outbox import Outbox
from stagescope_workers.standing import Standing

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

    courier: Courier
    outbox: Outbox
    introduction: Introduction


def why_not(earlier: list[Start], most_bytes: int, standing: Standing) -> str | None:
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
