"""Commits of rows to the catalogue, and calls that wait for them."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from stagescope.wire.errors import NotReady
from stagescope_service.core.instructions import PayloadKey
from stagescope_service.core.state import State
from stagescope_service.store.contract import Store, Write


class Commits:
    """Commits rows and wakes the calls that wait for them; used from one event loop."""

    def __init__(self, state: State, store: Store) -> None:
        self.state = state
        self.store = store
        self.uncommitted: Counter[PayloadKey] = Counter()
        """Payloads settled in memory and not yet on disk: a sender that heard of it would let the
        payload go."""
        self._waiting: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)

    def check_ready(self) -> None:
        """Raise `NotReady` while the catalogue cannot be written."""
        health = self.store.health()
        if not health.healthy:
            raise NotReady(
                f"the catalogue cannot be written: {health.reason}",
                advice="nothing was taken in; the same call may be made again",
            )

    async def commit(self, rows: Sequence[Write], settled: Sequence[PayloadKey] = ()) -> None:
        """Write rows, among them the ends of the `settled` payloads; return after the commit."""
        if not rows:
            return
        self.uncommitted.update(settled)
        try:
            await asyncio.wrap_future(self.store.submit(rows))
        finally:
            self.uncommitted.subtract(settled)
            for key in settled:
                if self.uncommitted[key] <= 0:
                    del self.uncommitted[key]

    def receipts(self, incarnation: str, seqs: Iterable[int]) -> dict[int, str]:
        """Return seq -> state of those payloads whose end is on disk."""
        process = self.state.registry.processes.get(incarnation)
        if process is None:
            return {}
        return {
            seq: process.settled[seq]
            for seq in seqs
            if seq in process.settled and PayloadKey(incarnation, seq) not in self.uncommitted
        }

    # --- waiting ----------------------------------------------------------------------------
    async def wait(self, name: str, seconds: float) -> None:
        """Wait until `name` (an incarnation, or a capture) is notified, at most `seconds`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[name].add(future)
        try:
            await asyncio.wait({future}, timeout=seconds)
        finally:
            waiting = self._waiting[name]
            waiting.discard(future)
            if not waiting:
                del self._waiting[name]

    def notify(self, names: Iterable[str]) -> None:
        """Wake the calls that wait for one of these names."""
        for name in names:
            for future in self._waiting.get(name, ()):
                if not future.done():
                    future.set_result(None)

    def notify_all(self) -> None:
        """Wake every call that waits."""
        self.notify(list(self._waiting))
