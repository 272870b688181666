"""Commits rows, says which payloads' ends are on disk, and wakes the calls that wait for either."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

from stagescope_service.core.instructions import PayloadKey
from stagescope_service.core.state import State
from stagescope_service.store.contract import Put, RefusedWrite, Store, Submitted, Write
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
        self._outcomes: _Outcomes | None = None

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
        if settled:
            self._uncommitted.update(settled)
        loop = asyncio.get_running_loop()
        if self._outcomes is None or self._outcomes.loop is not loop:
            self._outcomes = _Outcomes(loop)
        # The write goes on if this call is cancelled: its outcome must be noted all the same.
        answer: asyncio.Future[Sequence[RefusedWrite]] = loop.create_future()
        note = functools.partial(self._note_written, rows, settled, answer)
        self._outcomes.follow(self.store.submit(rows, isolate=True), note)
        return await answer

    def _of_known(self, rows: Sequence[Write]) -> Sequence[Write]:
        if not self.removed:
            return rows
        return [
            each
            for each in rows
            if not isinstance(each, Put) or each.row.get("attempt_id") not in self.removed
        ]

    def turn(self, name: str) -> Turn:
        """Return a block that ends once its rows and those of the name's earlier turns are written.

        An event that is sent again makes no rows: the rows of its first time may still be on their
        way to the disk.
        """
        return Turn(self._turns, name)

    def _note_written(
        self,
        rows: Sequence[Write],
        settled: Sequence[PayloadKey],
        answer: asyncio.Future[Sequence[RefusedWrite]],
        written: Submitted,
    ) -> None:
        error = written.exception()
        refused = () if error is not None else written.result()
        left_out = [*rows] if error is not None else [each.write for each in refused]
        if left_out or self._unwritten:
            missing = set(_payloads_of(left_out))
            self._unwritten -= {*_payloads_of(rows)} - missing
            self._unwritten |= missing.intersection(settled)
        for key in settled:
            self._uncommitted[key] -= 1
            if self._uncommitted[key] <= 0:
                del self._uncommitted[key]
        if answer.done():
            return  # its call was cancelled
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(refused)

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


class Turn:
    """A block of `Commits.turn`. (A decorated generator takes five times as long.)

    Raises:
        NotReady: an earlier turn was not written.
    """

    def __init__(self, turns: dict[str, asyncio.Future[bool]], name: str) -> None:
        self._turns = turns
        self._name = name
        self._before = turns.get(name)
        self._written = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> None:
        self._turns[self._name] = self._written

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_written = False
        try:
            if kind is None:
                # A shield: a call that is cancelled must not cancel the turn that it waits for.
                if self._before is not None and not await asyncio.shield(self._before):
                    raise NotReady("an earlier call was not written; make this one again")
                is_written = True
        finally:
            self._written.set_result(is_written)
            if self._turns.get(self._name) is self._written:
                del self._turns[self._name]


class _Outcomes:
    """Hands the outcomes of writes over to an event loop.

    To wake the loop takes a system call: it wakes once for all that are known by then.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._known: deque[Callable[[], None]] = deque()
        self._is_woken = False

    def follow(self, written: Submitted, note: Callable[[Submitted], None]) -> None:
        """Call `note` in the loop once the outcome is known."""
        written.add_done_callback(functools.partial(self._put, note))

    def _put(self, note: Callable[[Submitted], None], written: Submitted) -> None:
        self._known.append(functools.partial(note, written))
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
                self.loop.call_soon_threadsafe(self._note_all)

    def _note_all(self) -> None:
        self._is_woken = False  # first: what comes from here on wakes the loop again
        while self._known:
            self._known.popleft()()


def _payloads_of(rows: Iterable[Write]) -> Iterable[PayloadKey]:
    """Return the payloads whose rows are among these."""
    for write in rows:
        if isinstance(write, Put) and write.table == "payloads":
            yield PayloadKey(write.row["incarnation"], write.row["seq"])
