"""Commits rows, says which payloads' ends are on disk, and wakes the calls that wait for either."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence

from stagescope_service.core.instructions import PayloadKey
from stagescope_service.core.state import State
from stagescope_service.store.contract import Put, RefusedWrite, Store, Write
from stagescope_wire.errors import NotReady


class Commits:
    """Commits rows and wakes the calls that wait for them; used from one event loop."""

    def __init__(self, state: State, store: Store) -> None:
        self.state = state
        self.store = store
        self._uncommitted: Counter[PayloadKey] = Counter()
        """Payloads settled in memory whose end is being written."""
        self._unwritten: set[PayloadKey] = set()
        """Payloads settled in memory whose end the last try did not write."""
        self._waiting: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self.removed: set[int] = set()
        """Attempts that were deleted: rows that work under way still makes of them are left out."""
        self._turns: dict[str, asyncio.Future[bool]] = {}
        """Name -> whether its newest turn, and each before it, was written."""

    def check_ready(self) -> None:
        """Raise `NotReady` while the catalogue cannot be written."""
        health = self.store.health()
        if not health.healthy:
            raise NotReady(
                f"the catalogue cannot be written: {health.reason}",
                advice="nothing was taken in; the same call may be made again",
            )

    async def commit_all(self, rows: Sequence[Write]) -> None:
        """Write all rows or none; return after the commit.

        Raises:
            StoreError: the catalogue can never accept one of them.
        """
        if rows := self._of_known(rows):
            await asyncio.wrap_future(self.store.submit(rows))

    async def commit(
        self, rows: Sequence[Write], settled: Sequence[PayloadKey] = ()
    ) -> Sequence[RefusedWrite]:
        """Write rows, among them the ends of the `settled` payloads; return after the commit.

        A row that the catalogue can never accept is left out, and returned.
        """
        rows = self._of_known(rows)
        if not rows:
            return ()
        self._uncommitted.update(settled)
        written = asyncio.wrap_future(self.store.submit(rows, isolate=True))
        # The write goes on if this call is cancelled: its outcome must be noted all the same.
        written.add_done_callback(functools.partial(self._note_written, rows, settled))
        return await asyncio.shield(written)

    def _of_known(self, rows: Sequence[Write]) -> Sequence[Write]:
        if not self.removed:
            return rows
        return [
            each
            for each in rows
            if not isinstance(each, Put) or each.row.get("attempt_id") not in self.removed
        ]

    @contextlib.asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Wait, once the block has written its rows, until each earlier turn of the name has.

        An event that is sent again makes no rows: the rows of its first time may still be on their
        way to the disk.

        Raises:
            NotReady: an earlier turn was not written.
        """
        before = self._turns.get(name)
        written = asyncio.get_running_loop().create_future()
        self._turns[name] = written
        is_written = False
        try:
            yield
            if before is not None and not await before:
                raise NotReady("an earlier call was not written; make this one again")
            is_written = True
        finally:
            written.set_result(is_written)
            if self._turns.get(name) is written:
                del self._turns[name]

    def _note_written(
        self,
        rows: Sequence[Write],
        settled: Sequence[PayloadKey],
        written: asyncio.Future[Sequence[RefusedWrite]],
    ) -> None:
        failed = written.cancelled() or written.exception() is not None
        left_out = [*rows] if failed else [each.write for each in written.result()]
        if left_out or self._unwritten:
            missing = set(_payloads_of(left_out))
            self._unwritten -= {*_payloads_of(rows)} - missing
            self._unwritten |= missing.intersection(settled)
        self._uncommitted.subtract(settled)
        for key in settled:
            if self._uncommitted[key] <= 0:
                del self._uncommitted[key]

    def is_written(self, key: PayloadKey) -> bool:
        """Return whether the end of a settled payload is on disk.

        A sender that hears of the end lets the payload go.
        """
        return key not in self._uncommitted and key not in self._unwritten

    def receipts(self, incarnation: str, seqs: Iterable[int]) -> dict[int, str]:
        """Return seq -> state of those payloads whose end is on disk."""
        process = self.state.registry.processes.get(incarnation)
        if process is None:
            return {}
        return {
            seq: process.settled[seq]
            for seq in seqs
            if seq in process.settled and self.is_written(PayloadKey(incarnation, seq))
        }

    async def wait(self, names: Sequence[str], seconds: float) -> None:
        """Wait until an incarnation or a capture of `names` is notified, at most `seconds`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for name in names:
            self._waiting[name].add(future)
        try:
            await asyncio.wait({future}, timeout=seconds)
        finally:
            for name in names:
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


def _payloads_of(rows: Iterable[Write]) -> Iterable[PayloadKey]:
    """Return the payloads whose rows are among these."""
    for write in rows:
        if isinstance(write, Put) and write.table == "payloads":
            yield PayloadKey(write.row["incarnation"], write.row["seq"])
