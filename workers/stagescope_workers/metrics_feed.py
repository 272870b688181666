"""Brings a step's published numbers back into the training process, for the trainer's own log.

A thread of its own, not the courier's: looking up a name in Ray may take seconds while the
cluster's head is away, and a question must never delay an event.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from stagescope.wire.errors import NotFound
from stagescope_workers.probe.options import index
from stagescope_workers.probe.probe import Probe
from stagescope_workers.transport.calls import Backoff
from stagescope_workers.transport.link import Link

_log = logging.getLogger("stagescope.workers")

KEPT_STEPS: Final = 16
"""The newest steps that are asked for and kept; older ones are forgotten."""
_MOST_BACKOFF: Final = 5.0
_NOTHING: Final[Mapping[str, float]] = MappingProxyType({})
_NONFINITE: Final = frozenset({"nan", "inf", "-inf"})
_STILL_COMING: Final = frozenset({"open", "not begun"})


class _Wish(NamedTuple):
    """What `want` was told: which call of it this was, and how many samples a whole has."""

    call: int
    rows: int


class MetricsFeed:
    """The service's numbers of a run's steps, fetched in the background.

    No method waits, and none raises. An answer counts only when nothing that was announced of the
    step is still on its way, and all rows that were named are in it: a number in a trainer's log
    is never corrected. After `close`, in a forked child and where no service runs, there is
    nothing.

    Usage:
        >>> feed = MetricsFeed(probe)
        >>> feed.want(step)  # where the step's tensors were recorded
        >>> logged.update(feed.take(step))  # where the trainer logs the step
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._wanted: dict[int, _Wish] = {}  # by step, the newest last
        self._calls = 0
        self._arrived: collections.OrderedDict[int, Mapping[str, float]] = collections.OrderedDict()
        self._backoff = Backoff(most=_MOST_BACKOFF)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._warned: set[type[Exception]] = set()

    def want(self, step: int, rows: int | None = None) -> None:
        """Begin to ask for a step's numbers; again, after more of it was recorded, asks anew.

        Args:
            step: The step.
            rows: How many samples a whole answer holds, where other processes record them: what
                they have not announced yet, the service cannot miss. None: all was recorded here.
        """
        if self._closed or os.getpid() != self._pid:
            return
        with self._probe.guard("metrics feed", None, quiet=True):
            number = index("step", step)
            if number is not None:
                self._want(number, 0 if rows is None else index("rows", rows) or 0)

    def _want(self, step: int, rows: int) -> None:
        with self._condition:
            self._calls += 1
            self._wanted.pop(step, None)
            self._wanted[step] = _Wish(self._calls, rows)
            self._arrived.pop(step, None)
            while len(self._wanted) > KEPT_STEPS:
                del self._wanted[next(iter(self._wanted))]
            self._backoff.succeed()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="stagescope-feed", daemon=True)
                thread.start()
                self._thread = thread
            self._condition.notify_all()

    def take(self, step: int) -> Mapping[str, float]:
        """Return what has arrived for exactly this step, by published name; empty if nothing."""
        if os.getpid() != self._pid:
            return _NOTHING
        try:
            return self._arrived.get(step, _NOTHING)
        except TypeError:  # not even hashable
            return _NOTHING

    def close(self) -> None:
        """Ask no more; waits for nothing."""
        if os.getpid() == self._pid:
            self._closed = True
            self._wake()

    # --- the background thread ------------------------------------------------------------

    def _run(self) -> None:
        while self._has_turn():
            try:
                self._ask_all()
            except Exception as error:
                self._note(error)
            with self._condition:
                self._backoff.fail()

    def _has_turn(self) -> bool:
        """Wait until it is time to ask for something; False where there will be nothing more."""
        with self._condition:
            while not self._is_over:
                now = time.monotonic()
                if self._wanted and now >= self._backoff.until:
                    return True
                self._condition.wait(self._backoff.until - now if self._wanted else None)
        return False

    @property
    def _is_over(self) -> bool:
        return self._closed or self._probe.is_inert

    def _ask_all(self) -> None:
        """Ask once for each step that is wanted, the newest first."""
        with self._condition:
            wanted = list(reversed(self._wanted.items()))
        for step, wish in wanted:
            link = self._probe.service
            if link is None or self._is_over:
                return
            if self._probe.outbox.awaits_receipt(step):
                continue  # what the service has not taken in cannot be in its numbers
            try:
                answer = self._ask(link, step)
            except NotFound:
                continue
            if answer is not None and _covers_all(answer, wish.rows):
                self._keep(step, wish, _numbers(answer["metrics"]))

    def _ask(self, link: Link, step: int) -> dict[str, Any] | None:
        """Return the service's answer; None where the feed was closed meanwhile."""
        probe = self._probe
        future = link.metrics(probe.run, probe.attempt_key, step)
        future.add_done_callback(lambda _: self._wake())
        with self._condition:
            self._condition.wait_for(lambda: future.done() or self._closed)
        return future.result() if future.done() else None

    def _keep(self, step: int, wish: _Wish, numbers: Mapping[str, float]) -> None:
        with self._condition:
            if self._wanted.get(step) != wish:
                return  # more of the step was recorded since
            del self._wanted[step]
            self._arrived[step] = numbers
            while len(self._arrived) > KEPT_STEPS:
                self._arrived.popitem(last=False)

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def _note(self, error: Exception) -> None:
        level = logging.DEBUG if type(error) in self._warned else logging.WARNING
        self._warned.add(type(error))
        _log.log(level, "asking for metrics failed, and is tried again: %r", error)


def _covers_all(answer: Mapping[str, Any], rows: int) -> bool:
    """Say whether nothing of the step is still on its way into these numbers.

    A step that is closed has all its announcements: each rank's come in order, and every rank
    began a later step.
    """
    coverage = answer["coverage"]
    if coverage["payloads_pending"]:
        return False
    if answer["complete"] != "open":
        return True
    if rows and coverage["sequences"] + coverage["empty_rows"] < rows:
        return False
    return not any(
        row["stage"] == answer["stage"] and row["status"] in _STILL_COMING
        for row in answer["missing"]
    )


def _numbers(metrics: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the numbers of an answer, in which those that are not finite are spelled."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, str) and value in _NONFINITE:
            found[name] = float(value)
        elif isinstance(value, int | float):
            found[name] = value
    return MappingProxyType(found)
