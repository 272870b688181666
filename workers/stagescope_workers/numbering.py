"""Which piece of which step a stage is: what is not said is numbered in order of entry."""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping
from typing import Any, Final

from stagescope.errors import InvalidInput
from stagescope.schema import PART_FIELDS, Part, Work
from stagescope_workers.options import index, step_index

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
