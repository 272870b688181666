"""The base of all queries: read transactions, filters and pagination."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict, TypeVar, cast

import sqlalchemy as sa

from stagescope_service.store import connect
from stagescope_service.store.snapshot import Query, rows
from stagescope_service.store.tables import TABLES
from stagescope_wire.nonfinite import JsonObject

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

Filter: TypeAlias = str | int | bool | Sequence[str] | Sequence[int] | None


class RankFilter(TypedDict, total=False):
    """Selects rows of a stage and of ranks."""

    stage: Filter
    role: Filter
    rank: Filter


class ScopeFilter(TypedDict, total=False):
    """Selects rows of an attempt, or of all attempts of a run."""

    run: Filter
    attempt_id: Filter


class StepWindow(TypedDict, total=False):
    """Selects the rows of steps from `first` to `last`, both included; None means no bound."""

    first: int | None
    last: int | None


class StepRange(TypedDict):
    """The steps from `first` to `last`, both included."""

    first: int
    last: int


R = TypeVar("R")
"""The type of a query's rows: a TypedDict with the columns that it selects."""

T = TypeVar("T")

LIMIT: Final = 1000
_AT_ONCE: Final = 200


class Reader:
    """Opens the catalogue at a URL read-only; reopens it if its file was replaced."""

    def __init__(self, url: str) -> None:
        """Open the catalogue at `url`."""
        self._url = url
        self._where = connect.url_without_password(url)
        self._path: Path | None = connect.sqlite_path(url)
        self._file = connect.file_id(self._path) if self._path else None
        self._engine = connect.reader_engine(url)
        self._pinned: sa.Connection | None = None
        self._found: dict[Hashable, Any] = {}
        """What a snapshot has found already."""

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Self]:
        """Yield a copy whose queries all see the catalogue as it is now, for one thread.

        For answers that follow from several queries: a commit between two of them would make one
        contradict the other.
        """
        if self._pinned is not None:
            yield self
            return
        self._reopen_if_replaced()
        # Each statement of PostgreSQL's default level sees what was committed before it.
        options = {} if self._path else {"isolation_level": "REPEATABLE READ"}
        engine = self._engine.execution_options(**options)
        with connect.catalogue_errors(self._where), engine.begin() as connection:
            pinned = copy.copy(self)
            pinned._pinned, pinned._found = connection, {}
            yield pinned

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with connect.catalogue_errors(self._where):
            if self._pinned is not None:
                yield self._pinned
                return
            self._reopen_if_replaced()
            with self._engine.begin() as connection:
                yield connection

    def _reopen_if_replaced(self) -> None:
        if self._path and (found := connect.file_id(self._path)) != self._file:
            self._engine.dispose()  # the file was replaced
            self._file = found

    def _rows(self, row: type[R], query: Query, parameters: JsonObject | None = None) -> list[R]:
        with self._reading() as connection:
            return rows(row, connection, query, parameters)

    def _values(self, query: sa.Select[T]) -> list[T]:
        """Return the values of a query's only column."""
        with self._reading() as connection:
            return [*connection.scalars(query)]

    def _tuples(
        self, query: Query, parameters: JsonObject | None = None
    ) -> Sequence[tuple[Any, ...]]:
        """Return the rows of a query as tuples: a dict a row would take longer than the query."""
        with self._reading() as connection:
            return connection.execute(query, parameters).all()

    def _each(self, row: type[R], query: Query) -> Iterator[R]:
        """Yield the rows of a query as they are read, for results larger than memory."""
        names: list[str] | None = None
        with contextlib.closing(self._stream(query)) as found:
            for values in found:  # a mapping of SQLAlchemy costs several times this dict
                names = names or [*values._fields]
                yield cast("R", dict(zip(names, values, strict=True)))

    def _stream(self, query: Query) -> Generator[sa.Row[Any], None, None]:
        """Yield the rows of a query as they are read, see `_tuples`."""
        with self._reading() as connection:
            streaming = connection.execution_options(yield_per=_AT_ONCE)
            # Close the cursor before returning the connection, even if not all rows are read: when
            # Python 3.10 frees an unclosed cursor later, it resets the cached statement that
            # another cursor runs, and that one reads its first rows again.
            with streaming.execute(query) as found:
                for part in found.partitions():
                    yield from part

    def _once(self, key: Hashable, find: Callable[[], T]) -> T:
        """Return what a method finds in the catalogue; a snapshot looks for it once.

        Args:
            key: the method and its arguments.
            find: looks for it.
        """
        if self._pinned is None:
            return find()
        if key not in self._found:
            self._found[key] = find()
        return cast("T", self._found[key])

    def _first(self, row: type[R], query: Query) -> R | None:
        found = self._rows(row, query.limit(1))
        return found[0] if found else None

    def _one(self, row: type[R], name: str, **key: Filter) -> R | None:
        return self._first(row, sa.select(TABLES[name]).where(*conditions(name, **key)))

    def _page(
        self,
        row: type[R],
        name: str,
        where: list[sa.ColumnElement[bool]],
        order: str,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[R]:
        query = all_rows(name, order).where(*where)
        return self._rows(row, query if limit is None else query.limit(limit).offset(offset))


# Building a small query is most of its cost: half of 2 ms.
@functools.lru_cache(maxsize=256)
def all_rows(name: str, order: str, without: str = "") -> Query:
    """Select a table's rows by columns (`-name` descending), some of its columns left out."""
    table, left_out = TABLES[name], without.split()
    chosen = (column for column in table.columns if column.name not in left_out)
    return sa.select(*chosen).order_by(*order_of(table, order))


def order_of(table: sa.Table, order: str) -> list[sa.ColumnElement[object]]:
    """Return the columns that sort rows, `-name` descending, separated by spaces."""
    return [
        table.c[name[1:]].desc() if name.startswith("-") else table.c[name]
        for name in order.split()
    ]


def conditions(table: str, /, **filters: object) -> list[sa.ColumnElement[bool]]:
    """Return conditions for the filters, each named as its column, that are not None.

    Raises:
        KeyError: the table has no such column.
    """
    columns = TABLES[table].columns
    return [
        columns[key].in_(list(value))
        if isinstance(value, Sequence) and not isinstance(value, str)
        else columns[key] == value
        for key, value in filters.items()
        if value is not None
    ]


def between(
    column: sa.ColumnElement[object], first: int | None = None, last: int | None = None
) -> list[sa.ColumnElement[bool]]:
    """Return the conditions of a range of steps, both ends included."""
    bounds = [column >= first] if first is not None else []
    return bounds + ([column <= last] if last is not None else [])


def is_kept(column: sa.ColumnElement[bytes | None]) -> sa.ColumnElement[bool]:
    """Return the condition that a large column has a value, whose bytes are not read for it.

    SQLite reads the whole value for `IS NOT NULL`. It knows the length from the row's header.
    """
    return sa.func.length(column).is_not(None)


def in_window(
    name: str, attempts: Sequence[int], **window: Unpack[StepWindow]
) -> list[sa.ColumnElement[bool]]:
    """Return the conditions of the rows of attempts in a window of steps."""
    table = TABLES[name].c
    return [table.attempt_id.in_(list(attempts)), *between(table.step, **window)]


def of_few(name: str, attempts: Filter) -> list[sa.ColumnElement[bool]]:
    """Return the condition on `attempt_id` of a query that finds few rows by a partial index.

    The sum keeps SQLite from the index of attempts, which it would prefer.
    """
    if attempts is None:
        return []
    attempt_id = TABLES[name].c.attempt_id + 0
    several = [attempts] if isinstance(attempts, str | int) else list(attempts)
    return [attempt_id.in_(several)]
