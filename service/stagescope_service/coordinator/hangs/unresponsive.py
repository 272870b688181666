"""Unresponsive processes, whose watchdog files are read on their nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Final

from stagescope_service.core.entities import Attempt, Process
from stagescope_service.core.instructions import ReadWatchdogs
from stagescope_service.core.state import State

READ_SECONDS: Final = 3600.0
"""Seconds during which a late process's file is read: its watchdog writes it after minutes."""
_UNANSWERED_SECONDS: Final = 90.0
"""The same for a process that polls and did not answer a request."""
_SPARSER: Final = 0.1
"""A file that was read in vain is read again after this share of the time since then."""


@dataclasses.dataclass
class _Reading:
    """The reading of one process's file."""

    since: float
    due: float
    is_read: bool = False


class UnresponsiveProcesses:
    """Decides which watchdog files to read.

    Args:
        state: the coordinator's state.
        late_seconds: without contact for longer, a process that polls is late.
        min_seconds: seconds below which no process counts as unresponsive.
    """

    def __init__(self, state: State, *, late_seconds: float, min_seconds: float = 0.0) -> None:
        self._state = state
        self._late_seconds = late_seconds
        self.seconds = max(late_seconds, min_seconds)
        """Seconds after which a process counts as unresponsive."""
        self._readings: dict[str, _Reading] = {}

    def unanswered(self, incarnations: Iterable[str], now: float) -> None:
        """Record that processes did not answer a request in time."""
        for incarnation in incarnations:
            self._readings.setdefault(incarnation, _Reading(now, now))

    def read(self, incarnation: str) -> None:
        """Record that its file was read; it is not read again until the next contact."""
        if incarnation in self._readings:
            self._readings[incarnation].is_read = True

    def unresponsive(
        self, attempt: Attempt, now: float, before: Collection[str] = ()
    ) -> list[Process]:
        """Return the unresponsive processes that worked in an attempt, by role and rank.

        Finished and replaced processes are left out; raw callers never poll. `before`: incarnations
        that were unresponsive before a restart and had no contact since.
        """
        silent = [
            process
            for process in attempt.processes.values()
            if process.max_step is not None
            if not (process.raw or process.finished or process.replaced)
            if process.lapsed
            or process.incarnation in before
            or self._quiet_for(process, now) > self.seconds
        ]
        return sorted(silent, key=lambda process: (process.role, process.rank))

    def check(self, now: float) -> list[ReadWatchdogs]:
        """Return the processes whose files to read now; `now` is the service's monotonic clock."""
        processes = self._state.registry.processes
        late = {
            process.incarnation for process in processes.values() if self._is_late(process, now)
        }
        self.unanswered(late, now)
        by_node: dict[str | None, dict[str, str]] = {}
        for incarnation, reading in [*self._readings.items()]:
            process, waited = processes.get(incarnation), now - reading.since
            limit = READ_SECONDS if incarnation in late else _UNANSWERED_SECONDS
            watchdog = None if process is None else process.watchdog
            if process is None or watchdog is None or reading.is_read or waited >= limit:
                if incarnation not in late:
                    del self._readings[incarnation]
            elif now >= reading.due:
                reading.due = now + _SPARSER * waited
                by_node.setdefault(process.node_id, {})[incarnation] = watchdog
        return [ReadWatchdogs(node, paths) for node, paths in by_node.items()]

    def _is_late(self, process: Process, now: float) -> bool:
        if process.watchdog is None or process.finished:
            return False
        return self._quiet_for(process, now) > self._late_seconds

    def _quiet_for(self, process: Process, now: float) -> float:
        return now - (process.lease_until - self._state.lease_seconds)
