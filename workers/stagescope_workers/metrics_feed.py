"""Brings a step's published numbers back into the training process, for the trainer's own log.

It has its own thread beside the EventSender's, because a request for metrics must never delay an
event. Looking up a name in Ray may take seconds while the cluster's head is away.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from stagescope_wire.errors import NotFound
from stagescope_wire.nonfinite import JsonObject
from stagescope_workers.probe.options import index
from stagescope_workers.probe.probe import Probe
from stagescope_workers.transport.calls import Backoff, ServiceLink

_log = logging.getLogger("stagescope.workers")

KEPT_STEPS: Final = 16
"""The number of newest steps that are requested and kept; older ones are dropped."""
_MAX_BACKOFF: Final = 5.0
_NOTHING: Final[Mapping[str, float]] = MappingProxyType({})
_NONFINITE: Final = frozenset({"nan", "inf", "-inf"})
_STILL_COMING: Final = frozenset({"open", "not begun"})


@dataclasses.dataclass(slots=True, eq=False)
class _Request:
    rows: int  # samples of a complete answer
    is_unmeasured: bool = False  # the service received all of this process, and has no numbers


class MetricsFeed:
    """Fetches the service's numbers of a run's steps in the background.

    Only `wait` waits, and no method raises. A number in a trainer's log is never corrected. So an
    answer is used only when it covers everything that was announced for the step, and all rows that
    `request` named. After `close`, in a forked child and without a service there are no numbers.

    Usage:
        >>> feed = MetricsFeed(probe)
        >>> feed.prepare()  # before the first step, where there is time
        >>> feed.request(step)  # where the step's tensors were recorded
        >>> logged.update(feed.get(step))  # where the trainer logs the step
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._requests: dict[int, _Request] = {}  # by step, the newest last
        self._arrived: collections.OrderedDict[int, Mapping[str, float]] = collections.OrderedDict()
        # In bypass mode a tenth of a second is left between the last rows and the log of the step.
        self._backoff = Backoff(first=0.02, maximum=_MAX_BACKOFF)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._is_cold = False
        self._warned: set[type[Exception]] = set()

    def prepare(self) -> None:
        """Begin to connect to the API: a process's first call takes some tenths of a second."""
        if not self._is_usable:
            return
        with self._probe.guard("metrics feed", None, quiet=True), self._condition:
            self._is_cold = True
            self._start()

    def request(self, step: int, rows: int | None = None) -> None:
        """Begin to request a step's numbers; call it again after more of the step was recorded.

        Args:
            step: The step.
            rows: Number of samples of a complete answer, where other processes record some too. The
                service cannot see samples that were not announced yet. None: this process
                recorded all of them.
        """
        if not self._is_usable:
            return
        with self._probe.guard("metrics feed", None, quiet=True):
            number = index("step", step)
            if number is not None:
                self._add_request(number, 0 if rows is None else index("rows", rows) or 0)

    @property
    def _is_usable(self) -> bool:
        return not self._closed and os.getpid() == self._pid

    def _add_request(self, step: int, rows: int) -> None:
        with self._condition:
            self._requests.pop(step, None)
            self._requests[step] = _Request(rows)
            self._arrived.pop(step, None)
            while len(self._requests) > KEPT_STEPS:
                del self._requests[next(iter(self._requests))]
            self._backoff.succeed()
            self._start()

    def _start(self) -> None:
        """Start the thread, or wake it; the caller holds the condition."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="stagescope-feed", daemon=True)
            thread.start()
            self._thread = thread
        self._condition.notify_all()

    def get(self, step: int) -> Mapping[str, float]:
        """Return the numbers of exactly this step by published name; empty if there are none."""
        if os.getpid() != self._pid:
            return _NOTHING
        try:
            return self._arrived.get(step, _NOTHING)
        except TypeError:  # not even hashable
            return _NOTHING

    def wait(self, timeout: float) -> None:
        """Wait until every requested step has arrived: for the end of a training alone.

        It does not wait for a step that cannot be measured, nor where no service is connected.
        """
        if os.getpid() != self._pid:
            return
        with self._condition:
            self._condition.wait_for(
                lambda: (
                    all(request.is_unmeasured for request in self._requests.values())
                    or self._is_over
                    or self._probe.service is None
                ),
                timeout,
            )

    def close(self) -> None:
        """Stop the requests; does not wait."""
        if os.getpid() == self._pid:
            self._closed = True
            self._wake()

    # --- the background thread ------------------------------------------------------------

    def _run(self) -> None:
        while self._wait_for_request():
            try:
                self._send_requests()
            except Exception as error:
                self._log_failure(error)
            with self._condition:
                self._backoff.fail()

    def _wait_for_request(self) -> bool:
        """Wait until a request is due; return False once the feed is closed."""
        with self._condition:
            while not self._is_over:
                now = time.monotonic()
                has_work = bool(self._requests) or self._is_cold
                if has_work and now >= self._backoff.until:
                    return True
                self._condition.wait(self._backoff.until - now if has_work else None)
        return False

    @property
    def _is_over(self) -> bool:
        return self._closed or self._probe.is_inert

    def _send_requests(self) -> None:
        """Request each step once, the newest first."""
        if self._is_cold:
            self._connect()
        with self._condition:
            requests = list(reversed(self._requests.items()))
        for step, request in requests:
            link = self._probe.service
            if link is None or self._is_over:
                return
            if self._probe.outbox.awaits_receipt(step):
                continue  # the service's numbers cannot include it yet
            try:
                answer = self._fetch(link, step)
            except NotFound:
                # Another process may still hand over the other stream: it is requested again.
                request.is_unmeasured = True
                self._wake()
                continue
            if answer is not None and _covers_all(answer, request.rows):
                self._keep(step, request, _numbers(answer["metrics"]))

    def _connect(self) -> None:
        link = self._probe.service
        if link is not None:
            self._is_cold = False
            with contextlib.suppress(Exception):  # the first request meets it again
                self._fetch(link, 0)

    def _fetch(self, link: ServiceLink, step: int) -> JsonObject | None:
        """Return the service's answer; None where the feed was closed meanwhile."""
        probe = self._probe
        future = link.metrics(probe.run, probe.attempt_key, step)
        future.add_done_callback(lambda _: self._wake())
        with self._condition:
            self._condition.wait_for(lambda: future.done() or self._closed)
        return future.result() if future.done() else None

    def _keep(self, step: int, request: _Request, numbers: Mapping[str, float]) -> None:
        with self._condition:
            if self._requests.get(step) is not request:
                return  # more of the step was recorded since
            del self._requests[step]
            self._arrived[step] = numbers
            while len(self._arrived) > KEPT_STEPS:
                self._arrived.popitem(last=False)
            self._condition.notify_all()

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def _log_failure(self, error: Exception) -> None:
        level = logging.DEBUG if type(error) in self._warned else logging.WARNING
        self._warned.add(type(error))
        _log.log(level, "asking for metrics failed, and is tried again: %r", error)


def _covers_all(answer: JsonObject, rows: int) -> bool:
    """Return whether these numbers will not change any more.

    A closed step has all its announcements: each rank's arrive in order, and every rank began a
    later step.
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


def _numbers(metrics: Mapping[str, float | str | None]) -> Mapping[str, float]:
    """Return the numbers of an answer, in which non-finite numbers are strings."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, str) and value in _NONFINITE:
            found[name] = float(value)
        elif isinstance(value, int | float):
            found[name] = value
    return MappingProxyType(found)
