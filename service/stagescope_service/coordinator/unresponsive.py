"""Processes that do not answer any more: what their watchdogs wrote is read on their nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from stagescope_service.core.entities import Attempt, Process
from stagescope_service.core.instructions import ReadWatchdogs
from stagescope_service.core.state import State

READ_SECONDS: Final = 90.0
"""For so long a silent process's file is looked at: its watchdog goes off some time after."""


class UnresponsiveProcesses:
    """Knows whose watchdog's file is to be read.

    Args:
        state: of the coordinator.
        late_seconds: a process that polls is late after so long without a word.
        min_seconds: seconds below which no process counts as silent.
    """

    def __init__(self, state: State, *, late_seconds: float, min_seconds: float = 0.0) -> None:
        self._state = state
        self._late_seconds = late_seconds
        self.seconds = max(late_seconds, min_seconds)
        """A process counts as silent after so long."""
        self._until: dict[str, float] = {}

    def unanswered(self, incarnations: Iterable[str], now: float) -> None:
        """Note that processes did not answer a request in time."""
        for incarnation in incarnations:
            self._until.setdefault(incarnation, now + READ_SECONDS)

    def read(self, incarnation: str) -> None:
        """Note that its file said what there is; it is not read again in this silence."""
        if incarnation in self._until:
            self._until[incarnation] = 0.0

    def of(self, attempt: Attempt, now: float, before: Collection[str] = ()) -> list[Process]:
        """Return the processes of an attempt that worked in it and do not answer, by role and rank.

        Those that took leave or were replaced are awaited by nobody; raw callers never poll.
        `before` are the incarnations that were silent before a restart and unheard since.
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

    def look(self, now: float) -> list[ReadWatchdogs]:
        """Return whose files are to be read now; `now` is the service's monotonic clock."""
        processes = self._state.registry.processes
        late = {
            process.incarnation for process in processes.values() if self._is_late(process, now)
        }
        self.unanswered(late, now)
        by_node: dict[str | None, dict[str, str]] = {}
        for incarnation, until in [*self._until.items()]:
            process = processes.get(incarnation)
            if process is not None and process.watchdog is not None and now < until:
                by_node.setdefault(process.node_id, {})[incarnation] = process.watchdog
            elif incarnation not in late:
                del self._until[incarnation]
        return [ReadWatchdogs(node, paths) for node, paths in by_node.items()]

    def _is_late(self, process: Process, now: float) -> bool:
        if process.watchdog is None or process.finished:
            return False
        return self._quiet_for(process, now) > self._late_seconds

    def _quiet_for(self, process: Process, now: float) -> float:
        return now - (process.lease_until - self._state.lease_seconds)
