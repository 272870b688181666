"""Tracks the stages of a process's training threads, for stack requests and the watchdog."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from stagescope.wire.schema import FINISH, STACKS, Work
from stagescope_workers.probe.watchdog import Watchdog, collect_stacks, open_watchdog
from stagescope_workers.transport.outbox import Outbox

_MAX_OPEN: Final = 1024
_MAX_ANSWERED: Final = 256


class StageTracker:
    """Knows which thread is in which stage; answers requests for stacks, feeds the watchdog.

    The training thread calls `enter` and `leave`, which cost one entry of a dict; the background
    thread calls the other methods.
    """

    def __init__(self, outbox: Outbox, *, watchdog_seconds: float) -> None:
        self._outbox = outbox
        self._seconds = watchdog_seconds
        self._open_stages: dict[int, tuple[int, Work]] = {}
        self._last_ended: tuple[int, Work] | None = None
        self._answered: dict[str, None] = {}
        self._watchdog: Watchdog | None = None
        self._closed = False

    def enter(self, seq: int, work: Work) -> None:
        """Note that this thread has begun a stage; `seq` is that of its BEGIN."""
        self._open_stages[seq] = (threading.get_ident(), work)

    def leave(self, seq: int | None) -> None:
        """Note that a stage has ended."""
        if seq is not None:
            self._last_ended = self._open_stages.pop(seq, self._last_ended)

    @property
    def oldest(self) -> Work | None:
        """The open stage that was begun first; None where none is open."""
        return next((work for _, work in [*self._open_stages.values()]), None)

    def current_work(self) -> tuple[Sequence[int], Mapping[str, object]]:
        """Return the idents of the training threads, and the work that was begun last.

        Between two stages, the thread of the last one is the training thread.
        """
        open_stages = [*self._open_stages.items()]
        for seq, _ in open_stages[:-_MAX_OPEN]:  # begun and never ended
            self._open_stages.pop(seq, None)
        if open_stages:
            idents = dict.fromkeys(ident for _, (ident, _) in reversed(open_stages))
            return [*idents], open_stages[-1][1][1].fields()
        last = self._last_ended
        return ([], {}) if last is None else ([last[0]], {"step": last[1].step})

    def answer_requests(self, requests: Iterable[Mapping[str, object]]) -> None:
        """Carry out the requests in the answer to a poll, each of them once."""
        for request in requests:
            request_id = request.get("request_id")
            if request.get("what") not in {STACKS, FINISH} or not isinstance(request_id, str):
                continue
            if request_id in self._answered:
                continue
            self._answered[request_id] = None
            if len(self._answered) > _MAX_ANSWERED:
                del self._answered[next(iter(self._answered))]
            if request["what"] == FINISH:  # after all waiting events; a later event revokes it
                self._outbox.put(FINISH, {})
                continue
            training, work = self.current_work()
            self._outbox.put(STACKS, collect_stacks(request_id, training=training, work=work))

    def start_watchdog(self) -> str | None:
        """Open this process's watchdog; return the path of its file, None where it is off."""
        if self._watchdog is None and not self._closed:
            self._watchdog = open_watchdog(self._seconds)
        return None if self._watchdog is None else self._watchdog.path

    def feed_watchdog(self) -> float:
        """Tell the watchdog that the background thread runs; report stacks that it wrote.

        Returns the seconds after which to call this again.
        """
        watchdog = self._watchdog
        if watchdog is None:
            return math.inf
        stacks = watchdog.feed(self.current_work)
        if stacks is not None:
            self._outbox.put(STACKS, stacks)
        return watchdog.interval

    def close(self) -> None:
        """Release the watchdog."""
        self._closed = True
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.close()
