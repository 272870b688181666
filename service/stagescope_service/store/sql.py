"""The store on a SQL database: one thread that commits the queued writes in groups.

A commit costs a disk flush regardless of its size, so writes are committed in groups. Everything
that arrives during one flush goes into the next transaction. It is merged into as few statements as
possible, with the result of the writes one after the other (`WriteBatch`).
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any, Final, TypeAlias

import sqlalchemy as sa

from stagescope_service.store import compact, connect, statements
from stagescope_service.store.contract import (
    Delete,
    Health,
    Put,
    RefusedWrite,
    RemoveRows,
    RemoveRun,
    Snapshot,
    Submitted,
    Write,
)
from stagescope_service.store.ids import Ids
from stagescope_service.store.removal import remove_run
from stagescope_service.store.snapshot import read_snapshot
from stagescope_service.store.statements import Conflict
from stagescope_service.store.tables import STEP_ROWS, TABLES, step_rows
from stagescope_wire.errors import CatalogueUnavailable, StoreError

logger = logging.getLogger(__name__)

GROUP_ROWS: Final = 20_000
"""Maximum rows of a group, so that no caller waits for an endless transaction."""

_COMMIT_DELAY: Final = 0.005
"""Seconds between two groups, as a transaction costs more than its rows. Calls of few events took
1.35 to 1.5 times the CPU of a bare actor's without a delay, and 1.1 to 1.25 times with it."""
_FIRST_PAUSE: Final = 0.05
_MAX_PAUSE: Final = 2.0


@dataclasses.dataclass(slots=True)
class _Submission:
    writes: Sequence[Write]
    future: Submitted
    isolate: bool


_Outcome: TypeAlias = "StoreError | Sequence[RefusedWrite]"
"""The outcome of a submission: why it failed as a whole, or the writes that were left out."""


