"""Where the training threads of a process stand, and what the service may ask of that."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from stagescope.wire.schema import FINISH, STACKS, Work
from stagescope_workers.probe.watchdog import Watchdog, open_watchdog, take_stacks
from stagescope_workers.transport.outbox import Outbox

_MOST_INSIDE: Final = 1024
_MOST_ANSWERED: Final = 256


class StageTracker:
    """Knows which thread is in which stage; answers requests for stacks, feeds the watchdog.

    `enter` and `leave` are the training thread's, and cost it one entry of a dict; the rest is the
    background thread's.
    """

    def __init__(self, outbox: Outbox, *, watchdog_seconds: float) -> None:
        self._outbox = outbox
        self._seconds = watchdog_seconds
        self._inside: dict[int, tuple[int, Work]] = {}
        self._left: tuple[int, Work] | None = None
        self._answered: dict[str, None] = {}
        self._watchdog: Watchdog | None = None
        self._closed = False

    def enter(self, seq: int, work: Work) -> None:
        """Note that this thread is in a stage; `seq` is its BEGIN's."""
        self._inside[seq] = (threading.get_ident(), work)

    def leave(self, seq: int | None) -> None:
        """Note that a stage has ended."""
        if seq is not None:
            self._left = self._inside.pop(seq, self._left)

    @property
    def oldest(self) -> Work | None:
        """The stage that was begun first of those that a thread is in; None outside of any."""
        return next((work for _, work in [*self._inside.values()]), None)

    def where(self) -> tuple[Sequence[int], Mapping[str, Any]]:
        """Return the idents of the training threads, and the work that was entered last.

        Between two stages, the thread that was in one last is the training thread.
        """
        inside = [*self._inside.items()]
        for seq, _ in inside[:-_MOST_INSIDE]:  # begun and never ended
            self._inside.pop(seq, None)
        if inside:
            idents = dict.fromkeys(ident for _, (ident, _) in reversed(inside))
            return [*idents], inside[-1][1][1].fields()
        left = self._left
        return ([], {}) if left is None else ([left[0]], {"step": left[1].step})

    def answer(self, requests: Iterable[Mapping[str, Any]]) -> None:
        """Carry out what the service asks for in a poll's answer, each request once."""
        for request in requests:
            name = request.get("request_id")
            if request.get("what") not in {STACKS, FINISH} or not isinstance(name, str):
                continue
            if name in self._answered:
                continue
            self._answered[name] = None
            if len(self._answered) > _MOST_ANSWERED:
                del self._answered[next(iter(self._answered))]
            if request["what"] == FINISH:  # after all that waits; what comes later takes it back
                self._outbox.put(FINISH, {})
                continue
            training, work = self.where()
            self._outbox.put(STACKS, take_stacks(name, training=training, work=work))

    def watch(self) -> str | None:
        """Open this process's watchdog; return the path of its file, None where it is off."""
        if self._watchdog is None and not self._closed:
            self._watchdog = open_watchdog(self._seconds)
        return None if self._watchdog is None else self._watchdog.path

    def feed(self) -> float:
        """Say to the watchdog that the background thread runs; report where it went off.

        Returns the seconds after which to say it again.
        """
        found = self._watchdog
        if found is None:
            return math.inf
        went_off = found.feed(self.where)
        if went_off is not None:
            self._outbox.put(STACKS, went_off)
        return found.pause

    def close(self) -> None:
        """Take leave of the watchdog."""
        self._closed = True
        found, self._watchdog = self._watchdog, None
        if found is not None:
            found.close()
