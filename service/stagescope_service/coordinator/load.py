"""The coordinator's load: a bound on uncommitted events, the lag of events, pauses for senders.

The number of accepted, uncommitted events is bounded. Beyond the bound a batch is pushed back: its
sender keeps it, sends it again after a pause, and logs that. While events arrive late, every answer
requests a pause, so ranks send the same events in fewer calls. A call costs the coordinator
many times as much as an event in it.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import resource
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any, Final

from stagescope_service.coordinator.answers import LoadStatus
from stagescope_service.core.findings import finding, of_attempt
from stagescope_service.core.instructions import Instruction, Put
from stagescope_service.core.state import State
from stagescope_service.store.tables import FindingRow
from stagescope_wire.errors import NotReady

KIND: Final = "service_behind"
MAX_EVENTS: Final = 50_000
"""Accepted events that are not committed yet; about 2 KiB each."""
SLOTS: Final = 64
"""Batches that are handled at a time: polls, queries and commands wait at most for these, and not
for every batch that arrived before."""
BEHIND_SECONDS: Final = 5.0
"""Events that arrive later than this on average are late."""
WINDOW_SECONDS: Final = 5.0
WINDOWS: Final = 3
"""Windows in a row that make a finding: ranks that come back after an outage are no load."""
MIN_CALLS: Final = 100
"""With fewer calls, a window describes the ranks and not the service."""
CALLS_PER_SECOND: Final = 250.0
"""The rate that is requested of all ranks together while the service is behind."""
RELAY_CALLS_PER_SECOND: Final = 250.0
"""The rate of the calls of all relays together."""
MAX_GATHER_SECONDS: Final = 0.5
TRIM_SECONDS: Final = 30.0
GROWN_BYTES: Final = 16 << 20
MAX_PAUSE: Final = 40.0


class Load:
    """Uncommitted events and their lag; used from the coordinator's loop only.

    Args:
        state: counts the live ranks.
        most_events: the bound on uncommitted events.
        relay_ranks: from this number of live ranks on, ranks must call through relays.
    """

    def __init__(
        self, state: State, *, most_events: int = MAX_EVENTS, relay_ranks: int = 512
    ) -> None:
        self._state = state
        self._most = most_events
        self.slots: Final = asyncio.Semaphore(SLOTS)
        """An admitted batch is handled in one of them."""
        self._waiting = 0
        self._pushed_back = 0
        self._window_began = -math.inf
        self._calls = 0
        self._ages = 0.0
        self._late_windows = 0
        self._late_until = -math.inf
        self._relay_ranks = relay_ranks
        self._live_ranks = 0
        self._nodes: set[str] = set()
        self._lag: float | None = None
        self._open: dict[int, str] = {}

    @property
    def pause(self) -> float:
        """Seconds for a rank to wait before its next batch; 0 while the service keeps up."""
        if not self._late_windows and self._waiting < self._most / 2:
            return 0.0
        return min(max(self._live_ranks / CALLS_PER_SECOND, 0.5), MAX_PAUSE)

    @property
    def relays(self) -> bool:
        """Whether ranks must call through the relay of their node."""
        return self._live_ranks >= self._relay_ranks

    @property
    def relay_nodes(self) -> Set[str]:
        """The nodes that must have a relay."""
        return self._nodes if self.relays else frozenset()

    @property
    def gather_seconds(self) -> float:
        """Seconds for which a relay must collect calls."""
        return min(len(self._nodes) / RELAY_CALLS_PER_SECOND, MAX_GATHER_SECONDS)

    def is_late(self, now: float) -> bool:
        """Return whether events arrive late, or did until a pause ago: recent ones are unknown.

        Args:
            now: the service's monotonic clock, seconds.
        """
        return now < self._late_until

    def status(self) -> LoadStatus:
        """Return the number of uncommitted events, and the lag."""
        return {
            "waiting_events": self._waiting,
            "pushed_back": self._pushed_back,
            "lag_seconds": self._lag,
            "pause_seconds": self.pause,
        }

    def admit(self, events: int) -> None:
        """Count events of a batch as waiting, until `committed`.

        Raises:
            NotReady: there are too many already; nothing was accepted.
        """
        if self._waiting and self._waiting + events > self._most:
            self._pushed_back += 1
            raise NotReady(
                f"the service is behind: {self._waiting} events wait to be written",
                advice="nothing was taken in; the sender keeps it and sends it again",
            )
        self._waiting += events

    def committed(self, events: int) -> None:
        """Count admitted events as waiting no more, also if they were not committed."""
        self._waiting -= events

    def arrived(self, age: float) -> None:
        """Record the age of the newest event of a batch, in seconds."""
        self._calls += 1
        self._ages += max(age, 0.0)

    def adopt(self, findings: Iterable[FindingRow]) -> None:
        """Adopt the open findings of an earlier coordinator."""
        for row in findings:
            attempt_id = row["attempt_id"]
            if row["kind"] == KIND and row["over_wall"] is None and attempt_id is not None:
                self._open[attempt_id] = row["finding_id"]

    def check(self, now: float, wall: float) -> list[Instruction]:
        """Return the findings to write; called often.

        Args:
            now: the service's monotonic clock, seconds.
            wall: its Unix time.
        """
        if now < self._window_began + WINDOW_SECONDS:
            return []
        seconds, self._window_began = now - self._window_began, now
        calls, ages = self._calls, self._ages
        self._calls, self._ages = 0, 0.0
        self._lag = ages / calls if calls else None
        # Not for every batch: with many ranks that would be the largest cost.
        live = [each for each in self._state.registry.processes.values() if each.live]
        self._live_ranks = len(live)
        self._nodes = {each.node_id for each in live if each.node_id is not None}
        is_late = calls >= MIN_CALLS and ages > BEHIND_SECONDS * calls
        self._late_windows = self._late_windows + 1 if is_late else 0
        if is_late:
            self._late_until = now + WINDOW_SECONDS + MAX_PAUSE
        if is_late and self._late_windows >= WINDOWS:
            return self._behind(calls / seconds, ages / calls, wall)
        return [] if is_late else self._over(wall)

    def _behind(self, rate: float, lag: float, wall: float) -> list[Instruction]:
        out: list[Instruction] = []
        for attempt in self._state.registry.attempts.values():
            ranks = sum(process.live for process in attempt.processes.values())
            if attempt.over or not ranks:
                continue
            put = finding(
                KIND,
                f"the service is {lag:.0f} s behind: {rate:.0f} calls/s of {ranks} ranks",
                **of_attempt(attempt, wall),
                evidence={
                    "lag_seconds": lag,
                    "calls_per_second": rate,
                    "ranks": ranks,
                    "waiting_events": self._waiting,
                    "pushed_back": self._pushed_back,
                },
                advice="no data is lost. Ranks keep what they have and send it in fewer calls, "
                "so the newest steps appear late. Give the head node more CPU",
            )
            self._open[attempt.attempt_id] = put.row["finding_id"]
            out.append(Put("findings", {**put.row, "over_wall": None}))
        return out

    def _over(self, wall: float) -> list[Instruction]:
        out: list[Instruction] = [
            Put("findings", {"finding_id": finding_id, "over_wall": wall})
            for finding_id in self._open.values()
        ]
        self._open.clear()
        return out


def resident_bytes() -> int | None:
    """Return this process's resident bytes; None if the system does not report them."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * resource.getpagesize()


class Memory:
    """Returns freed memory to the system.

    A pending call holds some 80 KiB of stack in Ray, and the allocator keeps freed memory. After
    4 000 calls 434 MB were resident; one trim reduced them to 162 MB in 15 ms.
    """

    def __init__(self) -> None:
        self._trimmed = -math.inf
        self._after = 0
        self._trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def check(self, now: float) -> None:
        """Trim if this process has grown since the last trim; called often.

        Args:
            now: a monotonic clock, seconds.
        """
        if now < self._trimmed + TRIM_SECONDS or self._trim is None:
            return
        resident = resident_bytes()
        if resident is None or resident < self._after + GROWN_BYTES:
            return
        self._trim(0)
        self._trimmed, self._after = now, resident_bytes() or resident