class SqlStore:
    """`Store` on SQLite or PostgreSQL; see `contract.Store` for its guarantees.

    Args:
        url: SQLAlchemy's database URL, `sqlite:////data/catalogue.db` or `postgresql+psycopg://...`.

    Raises:
        CatalogueUnavailable: not the URL of a supported database.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._path = connect.sqlite_path(url)
        self._where = connect.url_without_password(url)
        self._file: tuple[int, int] | None = None
        self._writer: sa.Engine | None = None
        self._reader: sa.Engine | None = None
        self._thread: threading.Thread | None = None
        self._opening = threading.Lock()
        self._queue: deque[_Submission] = deque()
        self._changed = threading.Condition()
        self._ids = Ids()
        self._closed = False
        self._give_up_at: float | None = None
        self._health = Health(False, "the catalogue is not open yet")

    def open(self) -> None:
        """Create the catalogue if there is none, and start writing; see `Store`."""
        with self._opening:
            if self._thread is not None:
                return
            self._connect()
            self._closed, self._give_up_at = False, None
            self._health = Health(True)
            self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
            self._thread.start()

    def submit(self, writes: Sequence[Write], *, isolate: bool = False) -> Submitted:
        """Queue writes to commit atomically; before the first `open` they stay queued."""
        future: Submitted = Future()
        future.set_running_or_notify_cancel()  # cancelling the wait must not cancel the write
        with self._changed:
            if not self._closed:
                self._queue.append(_Submission(writes, future, isolate))
                self._changed.notify()
                return future
        future.set_exception(CatalogueUnavailable(f"catalogue {self._where} is closed"))
        return future

    def health(self) -> Health:
        """Return whether writes currently succeed."""
        health = self._health
        waiting = len(self._queue)
        if health.healthy or not waiting:
            return health
        return Health(False, f"{health.reason} ({waiting} writes wait)")

    def snapshot(self, closed_steps: int = 8) -> Snapshot:
        """Read the committed state in one transaction; see `Store`."""
        if self._reader is None:
            raise CatalogueUnavailable(f"catalogue {self._where} is not open", advice="open it")
        with connect.catalogue_errors(self._where), self._reader.begin() as connection:
            return read_snapshot(connection, closed_steps)

    def close(self, timeout: float = 10.0) -> None:
        """Write the queue and stop; writes not done in `timeout` seconds fail."""
        with self._opening:
            with self._changed:
                self._closed, self._give_up_at = True, time.monotonic() + timeout
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join()
            self._thread = None
            self._fail(self._drain(), CatalogueUnavailable(f"catalogue {self._where} is closed"))
            self._dispose()
            self._health = Health(False, "the catalogue is closed")

    # --- the writer's thread ----------------------------------------------------------------

    def _run(self) -> None:
        while group := self._next_group():
            self._write(group)
            if not self._closed:
                time.sleep(_COMMIT_DELAY)

    def _next_group(self) -> list[_Submission]:
        """Wait for submissions; return [] once the store is closed and everything is written."""
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            group: list[_Submission] = []
            rows = 0
            while self._queue and rows < GROUP_ROWS:
                group.append(self._queue.popleft())
                rows += len(group[-1].writes)
            return group

    def _write(self, group: list[_Submission]) -> None:
        """Commit a group, retrying as long as necessary, and resolve its futures."""
        pause = _FIRST_PAUSE
        while True:
            try:
                outcomes = self._commit(group)
                break
            except Exception as error:  # _commit handles all others
                reason = connect.explain(error, self._where)
                self._set_health(Health(False, str(reason)))
                if not self._wait(pause):
                    self._fail([*group, *self._drain()], reason)
                    return
                pause = min(2 * pause, _MAX_PAUSE)
        self._set_health(Health(True))
        for submission, outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, StoreError):
                submission.future.set_exception(outcome)
            else:
                submission.future.set_result(outcome)

    def _commit(self, group: list[_Submission]) -> list[_Outcome]:
        """Write a group in one transaction; return the outcome of each submission.

        Raises:
            Exception: nothing is written; the same group may be retried.
        """
        self._check_file()
        try:
            with self._begin() as connection:
                every = WriteBatch(write for one in group for write in one.writes)
                every.execute(connection, self._ids)
                self._check_file()
            return [()] * len(group)
        except Exception as error:
            self._ids.clear()
            if connect.is_transient(error):
                self._forget_connections(error)
                raise
        # Some write of the group is invalid: find its submission, and write the others.
        try:
            with self._begin() as connection:
                outcomes = [self._apply_separately(connection, one) for one in group]
                self._check_file()
            return outcomes
        except Exception as error:
            self._ids.clear()
            self._forget_connections(error)
            raise

    def _apply_separately(self, connection: sa.Connection, one: _Submission) -> _Outcome:
        error = self._apply(connection, one.writes)
        if error is None:
            return ()
        if not one.isolate:
            return error
        refused: list[RefusedWrite] = []
        self._isolate(connection, one.writes, error, refused)
        return refused

    def _isolate(
        self,
        connection: sa.Connection,
        writes: Sequence[Write],
        error: StoreError,
        refused: list[RefusedWrite],
    ) -> None:
        """Apply writes that failed together by halves, in their order, down to the refused ones."""
        if len(writes) == 1:
            refused.append(RefusedWrite(writes[0], str(error)))
            return
        middle = len(writes) // 2
        for half in (writes[:middle], writes[middle:]):
            if (failed := self._apply(connection, half)) is not None:
                self._isolate(connection, half, failed, refused)

    def _apply(self, connection: sa.Connection, writes: Sequence[Write]) -> StoreError | None:
        """Apply writes all or none; return the error if their values are the reason.

        Raises:
            Exception: a transient error.
        """
        try:
            with connection.begin_nested():
                WriteBatch(writes).execute(connection, self._ids)
        except Exception as error:
            self._ids.clear()
            if connect.is_transient(error):
                raise
            if isinstance(error, StoreError):
                return error
            cause = getattr(error, "orig", None) or error
            tables = ", ".join(sorted({write.table for write in writes}))
            return StoreError(f"the catalogue refused rows of {tables}: {cause!s:.500}")
        return None

    def _wait(self, seconds: float) -> bool:
        """Wait before the next try; return False if the store should give up instead."""
        until = time.monotonic() + seconds
        with self._changed:
            # A submission also wakes this wait, but is no reason to retry earlier.
            while (now := time.monotonic()) < (
                until if self._give_up_at is None else min(until, self._give_up_at)
            ):
                end = until if self._give_up_at is None else min(until, self._give_up_at)
                self._changed.wait(end - now)
            return self._give_up_at is None or now < self._give_up_at

    def _set_health(self, health: Health) -> None:
        before, self._health = self._health, health
        if before.healthy and not health.healthy:
            logger.error("The catalogue cannot be written, and writes wait: %s", health.reason)
        elif health.healthy and not before.healthy:
            logger.warning("The catalogue can be written again")

    def _drain(self) -> list[_Submission]:
        with self._changed:
            rest = list(self._queue)
            self._queue.clear()
            return rest

    @staticmethod
    def _fail(submissions: list[_Submission], error: CatalogueUnavailable) -> None:
        for submission in submissions:
            submission.future.set_exception(error)

    # --- connections ------------------------------------------------------------------------

    def _connect(self) -> None:
        self._dispose()
        self._ids.clear()
        with connect.catalogue_errors(self._where):
            writer = connect.writer_engine(self.url)
            try:
                with writer.begin() as connection:
                    connect.make_tables(connection)
            except BaseException:
                writer.dispose()
                raise
            self._file = connect.file_id(self._path) if self._path else None
            self._writer, self._reader = writer, connect.reader_engine(self.url)

    def _begin(self) -> AbstractContextManager[sa.Connection]:
        assert self._writer is not None
        return self._writer.begin()

    def _check_file(self) -> None:
        """Refuse to write to a file that is no longer the one at its path.

        SQLite continues to write a deleted file, and acknowledged commits would be lost.
        """
        if self._path is None or (found := connect.file_id(self._path)) == self._file:
            return
        if found is None:
            raise CatalogueUnavailable(
                f"catalogue {self._where} was removed while it was open",
                advice="put it back, or start the service again to begin a new one",
            )
        logger.warning("Catalogue %s was replaced by another file: opening that", self._where)
        self._connect()
        raise CatalogueUnavailable(f"catalogue {self._where} was replaced while it was open")

    def _forget_connections(self, error: BaseException) -> None:
        """Drop connections that an error of the disk or the server may have broken."""
        if self._writer is not None and "locked" not in str(error):
            self._writer.dispose()

    def _dispose(self) -> None:
        for engine in (self._writer, self._reader):
            if engine is not None:
                engine.dispose()
        self._writer = self._reader = None


_Key: TypeAlias = Callable[[Mapping[str, Any]], tuple[Any, ...]]


def _key_getter(name: str) -> _Key:
    if name in statements.NUMBERED:
        return lambda row: (id(row),)
    first, *others = statements.KEYS[name]
    return itemgetter(first, *others) if others else lambda row: (row[first],)


_GET_KEY: Final = {name: _key_getter(name) for name in TABLES}


class WriteBatch:
    """Writes in the order of their submission, executed with as few statements as possible.

    Rows of one key become one row, later columns replacing earlier ones, as if upserted one after
    the other. A delete separates the writes to its table before it from those after it; tables
    are independent of each other. The removal of a step's or a run's rows separates all writes.

    Raises:
        StoreError: a write that no database would accept; also by `execute`.
    """

    def __init__(self, writes: Iterable[Write]) -> None:
        tables: dict[str, list[dict[object, Mapping[str, Any]] | list[Delete]]] = {}
        merging: dict[str, tuple[_Key, dict[object, Mapping[str, Any]]]] = {}
        """Name -> key of a row, and the rows since the last delete by key."""
        self._parts: list[Any] = [tables]
        for write in writes:
            if type(write) is Put:
                name, row = write.table, write.row
                known = merging.get(name)
                if known is None:
                    if name not in _GET_KEY:
                        statements.check(write)
                    known = merging[name] = (_GET_KEY[name], {})
                    tables.setdefault(name, []).append(known[1])
                get_key, rows = known
                try:
                    key = get_key(row)
                except KeyError:
                    statements.check(write)
                    raise
                before = rows.get(key)
                if before is None:
                    if None in key:
                        statements.check(write)
                    rows[key] = row
                else:
                    rows[key] = {**before, **row}
                continue
            statements.check(write)
            if isinstance(write, RemoveRows | RemoveRun):
                tables, merging = {}, {}
                self._parts += [write, tables]
            elif isinstance(write, Delete):
                merging.pop(write.table, None)
                phases = tables.setdefault(write.table, [])
                last = phases[-1] if phases else None
                if isinstance(last, list):
                    last.append(write)
                else:
                    phases.append([write])

    def execute(self, connection: sa.Connection, ids: Ids | None = None) -> None:
        """Run the statements; errors of the database propagate.

        Args:
            connection: in a transaction.
            ids: the writer's ids; clear them if the transaction fails.
        """
        ids = ids or Ids()
        ids.forget_many()
        for part in self._parts:
            if isinstance(part, RemoveRows):
                _remove(connection, ids, part)
                continue
            if isinstance(part, RemoveRun):
                remove_run(connection, ids, part)
                continue
            for name, phases in part.items():
                for phase in phases:
                    if isinstance(phase, list):
                        _delete(connection, name, phase)
                    else:
                        _put(connection, ids, name, phase)


def _put(
    connection: sa.Connection, ids: Ids, name: str, rows: Mapping[Any, Mapping[str, Any]]
) -> None:
    groups: dict[tuple[str, ...], list[Mapping[str, object]]] = {}
    for row in rows.values():
        groups.setdefault(tuple(row), []).append(row)
    for names, group in groups.items():
        statements.check(Put(name, group[0]))
        if name in compact.COMPACT_VIEWS:
            compact.write(connection, ids, name, names, group)
            continue
        table, columns = TABLES[name], statements.columns_of(names, group)
        for column in names:
            kind = table.columns[column].type
            columns[column] = statements.stored(connection.dialect, kind, columns[column])
        conflict = None
        if name not in statements.NUMBERED:
            conflict = Conflict(frozenset(names).difference(statements.KEYS[name]))
        statements.insert(connection, table, columns, conflict)


def _delete(connection: sa.Connection, name: str, deletes: Iterable[Delete]) -> None:
    columns = TABLES[name].columns
    groups: dict[tuple[tuple[str, bool], ...], list[dict[str, object]]] = {}
    for one in deletes:
        kind = tuple((key, value is None) for key, value in one.where.items())
        values = {f"w_{key}": value for key, value in one.where.items() if value is not None}
        groups.setdefault(kind, []).append(values)
    for kind, rows in groups.items():
        where = [
            columns[key].is_(None) if is_none else columns[key] == sa.bindparam(f"w_{key}")
            for key, is_none in kind
        ]
        if name in compact.COMPACT_VIEWS:
            connection.execute(compact.delete(name, where), rows)
        else:
            connection.execute(sa.delete(TABLES[name]).where(*where), rows)


def _remove(connection: sa.Connection, ids: Ids, one: RemoveRows) -> None:
    left = one.limit
    for name in STEP_ROWS:
        if left <= 0:
            return
        where = step_rows(name, one.attempt_id, one.step)
        if name in compact.COMPACT_VIEWS:
            statement = compact.delete(name, where, left)
        else:
            table = TABLES[name]
            key = list(table.primary_key)
            found = sa.select(*key).where(*where).limit(left)
            # With the condition twice: by the key alone, SQLite searches all of the attempt.
            statement = sa.delete(table).where(*where, sa.tuple_(*key).in_(found))
        left -= connection.execute(statement).rowcount
    if left > 0:
        compact.remove_works(connection, ids, one.attempt_id, one.step)
