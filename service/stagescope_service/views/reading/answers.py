"""Answers about a whole run, kept while nothing changes that they are made from."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from stagescope_wire.names import BISECT, EXPERIMENT

if TYPE_CHECKING:
    from stagescope_service.views.reading.dependencies import Dependencies

Key = tuple[str, ...]
MAX_AGE: Final = 60.0
"""Seconds for which an answer holds, since late scalars and samples change no step."""
_BYTES: Final = 32 << 20


class Answers:
    """The answers that were asked for last; thread-safe. One that several ask for is made once."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, bytes] = OrderedDict()
        self._making: dict[Key, threading.Lock] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def of(self, key: Key, make: Callable[[], bytes]) -> bytes:
        """Return the answer of a key; `make` makes it where it is not kept."""
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        try:
            with making:
                with self._lock:
                    if key in self._kept:
                        self._kept.move_to_end(key)
                        return self._kept[key]
                answer = make()
                with self._lock:
                    self._keep(key, answer)
                return answer
        finally:
            with self._lock:
                self._making.pop(key, None)

    def _keep(self, key: Key, answer: bytes) -> None:
        self._kept[key] = answer
        self._bytes += len(answer)
        while self._bytes > _BYTES:
            _, old = self._kept.popitem(last=False)
            self._bytes -= len(old)


def change_key(deps: Dependencies, name: str, run: str, asked: object) -> Key:
    """Return a key that changes whenever an answer about a run may.

    Args:
        deps: the catalogue's holder.
        name: of the kind of answer.
        run: the run.
        asked: what else selects the answer; its `repr` counts.

    Raises:
        NotFound: no such run.
    """
    target = deps.finder.attempt(run)
    attempts = deps.catalogue.attempts(target.run)
    mark = deps.catalogue.change_mark([row["attempt_id"] for row in attempts])
    states = [(row["number"], row["ended_wall"], row["resumed_from_step"]) for row in attempts]
    bisected = len(deps.catalogue.settings_of_runs(f"{EXPERIMENT}{target.run}-", BISECT))
    period = int(deps.clock() / MAX_AGE)
    known = repr((target.display_name, asked, period, states, bisected))
    return (name, target.run, known, mark)
