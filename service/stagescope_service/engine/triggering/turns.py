"""In which order formed steps are held against rules: by their numbers, as far as one can wait.

Payloads are read and wholes formed as they come, so step 9 may be formed while a payload of step 6
is still being read. What fires at 9 may depend on 6 (a cooldown, a median), and what follows of a
firing cannot be taken back: so 9 waits for 6. Pure.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable


class Turns:
    """Formed steps of each attempt that wait for earlier ones.

    Args:
        most: steps of an attempt that may wait; beyond, the lowest go on all the same.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[int, list[int]] = {}

    def formed(self, attempt_id: int, step: int, owed: Iterable[int]) -> list[int]:
        """Take in a step whose whole was formed; return the steps whose turn it is, in order.

        Args:
            attempt_id: whose step.
            step: that was formed.
            owed: steps of the attempt that are still to be formed; each ends in a call of this.
        """
        waiting = self._waiting.setdefault(attempt_id, [])
        at = bisect.bisect_left(waiting, step)
        if waiting[at : at + 1] != [step]:
            waiting.insert(at, step)
        first = min(owed, default=None)
        count = len(waiting) if first is None else bisect.bisect_right(waiting, first)
        count = max(count, len(waiting) - self._most)
        due, left = waiting[:count], waiting[count:]
        if left:
            self._waiting[attempt_id] = left
        else:
            del self._waiting[attempt_id]
        return due
